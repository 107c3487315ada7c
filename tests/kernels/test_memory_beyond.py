"""Local mixing at the last tile of a grid: what lies beyond the tensors is neither read nor written."""

import pytest
import torch

from ndlightnet.layout import Grid
from ndlightnet.ops import dense, local_mixing, star
from ndlightnet_kernels import local_mixing as kernels

from .kernel_cases import DEVICE

MARGIN = 4096  # numbers before and after a tensor, more than a program's box
UNTOUCHED = -1234.5


def fenced(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of x between margins of NaN: what is read there shows in the results."""
    memory = x.new_full((2 * MARGIN + x.numel(),), torch.nan)
    return memory[MARGIN:-MARGIN].view(x.shape).copy_(x)


class Outputs:
    """Memory of outputs, which starts as NaN, between margins that nothing may write."""

    def __init__(self) -> None:
        self.memories: list[torch.Tensor] = []

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        memory = like.new_full((2 * MARGIN + like.numel(),), UNTOUCHED)
        self.memories.append(memory)
        return memory[MARGIN:-MARGIN].view(like.shape).fill_(torch.nan)

    def check(self) -> None:
        for memory in self.memories:
            assert (memory[:MARGIN] == UNTOUCHED).all() and (memory[-MARGIN:] == UNTOUCHED).all()
            assert memory[MARGIN:-MARGIN].isfinite().all()


@pytest.mark.parametrize(("grid", "form"), [((5,), star), ((2, 6), dense), ((2, 2, 9), star), ((1, 2, 1, 5), star)])
def test_the_last_tile(monkeypatch, grid, form):
    """Sizes that are no multiples of a patch or a box, and numbers of boxes that are none of a program's."""
    outputs, offsets = Outputs(), form(len(grid), 1)
    monkeypatch.setattr(kernels, "dense_empty", outputs.empty)
    x, pull = (fenced(torch.randn(1, Grid(grid).length, 3, device=DEVICE)) for _ in "xp")
    weight = fenced(torch.randn(len(offsets), 3, device=DEVICE))
    results = []
    for impl in ("triton", "reference"):
        leaves = [t.detach().requires_grad_() for t in (x, weight)]
        u = local_mixing(*leaves, offsets, layout=Grid(grid), impl=impl)
        results.append((u, *torch.autograd.grad(u, leaves, pull)))
    assert len(outputs.memories) == 2  # u, dx
    outputs.check()
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
