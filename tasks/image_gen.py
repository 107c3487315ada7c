"""Generate images, clips and volumes by diffusion.

python tasks/image_gen.py                     handwritten digits: train, sample, test
python tasks/image_gen.py fit     --config configs/handwritten_gen.yaml
python tasks/image_gen.py predict --config ... --ckpt_path .../last.ckpt
"""

import sys

from ndlightnet.__main__ import door

if __name__ == "__main__":
    sys.exit(door("image_gen"))
