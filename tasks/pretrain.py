"""Learn from images, videos or volumes without labels: predict what is dropped of them.

python tasks/pretrain.py                      digits in colour, made here: train, test, pictures
python tasks/pretrain.py fit --config configs/coloured_digits_pretrain.yaml
python tasks/image_cls.py fit --config configs/coloured_digits.yaml
    --model.init runs/coloured_digits_pretrain/checkpoints/last.ckpt
"""

import os
import sys

if __name__ == "__main__":
    # before torch is loaded: threads that wait for others soon sleep, or runs side by side stall each other
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    from ndlightnet.__main__ import door

    sys.exit(door("pretrain"))
