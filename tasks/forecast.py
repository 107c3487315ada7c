"""Forecast a regular series: ETT, 720 hours from 336, with cross attention.

python tasks/forecast.py                    configs/ett.yaml, for a GPU: train, test
python tasks/forecast.py fit     --config configs/ett.yaml --data.init_args.horizon 96
python tasks/forecast.py test    --config ... --ckpt_path runs/ett/checkpoints/best.ckpt
python tasks/forecast.py predict --config ... --ckpt_path ... --data.init_args.input mine.csv
"""

import sys

if __name__ == "__main__":
    from ndlightnet.__main__ import door

    sys.exit(door("forecast"))
