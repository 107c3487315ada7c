"""What was saved before a change of names loads after it, and says the same."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ndlightnet import training

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
