"""cosFormer (Qin et al., 2022, arXiv 2202.08791) on a grid of any number of axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from ndlightnet.grid import Grid, per_axis
from ndlightnet.nn.mixers.linear import Extent, LinearAttention
from ndlightnet.ops._fla import Impl

Combine = Literal["mean", "product"]
CAUSAL_REACH = 4096


class CosformerAttention(LinearAttention):
    """Linear attention with weights relu(q_t) . relu(k_s) c(t - s), c = cos(pi/2 offset / reach)
    along an axis: all positive, the sooner the larger.

    Args:
        dim, heads, context_dim, impl: as of LinearAttention.
        reach: the offset at which c is 0, one for all axes or one per axis; cells beyond it count
            as at it. Default: the grid's own sizes (of both grids, the larger), padding included:
            give a number where samples are padded. For the first axis of the causal form, whose
            length is not known before it ends, 4096.
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

    def place(
        self,
        x: Tensor,
        shape: tuple[int, ...],
        start: tuple[int | Tensor, ...] | None,
        extent: Extent,
    ) -> Tensor:
        grid, parts = Grid(shape), [x]
        sizes = per_axis("reach", self.given or 1, grid.ndim)
        for axis, size in enumerate(shape):
            end = extent[axis]
            own = CAUSAL_REACH if end is None else max(1, end)
            reach = sizes[axis] if self.given else own
            at = torch.arange(size, device=x.device)
            first = 0 if start is None else start[axis]
            at = at + (first[:, None] if isinstance(first, Tensor) and first.ndim else first)
            angle = at.clamp(max=reach) * (math.pi / 2 / reach)
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
