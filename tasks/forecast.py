"""Forecast a regular series: ETT, 720 hours from 336, with cross attention.

python tasks/forecast.py                    configs/ett.yaml, for a GPU: train, test
python tasks/forecast.py fit     --config configs/ett.yaml --data.init_args.horizon 96
python tasks/forecast.py test    --config ... --ckpt_path runs/ett/checkpoints/best.ckpt
python tasks/forecast.py predict --config ... --ckpt_path ... --data.init_args.input mine.csv
"""

import os
import sys

if __name__ == "__main__":
    # before torch is loaded: threads that wait for others soon sleep, or runs side by side stall each other
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    from ndlightnet.__main__ import door

    sys.exit(door("forecast"))
