"""Generate images, clips and volumes by diffusion.

python tasks/image_gen.py                     handwritten digits: train, sample, test
python tasks/image_gen.py fit     --config configs/handwritten_gen.yaml
python tasks/image_gen.py predict --config ... --ckpt_path .../last.ckpt
"""

import os
import sys

if __name__ == "__main__":
    # before torch is loaded: threads that wait for others soon sleep, or runs side by side stall each other
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    from ndlightnet.__main__ import door

    sys.exit(door("image_gen"))
