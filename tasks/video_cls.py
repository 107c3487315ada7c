"""Classify videos.

python tasks/video_cls.py                      moving digits, made here: train, test, pictures
python tasks/video_cls.py fit     --config configs/surveillance.yaml
python tasks/video_cls.py test    --config ... --ckpt_path runs/surveillance/checkpoints/last.ckpt
python tasks/video_cls.py predict --config ... --ckpt_path ... --data.input clip.mp4

A network that was trained by `fit ... --model.causal true` also predicts while a video runs, one
line of CSV for each frame:

python tasks/video_cls.py stream  --config ... --ckpt_path ... --data.input clip.mp4
ffmpeg -f v4l2 -i /dev/video0 -c:v libx264 -tune zerolatency -f mpegts - |
    python tasks/video_cls.py stream --config ... --ckpt_path ... --data.input -
"""

import sys

if __name__ == "__main__":
    from ndlightnet.__main__ import door

    sys.exit(door("video_cls"))
