"""Local mixing tap by tap from coordinates: the specification."""

from __future__ import annotations

from torch import Tensor

from ndlightnet.layout import Grid
from ndlightnet.ops.local_mixing.offsets import Offsets


def local_mixing(x: Tensor, weight: Tensor, offsets: Offsets, grid: Grid) -> Tensor:
    """Return u_t = sum over i of weight_i * x_(t - offsets_i), with 0 for x outside the grid. x
    (batch, length, dim)."""
    at, size = grid.coordinates(x.device), grid.coordinates(x.device).new_tensor(grid.shape)
    step = size.flip(0).cumprod(0).flip(0) // size.clamp(min=1)  # tokens from cell to cell, by axis
    u = x.new_zeros(x.shape)
    for w, offset in zip(weight, offsets, strict=True):
        source = at - at.new_tensor(offset)
        inside = ((source >= 0) & (source < size)).all(1)
        token = (source * step).sum(1).where(inside, 0)
        u = u + (w * x[:, token]).where(inside[:, None], 0)
    return u
