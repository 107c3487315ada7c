"""Softmax attention (torch's scaled_dot_product_attention): the quadratic baseline."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn

from ndlightnet.layout import Grid, Layout
from ndlightnet.nn.mixers.base import Mixer, check_axes, default_heads, zero_padding
from ndlightnet.nn.position import MDLRPE
from ndlightnet.nn.projections import project
from ndlightnet.ops.local import attend_in_samples
from ndlightnet.ops.plain import softmax_attention


class SoftmaxAttention(Mixer):
    """Multi-head softmax attention with rotary MD-LRPE, on a grid of any number of axes.

    heads: default one per 64 channels. context_dim: channels of the source in the cross form;
    default `dim`. rotary: position code in every layer.
    Parameters: 4 dim^2 (+ dim / 2 learnt angles).
    """

    ragged, order_free = True, True

    def __init__(
        self, dim: int, heads: int | None = None, *, context_dim: int | None = None, rotary: bool = True
    ) -> None:
        super().__init__()
        self.heads, head_dim = default_heads(dim, heads)
        source = context_dim or dim
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(source, dim, bias=False)
        self.v_proj = nn.Linear(source, dim, bias=False)
        self.lrpe = MDLRPE(self.heads, head_dim, "rotary") if rotary else None
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def mix(self, x: Tensor, layout: Layout, mask: Tensor | None, causal: bool) -> Tensor:
        (x,) = zero_padding(mask, x)
        q, k, v = self._heads(project(x, self.q_proj, self.k_proj, self.v_proj))
        if self.lrpe:
            q, k = self.lrpe.rotate(layout, q, k)
        y = attend_in_samples(partial(_attend, causal=causal), q, k, v, mask, layout, causal)
        return self.o_proj(y.flatten(2))

    def mix_context(self, x: Tensor, grid: Grid, context: Tensor, source: Grid, mask: Tensor | None) -> Tensor:
        return self.read_source(x, grid, self.summarize_source(context, source, mask), source)

    def summarize_source(self, context: Tensor, source: Grid, mask: Tensor | None) -> tuple[Any, ...]:
        (context,) = zero_padding(mask, context)
        k, v = self._heads((self.k_proj(context), self.v_proj(context)))
        if self.lrpe:
            (k,) = self.lrpe.rotate(source, k)
        return k, v, mask

    def read_source(self, x: Tensor, grid: Grid, summary: tuple[Any, ...], source: Grid) -> Tensor:
        (q,), (k, v, mask) = self._heads((self.q_proj(x),)), summary
        if self.lrpe:
            check_axes(grid, source, "; use rotary=False")
            (q,) = self.lrpe.rotate(grid, q)
        return self.o_proj(_attend(grid, q, k, v, mask).flatten(2))

    def _heads(self, qkv: Iterable[Tensor]) -> list[Tensor]:
        return [y.unflatten(-1, (self.heads, -1)) for y in qkv]


def _attend(grid: Grid, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
    """Map q, k, v (batch, length, heads, dim) to the form of q, whose tokens are on `grid`."""
    keys = None if mask is None else mask[:, None, None]
    plain = causal and grid.length == grid.frame_count > 0 and keys is None
    if causal and not plain:  # torch takes a mask or is_causal, not both
        frame = grid.coordinates(q.device)[:, 0]
        before = frame[:, None] >= frame
        keys = before if keys is None else keys & before
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    return softmax_attention(q, k, v, attn_mask=keys, is_causal=plain).transpose(1, 2)
