"""What was saved before a change of names loads after it, and says the same."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ndlightnet import training
from ndlightnet.__main__ import DOORS, door

HERE = Path(__file__).parent


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_checkpoints", HERE / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = _script()


@pytest.fixture(scope="module")
def outputs() -> dict[str, Any]:
    return torch.load(HERE / "outputs.pt", weights_only=True)


@pytest.fixture(scope="module")
def weights() -> dict[str, Any]:
    return torch.load(HERE / "modules.pt", weights_only=True)


def compare(net: torch.nn.Module, kept: dict[str, Any]) -> None:
    """The same arithmetic in another order is about as far away as float32 was from float64 where
    the file was made, and never less than some roundings."""
    tol = max(10 * kept["rounding"], 64 * torch.finfo(torch.float32).eps)
    assert tol < 1e-4
    found = make.answers(net, *kept["inputs"])
    for y, wanted in zip(found, kept["outputs"], strict=True):
        assert y.shape == wanted.shape and y.dtype == wanted.dtype
        assert float((y - wanted).abs().max() / wanted.abs().max()) < tol


@pytest.mark.parametrize("name", make.LAYERS)
def test_a_layer(name, weights, outputs):
    net = make.layer(name)
    if weights[name]:  # with other weights it says something else
        with pytest.raises(AssertionError):
            compare(net, outputs[name])
    net.load_state_dict(weights[name])
    compare(net, outputs[name])


@pytest.mark.parametrize("kind", make.KINDS)
def test_a_checkpoint_of_a_task(kind, outputs):
    saved = torch.load(HERE / f"{kind}.ckpt", weights_only=True)
    task = getattr(training, make.KINDS[kind][0])(make.network(kind))
    with pytest.raises(AssertionError):
        compare(task.net, outputs[kind])
    task.load_state_dict(saved["state_dict"])
    compare(task.net, outputs[kind])


@pytest.mark.parametrize("kind", make.KINDS)
def test_the_network_of_a_checkpoint(kind, outputs):
    """From before checkpoints had the arguments of their network: these are asked for."""
    _, _, name, arguments, *_ = make.KINDS[kind]
    made, path = make.named(name), HERE / f"{kind}.ckpt"
    compare(made.from_checkpoint(path, **arguments), outputs[kind])
    with pytest.raises(ValueError, match=r"does not say its network's arguments; expected them"):
        made.from_checkpoint(path)


DOOR = {
    "image": "image_cls",
    "video": "video_cls",
    "volume": "volume_cls",
    "signal": "signal_cls",
    "segmentation": "ct_segmentation",
    "text": "text_lm",
    "forecast": "forecast",
}
YOUNGER = {"image_gen", "pretrain"}  # than these files


@pytest.mark.slow
@pytest.mark.parametrize("kind", make.KINDS)
def test_a_training_goes_on(kind, tmp_path):
    """From the checkpoint, optimizer and all, by the task's own command line; then it is tested."""
    assert set(DOOR.values()) == set(DOORS) - YOUNGER
    root, out = tmp_path / ("data.npz" if kind == "image" else "data"), tmp_path / "out"
    make.write(kind, root)
    (tmp_path / "config.yaml").write_text(json.dumps(make.config(kind, root, out)))
    old, new = HERE / f"{kind}.ckpt", out / "checkpoints" / "last.ckpt"
    given = ["--config", str(tmp_path / "config.yaml")]
    more = ["--trainer.max_epochs=3", "--model.grad_checkpointing=true", "--model.compile=false"]
    assert door(DOOR[kind], ["fit", *given, *more, f"--ckpt_path={old}"]) == 0
    before, after = (torch.load(path, weights_only=True) for path in (old, new))
    assert 2 * after["global_step"] == 3 * before["global_step"] and after["epoch"] == 2
    # these networks are from before local mixing, and stay without it
    names = [name for name in training_names(kind) if not name.endswith("local_values.weight")]
    assert list(after["state_dict"]) == names and after.keys() >= before.keys()
    if "cost" in before:
        assert len(after["cost"][0]) > 0
    assert door(DOOR[kind], ["test", *given, f"--ckpt_path={old}"]) == 0
    assert (out / "metrics.json").is_file()


def training_names(kind: str) -> dict[str, Any]:
    return getattr(training, make.KINDS[kind][0])(make.network(kind)).state_dict()
