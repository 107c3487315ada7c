"""Learn from images, videos or volumes without labels: predict what is dropped of them.

python tasks/pretrain.py                      digits in colour, made here: train, test, pictures
python tasks/pretrain.py fit --config configs/coloured_digits_pretrain.yaml
python tasks/image_cls.py fit --config configs/coloured_digits.yaml
    --model.init runs/coloured_digits_pretrain/checkpoints/last.ckpt
"""

import sys

if __name__ == "__main__":
    from ndlightnet.__main__ import door

    sys.exit(door("pretrain"))
