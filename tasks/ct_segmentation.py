"""Segment volumes (CT, MRI, several channels).

python tasks/ct_segmentation.py                      phantoms, made here: train, test, pictures
python tasks/ct_segmentation.py fit     --config configs/hippocampus.yaml
python tasks/ct_segmentation.py test    --config ... --ckpt_path
runs/hippocampus/checkpoints/best.ckpt python tasks/ct_segmentation.py predict --config ...
--ckpt_path ... --data.input scan.nii.gz
"""

import sys
from pathlib import Path

from ndlightnet.training import SegmentationTask, VolumeData, run

if __name__ == "__main__":
    configs = Path(__file__).parents[1] / "configs"
    sys.exit(run(SegmentationTask, VolumeData, configs / "phantoms.yaml"))
