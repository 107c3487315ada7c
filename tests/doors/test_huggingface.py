"""The doors to Hugging Face, for all models of the table."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("diffusers")

from . import huggingface
from .cases import CASES, NotApplicable

CLASSES = {x for x in CASES if x.startswith(("NDLightNet,", "causal"))}


@pytest.mark.parametrize("name", CASES)
def test_transformers(name: str, tmp_path: Path) -> None:
    huggingface.transformers(CASES[name], tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_diffusers(name: str, tmp_path: Path) -> None:
    if name in CLASSES:
        with pytest.raises(NotApplicable, match="predicts classes"):
            huggingface.diffusers(CASES[name], tmp_path)
        return
    huggingface.diffusers(CASES[name], tmp_path)
