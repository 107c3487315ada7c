"""Classify clouds of points: made shapes, or your own in folders train/CLASS and test/CLASS.

python tasks/point_cls.py                    configs/shape_classes.yaml: train, test
python tasks/point_cls.py fit     --config configs/shape_classes.yaml
python tasks/point_cls.py test    --config ... --ckpt_path runs/shape_classes/checkpoints/last.ckpt
python tasks/point_cls.py predict --config ... --ckpt_path ... --data.input clouds/
"""

import sys

if __name__ == "__main__":
    from ndlightnet.__main__ import door

    sys.exit(door("point_cls"))
