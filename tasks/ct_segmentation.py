"""Segment volumes (CT, MRI, several channels).

python tasks/ct_segmentation.py                  phantoms, made here: train, test, pictures
python tasks/ct_segmentation.py plan scans/      look at a folder of volumes and labels, write a
                                                 config, runs/scans/plan.yaml
python tasks/ct_segmentation.py fit     --config runs/scans/plan.yaml
python tasks/ct_segmentation.py test    --config ... --ckpt_path runs/scans/checkpoints/best.ckpt
python tasks/ct_segmentation.py predict --config ... --ckpt_path ... --data.input new_scans/
python tasks/ct_segmentation.py folds   --config ...    5-fold cross-validation
python tasks/ct_segmentation.py bundle  --config ... --ckpt_path ... --out bundles/scans
"""

import os
import sys
from pathlib import Path

# OpenMP's threads wait without spinning: beside another process a step took seven times as long.
# Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from jsonargparse import auto_cli

from ndlightnet.training import SegmentationTask, VolumeData, run
from ndlightnet.training.segmentation.bundle import bundle
from ndlightnet.training.segmentation.folds import folds
from ndlightnet.training.segmentation.plan import plan

if __name__ == "__main__":
    configs = Path(__file__).parents[1] / "configs"
    planned = lambda arguments: auto_cli(plan, args=arguments)  # noqa: E731
    commands = {"plan": planned, "folds": folds, "bundle": bundle}
    sys.exit(run(SegmentationTask, VolumeData, configs / "phantoms.yaml", commands))
