"""Linear attention with a linearised relative position encoding (LRPE; Qin et al., 2023, arXiv
2307.09270) on a grid of any number of axes."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ndlightnet.layout import Grid
from ndlightnet.nn.constants import Constants
from ndlightnet.nn.mixers.linear import Extent, Feature, LinearAttention, Start
from ndlightnet.nn.position import MDLRPE
from ndlightnet.ops import rotate, tables
from ndlightnet.ops.dispatch import Impl
from ndlightnet.ops.position import groups

Core = Literal["cosine", "rotary", "permutation"]
Basis = Literal["identity", "householder", "dct"]


class LrpeAttention(Constants, LinearAttention):
    """Linear attention between W_n phi(q) and W_m phi(k), with W_n = C(n) P: a score depends on the
    offset n - m alone. The channels of a head are shared out among the axes.

    Args:
        dim, heads, context_dim, feature, impl: as of LinearAttention.
        core: C(n): "cosine", a channel x as x exp(i n theta), of which the real part is kept (two
            memory rows a channel); "rotary", pairs of channels turn; "permutation", the channels of
            an axis move on by one place a step.
        basis: P: "identity", "householder" (a learnt reflection of each head) or "dct".

    Without a denominator, as scores may be negative: each head's output is scaled to a root mean
    square of 1. In the cross form source and target count from the same corner; their grids need as
    many axes. Parameters: 4 dim^2 + dim ("cosine"; "rotary" dim / 2, "permutation" none), and dim
    for "householder".
    """

    places = True

    def __init__(
        self,
        dim: int,
        heads: int | None = None,
        *,
        context_dim: int | None = None,
        feature: Feature = "silu",
        core: Core = "cosine",
        basis: Basis = "identity",
        impl: Impl = "auto",
    ) -> None:
        super().__init__(
            dim, heads, context_dim=context_dim, feature=feature, denominator=False, impl=impl
        )
        if core not in get_args(Core):
            raise ValueError(f"core={core!r}: expected 'cosine', 'rotary' or 'permutation'")
        if basis not in get_args(Basis):
            raise ValueError(f"basis={basis!r}: expected 'identity', 'householder' or 'dct'")
        self.core, self.basis = core, basis
        self.lrpe = None if core == "permutation" else MDLRPE(self.heads, self.head_dim, core)
        if basis == "householder":
            self.mirror = nn.Parameter(torch.randn(self.heads, self.head_dim))
        self.dct: Tensor
        self.register_constants()

    def constants(self) -> dict[str, Tensor]:
        return {"dct": dct_matrix(self.head_dim)} if self.basis == "dct" else {}

    def place(
        self,
        x: Tensor,
        shape: tuple[int, ...],
        start: Start,
        extent: Extent,
    ) -> Tensor:
        if self.basis == "householder":
            u = nn.functional.normalize(self.mirror, dim=-1).to(x.dtype)
            x = x - 2 * (x * u).sum(-1, keepdim=True) * u
        elif self.basis == "dct":
            x = x @ self.dct.mT.to(x.dtype)
        if self.lrpe is None:
            return permute(x, shape, start)
        cos, sin = tables(self.lrpe(shape, start), self.head_dim, x.dtype)
        return rotate(x, cos, sin) if self.core == "rotary" else torch.cat([x * cos, x * sin], -1)

    def rows(self, ndim: int) -> int:
        return 2 if self.core == "cosine" else 1


def dct_matrix(n: int) -> Tensor:
    """The orthonormal DCT-II, (n, n): row j holds cos(pi j (i + 1/2) / n)."""
    at = torch.arange(n, dtype=torch.float64)
    waves = torch.cos(math.pi / n * at[:, None] * (at + 0.5)) * math.sqrt(2 / n)
    waves[0] /= math.sqrt(2)
    return waves.float()


def permute(
    x: Tensor, shape: tuple[int, ...], start: tuple[int | Tensor, ...] | None = None
) -> Tensor:
    """(batch, length, heads, dim): the channels of each axis move on cyclically by the token's
    coordinate."""
    grid, parts = Grid(shape), []
    for axis, part in enumerate(x.split(groups(x.shape[-1], len(shape)), -1)):
        at = grid.coordinates(x.device)[:, axis]
        first = 0 if start is None else start[axis]
        at = at + (first[:, None] if isinstance(first, Tensor) and first.ndim else first)
        wide = part.shape[-1]
        index = (torch.arange(wide, device=x.device) - at[..., None]) % wide
        index = index.reshape(-1, grid.length, 1, wide).expand_as(part)
        parts.append(part.gather(-1, index))
    return torch.cat(parts, -1)
