"""Classify grey images and volumes of one size.

python tasks/image_cls.py                  configs/fashion_mnist.yaml, for a GPU: train, test
python tasks/image_cls.py fit  --config configs/adrenal.yaml
python tasks/image_cls.py test --config ... --ckpt_path runs/adrenal/checkpoints/last.ckpt
"""

import sys

from ndlightnet.__main__ import door

if __name__ == "__main__":
    sys.exit(door("image_cls"))
