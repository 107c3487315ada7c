"""Linear attention as a layer (Katharopoulos et al., 2020, arXiv 2006.16236)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndlightnet.layout import Grid, Ragged
from ndlightnet.nn.heads import default_heads, split_heads
from ndlightnet.nn.mixers.mixer import Mixer, check_axes, check_source, drawn_like
from ndlightnet.ops import fla
from ndlightnet.ops.dispatch import Impl
from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.linear import Sums, causal_linear_attention, linear_attention

Start = tuple[int | Tensor, ...] | None
Extent = tuple[int | Tensor | None, ...]
Feature = Literal["elu", "relu", "silu", "identity"]
FEATURES: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: x.clamp(max=0).exp() + F.relu(x),  # elu(x) + 1
    "relu": F.relu, "silu": F.silu, "identity": lambda x: x,
}  # fmt: skip


class LinearAttention(Mixer):
    """o_proj(phi(q) . sum phi(k) v^T), divided by phi(q) . sum phi(k), or by its own size.

    Args:
        dim: channels of a token.
        heads: default: one per 64 channels.
        context_dim: channels of the source in the cross form; default `dim`.
        feature: phi: "elu" (elu + 1), "relu", "silu" or "identity".
        denominator: divide by the sum of the weights, which have to be positive ("elu", "relu");
            without it each head's output is scaled to a root mean square of 1.
        impl: "auto", "torch", "fla" or "reference" for tokens one after the other; see
            ndlightnet.ops.recurrence.gated.

    No position code, unlike other mixers: MD-TPE in front of the blocks is the only one.
    Parameters: 4 dim^2.
    """

    places = False  # whether `place` does anything

    def __init__(
        self,
        dim: int,
        heads: int | None = None,
        *,
        context_dim: int | None = None,
        feature: Feature = "elu",
        denominator: bool = True,
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        if feature not in get_args(Feature):
            raise ValueError(f"feature={feature!r}: expected one of {', '.join(FEATURES)}")
        if denominator and feature in ("silu", "identity"):
            raise ValueError(
                f"feature={feature!r} with denominator=True: its weights may be negative and their "
                "sum 0; expected 'elu' or 'relu', or denominator=False"
            )
        self.heads, self.head_dim = default_heads(dim, heads)
        self.feature, self.denominator, self.impl = feature, denominator, impl
        source = context_dim or dim
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(source, dim, bias=False)
        self.v_proj = nn.Linear(source, dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def place(
        self,
        x: Tensor,
        shape: tuple[int, ...],
        start: Start,
        extent: Extent,
    ) -> Tensor:
        """Features (batch, length, heads, head_dim) with their position in the grid, (batch,
        length, heads, rows * head_dim). start, extent: as of `bounds`; the extent is None along the
        first axis of the causal form, which may go on."""
        return x

    def bounds(self, grid: Grid, source: Grid | None, mask: Tensor | None) -> tuple[Start, Extent]:
        """Of a grid that reads itself, or another source: the coordinates of the first cell, and
        how far the cells of both reach; of an axis a number, or (batch,) of them."""
        return None, grid.shape

    def rows(self, ndim: int) -> int:
        """Rows of the memory per channel of a head, on a grid of so many axes."""
        return 1

    def forward(
        self,
        x: Tensor,
        *,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
        layout: Ragged | None = None,
    ) -> Tensor:
        """Tokens (batch, *grid, dim) -> same shape.

        context: a source (batch, *its grid, context_dim) to read instead of x. mask: bool over the
        source's tokens (batch, *grid), False = padding. causal: along the first axis: a token sees
        its own frame and those before it; without context. layout: of samples end to end (x
        (length, dim), mask (length,)), which are done one after the other.
        """
        check_source(context, causal, layout)
        if layout is not None:
            return layout.each(self, x, mask, causal=causal)
        grid, source = Grid.of(x), x if context is None else context
        there = Grid.of(source)
        there.flatten_mask(mask)  # checks it
        if self.places:
            check_axes(grid, there)
        start, extent = self.bounds(grid, None if context is None else there, mask)
        if causal:
            extent = (None, *extent[1:])
        q = self._query(x, grid, start, extent)
        k, v = self._source(source, mask, start, extent)
        if causal:
            sums = self.init_state(len(x), x.device, grid.shape[1:])
            y, _ = causal_linear_attention(
                q, k, v, grid.shape[0], sums, denominator=self.denominator, impl=self.impl
            )
        else:
            y = linear_attention(q, k, v, denominator=self.denominator, impl=self.impl)
        return grid.unflatten(self._output(y))

    def _query(self, x: Tensor, grid: Grid, start: Start, extent: Extent) -> Tensor:
        q = FEATURES[self.feature](split_heads(self.q_proj(x), self.heads, grid))
        return self.place(q, grid.shape, start, extent)

    def _source(
        self, x: Tensor, mask: Tensor | None, start: Start, extent: Extent
    ) -> tuple[Tensor, Tensor]:
        grid = Grid.of(x)
        k = FEATURES[self.feature](split_heads(self.k_proj(x), self.heads, grid))
        k, v = (
            self.place(k, grid.shape, start, extent),
            split_heads(self.v_proj(x), self.heads, grid),
        )
        if (keep := grid.flatten_mask(mask)) is not None:
            k, v = (part.masked_fill(~keep[..., None, None], 0) for part in (k, v))
        return k, v

    def _output(self, y: Tensor) -> Tensor:
        if not self.denominator:  # in float32: sums over many tokens are large
            y = F.rms_norm(y.to(accumulator(y)), y.shape[-1:], eps=1e-6)
        out: Tensor = self.o_proj(y.flatten(2).to(self.o_proj.weight.dtype))
        return out

    def implementation(self, x: Tensor, causal: bool = False) -> str:
        """There are kernels for the causal form of tokens one after the other."""
        if not causal or math.prod(x.shape[2:-1]) > 1:
            return "torch"
        if self.impl != "auto":
            return self.impl
        k, v = (drawn_like(x, 0, self.heads, rows * self.head_dim) for rows in (self.rows(1), 1))
        support = fla.supports("gated_linear_attention", k, v)
        return "fla" if support else f"torch ({support.reason})"

    def init_state(
        self, batch: int, device: torch.device | str | None = None, space: tuple[int, ...] = ()
    ) -> Sums:
        """The sums before the first frame, of shape `space`."""
        acc, dim = accumulator(self.q_proj.weight), self.head_dim
        rows = self.rows(1 + len(space)) * dim
        zeros = torch.zeros(batch, self.heads, rows, dim, dtype=acc, device=device)
        return Sums(zeros[..., 0], zeros)

    def advance(self, x: Tensor, state: Sums, position: int | Tensor) -> tuple[Tensor, Sums]:
        """The next frames (batch, frames, *space, dim) of the causal form; `position`: how many
        came before, one number or (batch,) of them."""
        grid = Grid.of(x)
        start, extent = (position, *[0] * (grid.ndim - 1)), (None, *grid.shape[1:])
        q = self._query(x, grid, start, extent)
        k, v = self._source(x, None, start, extent)
        y, state = causal_linear_attention(
            q, k, v, grid.shape[0], state, denominator=self.denominator, impl=self.impl
        )
        return self._output(y).reshape(x.shape), state
