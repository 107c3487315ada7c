"""Generate images, clips and volumes by diffusion.

python tasks/image_gen.py                     handwritten digits: train, sample, test
python tasks/image_gen.py fit     --config configs/handwritten_gen.yaml
python tasks/image_gen.py predict --config ... --ckpt_path .../last.ckpt
"""

import sys

if __name__ == "__main__":
    from ndlightnet.__main__ import door

    sys.exit(door("image_gen"))
