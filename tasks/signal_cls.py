"""Classify signals of different lengths: spoken digits, in batches without padding.

python tasks/signal_cls.py                  configs/spoken_digits.yaml, for a GPU: train, test
python tasks/signal_cls.py fit  --config configs/spoken_digits.yaml --data.batching padded
python tasks/signal_cls.py test --config ... --ckpt_path runs/spoken_digits/checkpoints/last.ckpt
"""

import sys

if __name__ == "__main__":
    from ndlightnet.__main__ import door

    sys.exit(door("signal_cls"))
