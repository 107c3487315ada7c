"""Linear attention with a linearised relative position encoding (LRPE; Qin et al., 2023, arXiv
2307.09270) on a grid of any number of axes."""

from __future__ import annotations

import torch
from torch import Tensor

from ndlightnet.layout import Grid
from ndlightnet.nn.mixers.linear import Extent, LinearAttention
from ndlightnet.nn.position import MDLRPE
from ndlightnet.ops import tables
from ndlightnet.ops.dispatch import Impl
from ndlightnet.ops.position import Kind


class LrpeAttention(LinearAttention):
    """Linear attention between C(n) phi(q) and C(m) phi(k): a score depends on the offset n - m
    only. The channels of a head are split among the axes.

    Args:
        dim, heads, context_dim, impl: as in LinearAttention.
        core: C(n): "cosine": channel x becomes x exp(i n theta) and scores take the real part (two
            memory rows per channel); "rotary": pairs of channels rotate.

    Without a denominator, as scores may be negative: each head's output is scaled to a root mean
    square of 1. In the cross form source and target count from the same corner; their grids need as
    many axes. Parameters: 4 dim^2 + dim ("cosine"; "rotary" dim / 2).
    """

    position_code, feature, denominator = True, "silu", False

    def __init__(
        self,
        dim: int,
        heads: int | None = None,
        *,
        context_dim: int | None = None,
        core: Kind = "cosine",
        impl: Impl = "auto",
    ) -> None:
        super().__init__(dim, heads, context_dim=context_dim, impl=impl)
        if core not in ("cosine", "rotary"):
            raise ValueError(f"core={core!r}: expected 'cosine' or 'rotary'")
        self.core = core
        self.lrpe = MDLRPE(self.heads, self.head_dim, core)

    def add_position(self, x: Tensor, grid: Grid, extent: Extent) -> Tensor:
        if self.core == "rotary":
            return self.lrpe.rotate(grid, x)[0]
        cos, sin = tables(self.lrpe(grid), self.head_dim, x.dtype)
        return torch.cat([x * cos, x * sin], -1)

    def rows(self, ndim: int) -> int:
        return 2 if self.core == "cosine" else 1
