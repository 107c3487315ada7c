"""The doors of timm, segmentation_models_pytorch and MONAI for every model of the table."""

import re

import pytest

for library in ("timm", "segmentation_models_pytorch", "monai"):
    pytest.importorskip(library)
from . import backbones  # noqa: E402
from .cases import CASES, NotApplicable  # noqa: E402

LAYER = "MultiheadAttention is a layer"
IMAGES, OWN = "smp has images only", "NDLightUNet has its own"
REFUSED = {
    ("causal text", "monai"): (ValueError, "vocab_size=50 and 12 blocks: expected a network of"),
    ("causal text", "smp"): (NotApplicable, IMAGES),
    ("causal video", "smp"): (NotApplicable, IMAGES),
    ("NDLightNet, 1 axis", "smp"): (NotApplicable, IMAGES),
    ("NDLightNet, 3 axes", "smp"): (NotApplicable, IMAGES),
    ("NDLightUNet, 2 axes", "smp"): (NotApplicable, OWN),
    ("NDLightUNet, 3 axes", "smp"): (NotApplicable, OWN),
    **{("MultiheadAttention", door): (NotApplicable, LAYER) for door in ("timm", "smp", "monai")},
}


@pytest.mark.parametrize("door", ["timm", "smp", "monai"])
@pytest.mark.parametrize("name", CASES)
def test_door(name, door, tmp_path):
    open_door = getattr(backbones, door)
    if (name, door) not in REFUSED:
        return open_door(CASES[name], tmp_path)
    kind, reason = REFUSED[name, door]
    with pytest.raises(kind, match=re.escape(reason)):
        open_door(CASES[name], tmp_path)
