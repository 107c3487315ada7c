"""Classify volumes: MedMNIST's npz files, or folders of scans, one for each class.

python tasks/volume_cls.py                 configs/adrenal28.yaml, for a GPU: train, test
python tasks/volume_cls.py fit     --config configs/adrenal64.yaml
python tasks/volume_cls.py test    --config ... --ckpt_path runs/adrenal64/checkpoints/last.ckpt

Folders `train/CLASS/*`, `test/CLASS/*` and optionally `val/CLASS/*`; predict writes a CSV:

python tasks/volume_cls.py fit     --config configs/scan_classes.yaml --data.root scans
python tasks/volume_cls.py predict --config ... --ckpt_path ... --data.input scan.nii.gz
"""

import sys

if __name__ == "__main__":
    from ndlightnet.__main__ import door

    sys.exit(door("volume_cls"))
