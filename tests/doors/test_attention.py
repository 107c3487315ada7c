"""The doors of attention.py, for the layers of the table."""

import pytest

from . import attention
from .cases import CASES

LAYERS = ["MultiheadAttention", "mixer GLA", "mixer Mamba", "mixer SoftmaxAttention"]


@pytest.mark.parametrize("door", ["timm", "monai"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_at_home(name, door, tmp_path):
    pytest.importorskip(door)
    getattr(attention, door)(CASES[name], tmp_path)
