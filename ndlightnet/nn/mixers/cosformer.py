"""cosFormer (Qin et al., 2022, arXiv 2202.08791) on a grid of any number of axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ndlightnet.layout import Grid, per_axis
from ndlightnet.nn.mixers.linear import Extent, LinearAttention
from ndlightnet.ops.dispatch import Impl
from ndlightnet.ops.dtypes import accumulator

CAUSAL_REACH = 4096


class CosformerAttention(LinearAttention):
    """Linear attention with weights relu(q_t) . relu(k_s) c(t - s), c = cos(pi/2 offset / reach)
    along an axis: positive weights, larger for nearer tokens.

    Args:
        dim, heads, context_dim, impl: as in LinearAttention.
        reach: the offset at which c is 0, one for all axes or one per axis; coordinates are clamped to it. Default: the
            sizes of the sample without padding around it (the larger ones of both grids in the cross form); for the
            first axis of the causal form, whose length is unknown before it ends, 4096. For points it is needed, and
            coordinates are clamped to half of it on either side of 0.

    On several axes c is the mean over the axes. (Memory rows: 2 x axes per channel.) In the cross form source and
    target count from the same corner; their grids need as many axes.
    Parameters: 4 dim^2.
    """

    position_code, feature = True, "relu"

    def __init__(
        self,
        dim: int,
        heads: int | None = None,
        *,
        context_dim: int | None = None,
        reach: int | Sequence[int] | None = None,
        impl: Impl = "auto",
    ) -> None:
        super().__init__(dim, heads, context_dim=context_dim, impl=impl)
        if reach is not None:
            per_axis("reach", reach, len(reach) if isinstance(reach, Sequence) else 1)
        self.reach = reach

    @property
    def order_free(self) -> bool:  # type: ignore[override]
        return self.reach is not None

    def bounds(self, grid: Grid, source: Grid | None, mask: Tensor | None) -> tuple[Grid, Extent]:
        """Return the grid counted from its first real token to its last one, and its extent; a
        source is counted from the corner, as its queries are."""
        read = grid if source is None else source
        if not grid.ordered:
            return grid, (None,) * grid.ndim
        if mask is None:
            return grid, tuple(map(max, grid.shape, read.shape))
        real = read.unflatten(mask)
        margins = [margin(real, axis) for axis in range(grid.ndim)]
        ends = [size - behind for size, (_, behind) in zip(read.shape, margins, strict=True)]
        if source is not None:
            sizes = zip(ends, grid.shape, strict=True)
            return grid, tuple(end.clamp(min=max(1, size)) for end, size in sizes)
        spans = zip(ends, margins, strict=True)
        extent = tuple((end - front).clamp(min=1) for end, (front, _) in spans)
        return Grid(grid.shape, tuple(-front for front, _ in margins)), extent

    def add_position(self, x: Tensor, grid: Grid, extent: Extent) -> Tensor:
        waves = []
        reaches: Sequence[int | Tensor] = [CAUSAL_REACH if end is None else end for end in extent]
        if self.reach is not None:
            reaches = per_axis("reach", self.reach, grid.ndim)
        where = grid.token_coordinates(x.device)
        for axis in range(grid.ndim):
            reach = column(reaches[axis])
            if where is None:
                at = torch.arange(grid.shape[axis], dtype=accumulator(x), device=x.device)
                at = at + column(grid.offset[axis] if grid.offset else 0)
            else:
                at = where[..., axis].to(accumulator(x)) + reach / 2
            angle = torch.atleast_2d(at.clamp(min=0).clamp(max=reach) * (math.pi / 2) / reach)
            # (batch or 1, length)
            angles = grid.spread(angle.mT, axis).flatten(0, -2).mT if where is None else angle
            waves += [x * wave(angles)[..., None, None].to(x.dtype) for wave in (torch.cos, torch.sin)]
        return torch.cat(waves, -1)

    def rows(self, ndim: int) -> int:
        return 2 * ndim


def margin(mask: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Count the steps of an axis in front of all real tokens of a mask (batch, *grid), and behind
    them, (batch,) each."""
    real = mask[..., None].movedim(1 + axis, 1).flatten(2).any(2)
    front, behind = ((x.cumsum(1) == 0).sum(1) for x in (real, real.flip(1)))
    return front, behind


def column(value: int | Tensor) -> int | Tensor:
    """Reshape (batch,) numbers to broadcast against an axis; return one number as it is."""
    return value[:, None] if isinstance(value, Tensor) and value.ndim else value
