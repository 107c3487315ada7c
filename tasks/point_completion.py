"""Complete clouds of points of which a part is seen: made shapes, surfaces of organs, or .ply, .npy, .xyz and masks.

python tasks/point_completion.py                    configs/made_shapes.yaml: train, test
python tasks/point_completion.py fit     --config configs/adrenal_points.yaml
python tasks/point_completion.py test    --config ... --ckpt_path runs/adrenal_points/checkpoints/last.ckpt
python tasks/point_completion.py predict --config ... --ckpt_path ... --data.input clouds/
"""

import sys

if __name__ == "__main__":
    from ndlightnet.__main__ import door

    sys.exit(door("point_completion"))
