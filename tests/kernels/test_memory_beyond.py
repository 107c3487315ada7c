"""Local mixing at the last tile of a grid: what lies beyond the tensors is neither read nor written."""

import pytest
import torch

from ndlightnet.layout import Grid
from ndlightnet.ops import dense, local_mixing, star
from ndlightnet_kernels import local_mixing as kernels

from .cases import DEVICE

MARGIN = 4096  # numbers before and after a tensor, more than a program's box


class Fenced:
    """Tensors between margins of NaN."""

    def __init__(self) -> None:
        self.memories: list[torch.Tensor] = []

    def empty(self, like: torch.Tensor, *shape: int) -> torch.Tensor:
        shape = shape or tuple(like.shape)
        memory = like.new_full((2 * MARGIN + torch.Size(shape).numel(),), torch.nan)
        self.memories.append(memory)
        return memory[MARGIN:-MARGIN].view(shape)

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        return self.empty(x).copy_(x)

    def check(self) -> None:
        for memory in self.memories:
            assert memory[:MARGIN].isnan().all() and memory[-MARGIN:].isnan().all(), "written beyond a tensor"
            assert memory[MARGIN:-MARGIN].isfinite().all(), "not written, or made of what lies beyond a tensor"


@pytest.mark.parametrize(("grid", "form"), [((5,), star), ((2, 6), dense), ((2, 2, 9), star), ((1, 2, 1, 5), star)])
def test_the_last_tile(monkeypatch, grid, form):
    """Sizes that are no multiples of a patch or a box, and numbers of boxes that are none of a program's."""
    fenced, offsets = Fenced(), form(len(grid), 1)
    monkeypatch.setattr(kernels, "dense_empty", fenced.empty)
    x, pull = (fenced.copy(torch.randn(1, Grid(grid).length, 3, device=DEVICE)) for _ in "xp")
    weight = fenced.copy(torch.randn(len(offsets), 3, device=DEVICE))
    results = []
    for impl in ("triton", "reference"):
        leaves = [t.detach().requires_grad_() for t in (x, weight)]
        u = local_mixing(*leaves, offsets, layout=Grid(grid), impl=impl)
        results.append((u, *torch.autograd.grad(u, leaves, pull)))
    assert len(fenced.memories) >= 5  # inputs, u, dx
    fenced.check()
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
