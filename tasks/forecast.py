"""Forecast an hourly series: ETT, 720 hours from 336, with cross attention.

python tasks/forecast.py                    configs/ett.yaml, for a GPU: train, test
python tasks/forecast.py fit     --config configs/ett.yaml --data.init_args.horizon 96
python tasks/forecast.py test    --config ... --ckpt_path runs/ett/checkpoints/best.ckpt
python tasks/forecast.py predict --config ... --ckpt_path ... --data.init_args.input mine.csv
"""

import sys
from pathlib import Path

from ndlightnet.training import run
from ndlightnet.training.forecasting.series import ForecastTask, SeriesData

if __name__ == "__main__":
    configs = Path(__file__).parents[1] / "configs"
    sys.exit(run(ForecastTask, SeriesData, configs / "ett.yaml"))
