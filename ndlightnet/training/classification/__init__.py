"""Classification of images, videos, volumes and signals."""
