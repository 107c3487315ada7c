"""Models x doors: each pair is a test, but for those that have no code, as the other library has no place for such a
model, and those that ndlightnet/integrations/README.md lists as not run. A door's own file beside this one says what
it asserts."""

from importlib import import_module
from pathlib import Path

import pytest

from .door_models import CASES, KINDS, LAYER

ROOT = Path(__file__).parents[2]
# door: the file with a function of this name, and the packages that it needs
BACKBONES, HUGGING_FACE = ["timm", "monai", "segmentation_models_pytorch"], ["transformers", "diffusers"]
DOORS: dict[str, tuple[str, list[str]]] = {
    **dict.fromkeys(("compile", "export", "aoti", "trace", "func"), ("deployment", [])),
    **dict.fromkeys(("ddp", "fsdp2"), ("data_parallel", [])),
    "hub": ("persistence", ["huggingface_hub", "safetensors"]),
    "safetensors": ("persistence", ["safetensors"]),
    **dict.fromkeys(("timm", "monai", "smp"), ("backbones", BACKBONES)),
    **dict.fromkeys(("transformers", "diffusers"), ("huggingface", HUGGING_FACE)),
}
CLASSIFIERS = {"NDLightNet, 1 axis", "NDLightNet, 2 axes", "NDLightNet, 3 axes", "causal text", "causal video"}
NO_PLACE = {
    "hub": {LAYER},  # the network that holds it knows its arguments
    "smp": {name for name in CASES if name != "NDLightNet, 2 axes" and not name.startswith("mixer")},  # images only
    "diffusers": CLASSIFIERS,  # its schedulers need a network from a grid to a grid
}
# refused with a reason, which the door's file asserts
REFUSED = {("causal text", "monai")}
# Doors whose cells take more than a second, and the models that `pytest` tries there: the others run apart.
SLOW = {
    **dict.fromkeys(("trace", "func", "ddp", "fsdp2", "monai", "transformers", "diffusers"), KINDS),
    "timm": {*KINDS, "NDLightNet, 2 axes"},  # which timm makes by its name
    # of U-Net and causal networks tests/parallel compiles one, of the layer tests/nn/test_multihead.py
    "compile": {"NDLightNet, 1 axis", "mixer Mamba"},
    **dict.fromkeys(("export", "aoti"), frozenset()),
}
# AOTInductor takes minutes for each. All models are exported, which is the graph that it compiles.
ONLY = {"aoti": KINDS}


def cells() -> list[object]:
    def marks(model: str, door: str) -> list[pytest.MarkDecorator]:
        if door not in SLOW:
            return []
        return [pytest.mark.slow if model in SLOW[door] else pytest.mark.exhaustive]

    run = {door: ONLY.get(door, CASES.keys()) - NO_PLACE.get(door, set()) for door in DOORS}
    pairs = [(model, door) for door in DOORS for model in CASES if model in run[door]]
    return [pytest.param(*pair, marks=marks(*pair)) for pair in pairs]


@pytest.mark.parametrize(("model", "door"), cells())
def test_cell(model: str, door: str, tmp_path: Path) -> None:
    file, packages = DOORS[door]
    for package in packages:
        pytest.importorskip(package)
    getattr(import_module(f".{file}", __package__), door)(CASES[model], tmp_path)


def table() -> str:
    """Return the doors that are closed to a model, or in which it is not run, as Markdown."""
    lines = ["| model | refused | not run |", "|---|---|---|"]
    for model in CASES:
        refused = [door for door in DOORS if model in NO_PLACE.get(door, ()) or (model, door) in REFUSED]
        skipped = [door for door in DOORS if model not in ONLY.get(door, CASES)]
        lines.append(f"| {model} | {', '.join(refused)} | {', '.join(skipped)} |")
    return "\n".join(lines)


def test_the_readme_has_this_table() -> None:
    assert table() in (ROOT / "ndlightnet" / "integrations" / "README.md").read_text()
