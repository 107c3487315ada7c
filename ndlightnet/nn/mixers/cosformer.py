"""cosFormer (Qin et al., 2022, arXiv 2202.08791) on a grid of any number of axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from ndlightnet.layout import Grid, per_axis
from ndlightnet.nn.mixers.linear import Extent, LinearAttention, Start
from ndlightnet.ops.dispatch import Impl
from ndlightnet.ops.dtypes import accumulator

Combine = Literal["mean", "product"]
CAUSAL_REACH = 4096


class CosformerAttention(LinearAttention):
    """Linear attention with weights relu(q_t) . relu(k_s) c(t - s), c = cos(pi/2 offset / reach)
    along an axis: all positive, the sooner the larger.

    Args:
        dim, heads, context_dim, impl: as of LinearAttention.
        reach: the offset at which c is 0, one for all axes or one per axis; cells beyond it count
            as at it. Default: the sample's own sizes, without padding around it (of both grids, the
            larger). For the first axis of the causal form, whose length is not known before it
            ends, 4096.
        combine: on several axes c is the "mean" or the "product" of theirs. (Memory rows: 2 x axes
            per channel, or 2^axes.)

    In the cross form source and target count from the same corner; their grids need as many axes.
    Parameters: 4 dim^2.
    """

    places = True

    def __init__(
        self,
        dim: int,
        heads: int | None = None,
        *,
        context_dim: int | None = None,
        reach: int | Sequence[int] | None = None,
        combine: Combine = "mean",
        impl: Impl = "auto",
    ) -> None:
        super().__init__(dim, heads, context_dim=context_dim, feature="relu", impl=impl)
        if combine not in get_args(Combine):
            raise ValueError(f"combine={combine!r}: expected 'mean' or 'product'")
        if reach is not None:
            per_axis("reach", reach, 1 if isinstance(reach, int) else len(reach))
        self.given, self.combine = reach, combine

    def bounds(self, grid: Grid, source: Grid | None, mask: Tensor | None) -> tuple[Start, Extent]:
        """The grid counts from the first cell that its mask shows to the last one; a source counts
        from the corner, as its queries do."""
        sizes = (grid if source is None else source).shape
        if mask is None:
            return None, grid.shape if source is None else tuple(map(max, grid.shape, sizes))
        margins = [margin(mask, axis) for axis in range(grid.ndim)]
        ends = [size - behind for size, (_, behind) in zip(sizes, margins, strict=True)]
        if source is not None:
            pairs = zip(ends, grid.shape, strict=True)
            return None, tuple(end.clamp(min=max(1, size)) for end, size in pairs)
        start = tuple(-front for front, _ in margins)
        return start, tuple((end + at).clamp(min=1) for end, at in zip(ends, start, strict=True))

    def place(
        self,
        x: Tensor,
        shape: tuple[int, ...],
        start: Start,
        extent: Extent,
    ) -> Tensor:
        grid, parts = Grid(shape), [x]
        sizes = per_axis("reach", self.given or 1, grid.ndim)
        for axis, size in enumerate(shape):
            end = extent[axis]
            own = CAUSAL_REACH if end is None else end
            reach = column(sizes[axis] if self.given else own)
            at = torch.arange(size, dtype=accumulator(x), device=x.device)
            at = at + column(0 if start is None else start[axis])
            angle = at.clamp(min=0).clamp(max=reach) * (math.pi / 2) / reach
            # (batch or 1, length, 1, 1)
            wide = grid.spread(torch.atleast_2d(angle).mT, axis).flatten(0, -2).mT[..., None, None]
            cos, sin = wide.cos().to(x.dtype), wide.sin().to(x.dtype)
            if self.combine == "mean":
                parts += [x * cos, x * sin]
            else:
                parts = [part * turned for part in parts for turned in (cos, sin)]
        return torch.cat(parts[1:] if self.combine == "mean" else parts, -1)

    def rows(self, ndim: int) -> int:
        return 2 * ndim if self.combine == "mean" else 2**ndim


def margin(mask: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """How many steps of an axis lie in front of all that a mask (batch, *grid) shows of a sample,
    and behind it, (batch,) each."""
    seen = mask[..., None].movedim(1 + axis, 1).flatten(2).any(2)
    front, behind = ((x.cumsum(1) == 0).sum(1) for x in (seen, seen.flip(1)))
    return front, behind


def column(value: int | Tensor) -> int | Tensor:
    """(batch,) numbers beside those of an axis; one number as it is."""
    return value[:, None] if isinstance(value, Tensor) and value.ndim else value
