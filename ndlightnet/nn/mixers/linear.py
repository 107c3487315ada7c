"""Linear attention as a layer (Katharopoulos et al., 2020, arXiv 2006.16236)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndlightnet.layout import Grid
from ndlightnet.nn.initial import Device, Space
from ndlightnet.nn.mixers.base import StreamingMixer, check_axes, default_heads, projected_like, zero_padding
from ndlightnet.ops import fla
from ndlightnet.ops.dispatch import Impl
from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.linear import Sums, causal_linear_attention, linear_attention

Extent = tuple[int | Tensor | None, ...]
FEATURES: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: x.clamp(max=0).exp() + F.relu(x),  # elu(x) + 1
    "relu": F.relu,
    "silu": F.silu,
}


class LinearAttention(StreamingMixer):
    """Linear attention: o_proj of phi(q) . sum phi(k) v^T, divided by phi(q) . sum phi(k), with phi = elu + 1.

    Args:
        dim: channels of a token.
        heads: default: one per 64 channels.
        context_dim: channels of the source in the cross form; default `dim`.
        impl: "auto", "torch", "fla" or "reference" ("fla": the causal form with one token per frame only); see
            ndlightnet.ops.recurrence.gated.

    No position code, unlike other mixers: MD-TPE in front of the blocks is the only one.
    Parameters: 4 dim^2.
    """

    # What a subclass sets: whether `add_position` does anything; phi; whether outputs are divided by
    # the sum of the weights, which have to be positive, or scaled per head to a mean square of 1.
    position_code, feature, denominator = False, "elu", True
    order_free = True

    def __init__(
        self, dim: int, heads: int | None = None, *, context_dim: int | None = None, impl: Impl = "auto"
    ) -> None:
        super().__init__()
        self.heads, self.head_dim = default_heads(dim, heads)
        self.impl = impl
        source = context_dim or dim
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(source, dim, bias=False)
        self.v_proj = nn.Linear(source, dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def features(self, x: Tensor, query: bool) -> Tensor:
        """Map queries or keys (batch, length, heads, head_dim) to phi, (batch, length, heads, rows * head_dim)."""
        return FEATURES[self.feature](x)

    def add_position(self, x: Tensor, grid: Grid, extent: Extent) -> Tensor:
        """Encode the position in features (batch, length, heads, head_dim) -> (batch, length, heads, rows * head_dim).
        extent: as in `bounds`, but None along the first axis of the causal form, whose length is unknown."""
        return x

    def bounds(self, grid: Grid, source: Grid | None, mask: Tensor | None) -> tuple[Grid, Extent]:
        """Return the grid with the offset that its real tokens are counted from, and along each
        axis the extent of its real tokens, or of those of it and a source: a number, or (batch,) of
        them. mask: (batch, length) of the tokens that are read."""
        return grid, grid.shape

    def rows(self, ndim: int) -> int:
        """Return the number of memory rows per channel of a head, on a grid of `ndim` axes."""
        return 1

    def mix(self, x: Tensor, layout: Grid, mask: Tensor | None, causal: bool) -> Tensor:
        grid, extent = self.bounds(layout, None, mask)
        if not causal:
            q, (k, v) = self._query(x, grid, extent), self._source(x, mask, grid, extent)
            return self._output(linear_attention(q, k, v, denominator=self.denominator, impl=self.impl))
        extent = (None, *extent[1:])
        sums = self.init_state(x.shape[0], x.device, grid.shape[1:])
        return self._causal(x, mask, grid, extent, sums)[0]

    def mix_context(self, x: Tensor, grid: Grid, context: Tensor, source: Grid, mask: Tensor | None) -> Tensor:
        if self.position_code:
            check_axes(grid, source)
        _, extent = self.bounds(grid, source, mask)
        q, (k, v) = self._query(x, grid, extent), self._source(context, mask, source, extent)
        return self._output(linear_attention(q, k, v, denominator=self.denominator, impl=self.impl))

    def _query(self, x: Tensor, grid: Grid, extent: Extent) -> Tensor:
        q = self.features(self.q_proj(x).unflatten(-1, (self.heads, -1)), query=True)
        return self.add_position(q, grid, extent)

    def _source(self, x: Tensor, mask: Tensor | None, grid: Grid, extent: Extent) -> tuple[Tensor, ...]:
        k, v = (proj(x).unflatten(-1, (self.heads, -1)) for proj in (self.k_proj, self.v_proj))
        k = self.add_position(self.features(k, query=False), grid, extent)
        return zero_padding(mask, k, v)

    def _causal(self, x: Tensor, mask: Tensor | None, grid: Grid, extent: Extent, sums: Sums) -> tuple[Tensor, Sums]:
        q, (k, v) = self._query(x, grid, extent), self._source(x, mask, grid, extent)
        y, sums = causal_linear_attention(q, k, v, grid.frame_count, sums, denominator=self.denominator, impl=self.impl)
        return self._output(y), sums

    def _output(self, y: Tensor) -> Tensor:
        if not self.denominator:  # in float32: sums over many tokens are large
            y = F.rms_norm(y.to(accumulator(y)), y.shape[-1:], eps=1e-6)
        return self.o_proj(y.flatten(2).to(self.o_proj.weight.dtype))

    def implementation(self, x: Tensor, causal: bool = False) -> str:
        """Return what runs; there are kernels for the causal form with one token per frame."""
        if self.impl != "auto":
            return self.impl
        if not causal or math.prod(x.shape[2:-1]) > 1:
            return "torch"
        k, v = (projected_like(x, 0, self.heads, rows * self.head_dim) for rows in (self.rows(1), 1))
        support = fla.supports("gated_linear_attention", k, v)
        return "fla" if support else f"torch ({support.reason})"

    def init_state(self, batch: int, device: Device = None, space: Space = ()) -> Sums:
        acc, dim = accumulator(self.q_proj.weight), self.head_dim
        rows = self.rows(1 + len(space)) * dim
        zeros = torch.zeros(batch, self.heads, rows, dim, dtype=acc, device=device)
        return Sums(zeros[..., 0], zeros)

    def step(self, x: Tensor, grid: Grid, state: Sums) -> tuple[Tensor, Sums]:
        return self._causal(x, None, grid, (None, *grid.shape[1:]), state)
