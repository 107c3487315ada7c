"""tasks/evidence/cubes.py, what of it needs no card: how the largest cube is found and a cube is filled."""

from collections.abc import Callable

import cubes
import pytest
import torch
from torch import nn


@pytest.mark.parametrize("most", [32, 250, 256, 257, 700, 2048])
def test_largest_is_the_last_that_works(monkeypatch, most):
    tried = []

    def make(net: nn.Module, side: int) -> Callable[[], None]:
        def run() -> None:
            tried.append(side)
            if side > most:
                raise torch.OutOfMemoryError("CUDA out of memory, tried to allocate")

        return run

    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3e9)
    found = cubes.largest(make, nn.Identity())
    assert found["side"] == min(most, 63 * 32) // 32 * 32 and found["gb"] == 3.0
    assert len(set(tried)) <= 9  # by bisection
    if most < 63 * 32:
        assert found["next"] == "out of memory" and found["side"] + 32 in tried


def test_a_cube_of_mirrored_copies():
    image = torch.randn(2, 5, 3, 9)
    cube = cubes.cube(image, 7)
    assert cube.shape == (2, 7, 7, 7)
    assert torch.equal(cube[:, :5, :3], image[..., :7])
    assert torch.equal(cube[:, 5:, :3], image[:, 3:].flip(1)[..., :7])
    assert torch.equal(cube[:, :5, 6:], image[:, :, :1, :7])  # forth, back and forth again
    assert torch.equal(cube[:, :5, 3:6], image.flip(2)[..., :7])
