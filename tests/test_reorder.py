"""Tokens along one axis after the other: `Grid.reorder` by sorted coordinates, and back."""

import itertools

import pytest
import torch

from ndlightnet import Grid


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 3, 4), (2, 1, 3, 2)], ids=str)
def test_reorder_and_back(shape, reverse):
    grid = Grid(shape)
    cells = list(itertools.product(*map(range, shape)))
    x = torch.arange(2.0 * grid.length).reshape(2, grid.length, 1)
    for axis in range(len(shape)):
        # the axis varies fastest, the others are in row-major order
        order = sorted(range(grid.length), key=lambda n: (*cells[n][:axis], *cells[n][axis + 1 :], cells[n][axis]))
        order = order[::-1] if reverse else order
        turned = grid.reorder(x, axis, reverse)
        assert torch.equal(turned, x[:, order])
        assert torch.equal(grid.restore(turned, axis, reverse), x)
