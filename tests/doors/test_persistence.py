"""The doors of tests/doors/persistence.py, each with every model of the table."""

import pytest

from .cases import CASES, NotApplicable
from .persistence import hub, safetensors

pytest.importorskip("safetensors")
pytest.importorskip("huggingface_hub")


@pytest.mark.parametrize("name", CASES)
def test_hub(name, tmp_path):
    if name == "MultiheadAttention":
        with pytest.raises(NotApplicable, match="MultiheadAttention is a layer"):
            hub(CASES[name], tmp_path)
    else:
        hub(CASES[name], tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_safetensors(name, tmp_path):
    safetensors(CASES[name], tmp_path)
