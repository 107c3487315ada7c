"""Segment volumes (CT, MRI, several channels).

python tasks/ct_segmentation.py                  phantoms, made here: train, test, pictures
python tasks/ct_segmentation.py plan scans/      read a folder of volumes and labels, write a
                                                 config, runs/scans/plan.yaml
python tasks/ct_segmentation.py fit     --config runs/scans/plan.yaml
python tasks/ct_segmentation.py test    --config ... --ckpt_path runs/scans/checkpoints/best.ckpt
python tasks/ct_segmentation.py predict --config ... --ckpt_path ... --data.input new_scans/
python tasks/ct_segmentation.py fit     --config configs/moving_phantoms.yaml    series over time
python tasks/ct_segmentation.py folds   --config ...    5-fold cross-validation
python tasks/ct_segmentation.py bundle  --config ... --ckpt_path ... --out bundles/scans
"""

import sys

if __name__ == "__main__":
    from ndlightnet.__main__ import door

    sys.exit(door("ct_segmentation"))
