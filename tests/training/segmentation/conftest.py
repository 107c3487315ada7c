"""What the tests of segmentation share: phantoms, two trained checkpoints, a network in place of the trained one."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ndlightnet import NDLightUNet
from ndlightnet.data.made.phantoms import make_phantoms
from tests.training.conftest import SMALL, last


@pytest.fixture(scope="session")
def checkpoints(segment, write_decathlon, tmp_path_factory) -> list[Path]:
    """Of two trainings on a folder that is gone since."""
    folder = tmp_path_factory.mktemp("trained")
    root = write_decathlon(folder / "data")
    for seed in (0, 1):
        segment("fit", f"--seed_everything={seed}", out=folder / str(seed), root=root, **SMALL).well()
    shutil.rmtree(root)
    return [last(folder / str(seed)) for seed in (0, 1)]


@pytest.fixture
def predict(segment, checkpoints, tmp_path) -> Callable[..., object]:
    """predict(input, *options): how it ended; results are in tmp_path/out/predictions."""
    places = {"out": tmp_path / "out", "root": "/gone", "ckpt": checkpoints[0], "net": {"out_channels": 2}}
    return lambda path, *more: segment("predict", *more, input=path, **places)


@pytest.fixture
def network(monkeypatch) -> Callable[[Callable[[Tensor], Tensor]], None]:
    """network(function): in place of the trained one, class 1 where function(x) is above 0."""

    def replace(function: Callable[[Tensor], Tensor]) -> None:
        def forward(net: NDLightUNet, x: Tensor) -> Tensor:
            value = function(x)
            return torch.cat([-value, value], 1)

        monkeypatch.setattr(NDLightUNet, "forward", forward)

    return replace


def units(low: float = -1e6, high: float = 1e6, mean: float = 0.0, deviation: float = 1.0) -> str:
    """Values reach the network as (x - mean) / deviation."""
    numbers = {"low": low, "high": high, "mean": mean, "deviation": deviation}
    return f"--data.init_args.intensities={[numbers]}"


@pytest.fixture(scope="session")
def phantoms(tmp_path_factory) -> Path:
    """Three and a test case. Of seed 3 this runs to the left and back: turning it back shows."""
    folder = tmp_path_factory.mktemp("phantoms") / "data"
    return make_phantoms(folder, 3, 1, seed=3, progress=False)
