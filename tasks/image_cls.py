"""Classify images: a folder of class folders, in colour or grey; grey images in arrays.

python tasks/image_cls.py                  coloured digits, made here: train, test, pictures
python tasks/image_cls.py fit     --config configs/cifar10.yaml
python tasks/image_cls.py test    --config ... --ckpt_path runs/cifar10/checkpoints/best.ckpt
python tasks/image_cls.py predict --config ... --ckpt_path ... --data.input photos/
"""

import sys

if __name__ == "__main__":
    from ndlightnet.__main__ import door

    sys.exit(door("image_cls"))
