"""Classify signals of different lengths: spoken digits, in batches without padding.

python tasks/signal_cls.py                  configs/spoken_digits.yaml, for a GPU: train, test
python tasks/signal_cls.py fit  --config configs/spoken_digits.yaml --data.batching padded
python tasks/signal_cls.py test --config ... --ckpt_path runs/spoken_digits/checkpoints/last.ckpt
"""

import sys
from pathlib import Path

from ndlightnet.training import SignalData, SignalTask, run

if __name__ == "__main__":
    configs = Path(__file__).parents[1] / "configs"
    sys.exit(run(SignalTask, SignalData, configs / "spoken_digits.yaml"))
