"""Classify videos.

python tasks/video_cls.py                      moving digits, made here: train, test, pictures
python tasks/video_cls.py fit     --config configs/surveillance.yaml
python tasks/video_cls.py test    --config ... --ckpt_path runs/surveillance/checkpoints/last.ckpt
python tasks/video_cls.py predict --config ... --ckpt_path ... --data.input clip.mp4
"""

import sys
from pathlib import Path

from ndlightnet.training import VideoData, VideoTask, run

if __name__ == "__main__":
    configs = Path(__file__).parents[1] / "configs"
    sys.exit(run(VideoTask, VideoData, configs / "digits.yaml"))
