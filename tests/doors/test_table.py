"""Models x doors: each pair is a test, open, or refused with its reason, but for those that
ndlightnet/integrations/README.md lists as not run. A door's own file beside this one says what it asserts."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from .door_models import CASES, Case, NotApplicable

Door = Callable[[Case, Path], None]
ROOT = Path(__file__).parents[2]
LAYER = "MultiheadAttention"
# door: the files with a function of this name, and the packages they need
DOORS = {
    "compile": (["deployment"], []),
    "export": (["deployment"], []),
    "aoti": (["deployment"], []),
    "trace": (["deployment"], []),
    "func": (["deployment"], []),
    "ddp": (["data_parallel"], []),
    "fsdp2": (["data_parallel"], []),
    "hub": (["persistence"], ["huggingface_hub", "safetensors"]),
    "safetensors": (["persistence"], ["safetensors"]),
    "timm": (["backbones", "layer_doors"], ["timm", "monai", "segmentation_models_pytorch"]),
    "monai": (["backbones", "layer_doors"], ["timm", "monai", "segmentation_models_pytorch"]),
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
# doors whose cells take more than a second, and those that run apart, as they take longer
SLOW = {"compile", "trace", "func", "ddp", "fsdp2", "transformers", "diffusers"}
EXHAUSTIVE = {"export", "aoti"}
QUICK = {(LAYER, "export"), ("NDLightNet, 1 axis", "export")}  # of those, what runs with the slow ones
# AOTInductor takes minutes for each: global attention with MD-TPE, the causal scan, convolutions,
# padding and heads, a recurrence. All models are exported, which is the graph that it compiles.
ONLY = {"aoti": {"NDLightNet, 1 axis", "causal text", "NDLightUNet, 2 axes", LAYER, "mixer Mamba"}}


def is_tested(model: str, door: str) -> bool:
    return model in ONLY.get(door, CASES)


def cells() -> list[object]:
    def marks(model: str, door: str) -> list[pytest.MarkDecorator]:
        if door in SLOW or (model, door) in QUICK:
            return [pytest.mark.slow]
        return [pytest.mark.exhaustive] if door in EXHAUSTIVE else []

    pairs = [(model, door) for door in DOORS for model in CASES if is_tested(model, door)]
    return [pytest.param(*pair, marks=marks(*pair)) for pair in pairs]


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
    for file in files:  # layer_doors.py is about layers, backbones.py about networks
        about_layers = model == LAYER or model.startswith("mixer")
        if (file == "layer_doors" and not about_layers) or (file == "backbones" and model == LAYER):
            continue
        opened(file, door)(CASES[model], tmp_path)


def opened(file: str, door: str) -> Door:
    function: Door = getattr(import_module(f".{file}", __package__), door)
    return function


def table() -> str:
    """Return the doors that are closed to a model, or in which it is not run, as Markdown."""
    lines = ["| model | refused | not run |", "|---|---|---|"]
    for model in CASES:
        refused = ", ".join(door for door in DOORS if (model, door) in REFUSED)
        skipped = ", ".join(door for door in DOORS if not is_tested(model, door))
        lines.append(f"| {model} | {refused} | {skipped} |")
    return "\n".join(lines)


def test_the_readme_has_this_table() -> None:
    assert table() in (ROOT / "ndlightnet" / "integrations" / "README.md").read_text()
