"""The table models x doors of ndlightnet/integrations/README.md: each cell is a test, open, or
refused with its reason. A door's own file beside this one says what it asserts."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from .cases import CASES, Case, NotApplicable

Door = Callable[[Case, Path], None]
ROOT = Path(__file__).parents[2]
LAYER = "MultiheadAttention"
# door: the files with a function of this name, and the packages they need
DOORS = {
    "compile": (["deployment"], []),
    "export": (["deployment"], []),
    "onnx": (["deployment"], ["onnxscript", "onnxruntime"]),
    "aoti": (["deployment"], []),
    "trace": (["deployment"], []),
    "func": (["deployment"], []),
    "ddp": (["parallel"], []),
    "fsdp2": (["parallel"], []),
    "hub": (["persistence"], ["huggingface_hub", "safetensors"]),
    "safetensors": (["persistence"], ["safetensors"]),
    "timm": (["backbones", "attention"], ["timm", "monai", "segmentation_models_pytorch"]),
    "monai": (["backbones", "attention"], ["timm", "monai", "segmentation_models_pytorch"]),
    "smp": (["backbones"], ["timm", "monai", "segmentation_models_pytorch"]),
    "transformers": (["huggingface"], ["transformers", "diffusers"]),
    "diffusers": (["huggingface"], ["transformers", "diffusers"]),
}
IMAGES, OWN = "smp has images only", "NDLightUNet has its own"
CLASSES = "this one predicts classes"
NOT = NotApplicable
REFUSED: dict[tuple[str, str], tuple[type[Exception], str]] = {
    (LAYER, "hub"): (NOT, "is a layer"),
    (LAYER, "smp"): (NOT, "is a layer"),
    ("causal text", "monai"): (ValueError, "vocab_size=50 and 12 blocks: expected a network of"),
    ("causal text", "smp"): (NOT, IMAGES),
    ("causal video", "smp"): (NOT, IMAGES),
    ("NDLightNet, 1 axis", "smp"): (NOT, IMAGES),
    ("NDLightNet, 3 axes", "smp"): (NOT, IMAGES),
    ("NDLightUNet, 2 axes", "smp"): (NOT, OWN),
    ("NDLightUNet, 3 axes", "smp"): (NOT, OWN),
    ("NDLightNet, 1 axis", "diffusers"): (NOT, CLASSES),
    ("NDLightNet, 2 axes", "diffusers"): (NOT, CLASSES),
    ("NDLightNet, 3 axes", "diffusers"): (NOT, CLASSES),
    ("causal text", "diffusers"): (NOT, CLASSES),
    ("causal video", "diffusers"): (NOT, CLASSES),
}
# doors whose cells take more than a second, and half a minute or more
SLOW = {"compile", "trace", "func", "ddp", "fsdp2", "transformers", "diffusers"}
EXHAUSTIVE = {"export", "onnx", "aoti"}
# of those, the cells that run with the slow ones, as they take seconds
QUICK = {(LAYER, "export"), ("NDLightNet, 1 axis", "export")}


def cells() -> list[object]:
    def marks(model: str, door: str) -> list[pytest.MarkDecorator]:
        if door in SLOW or (model, door) in QUICK:
            return [pytest.mark.slow]
        return [pytest.mark.exhaustive] if door in EXHAUSTIVE else []

    return [pytest.param(model, door, marks=marks(model, door)) for door in DOORS for model in CASES]


@pytest.mark.parametrize(("model", "door"), cells())
def test_cell(model: str, door: str, tmp_path: Path) -> None:
    files, needed = DOORS[door]
    for package in needed:
        if find_spec(package) is None:
            pytest.skip(f"the package {package} is not here")
    if (model, door) in REFUSED:
        kind, reason = REFUSED[model, door]
        with pytest.raises(kind, match=re.escape(reason)):
            opened(files[0], door)(CASES[model], tmp_path)
        return
    for file in files:  # attention.py is about layers, backbones.py about networks
        about_layers = model == LAYER or model.startswith("mixer")
        if (file == "attention" and not about_layers) or (file == "backbones" and model == LAYER):
            continue
        opened(file, door)(CASES[model], tmp_path)


def opened(file: str, door: str) -> Door:
    found: Door = getattr(import_module(f".{file}", __package__), door)
    return found


def table() -> str:
    """Return the table as Markdown."""

    def cell(model: str, door: str) -> str:
        return "no" if (model, door) in REFUSED else "yes"

    head = ["", *DOORS]
    rows = [[model, *(cell(model, door) for door in DOORS)] for model in CASES]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def test_the_readme_has_this_table() -> None:
    assert table() in (ROOT / "ndlightnet" / "integrations" / "README.md").read_text()
