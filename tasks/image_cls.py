"""Classify grey images and volumes of one size.

python tasks/image_cls.py                  configs/fashion_mnist.yaml, for a GPU: train, test
python tasks/image_cls.py fit  --config configs/adrenal.yaml
python tasks/image_cls.py test --config ... --ckpt_path runs/adrenal/checkpoints/last.ckpt
"""

import sys
from pathlib import Path

from ndlightnet.training import run
from ndlightnet.training.classification.images import ImageData, ImageTask

if __name__ == "__main__":
    configs = Path(__file__).parents[1] / "configs"
    sys.exit(run(ImageTask, ImageData, configs / "fashion_mnist.yaml"))
