"""Generation of images, clips and volumes by diffusion."""
