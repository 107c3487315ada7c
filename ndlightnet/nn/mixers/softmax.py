"""Softmax attention (torch's scaled_dot_product_attention): the quadratic baseline."""

from __future__ import annotations

from torch import Tensor, nn

from ndlightnet.layout import Grid
from ndlightnet.nn.mixers.base import Mixer, check_axes, default_heads, zero_padding
from ndlightnet.nn.position import MDLRPE
from ndlightnet.ops import rotate, tables
from ndlightnet.ops.plain import softmax_attention


class SoftmaxAttention(Mixer):
    """Multi-head softmax attention with rotary MD-LRPE, on a grid of any number of axes.

    heads: default one per 64 channels. context_dim: channels of the source in the cross form;
    default `dim`. rotary: position code in every layer.
    Parameters: 4 dim^2 (+ dim / 2 learnt angles).
    """

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

    def mix(self, x: Tensor, layout: Grid, mask: Tensor | None, causal: bool) -> Tensor:
        return self._attend(x, layout, x, layout, mask, causal)

    def mix_context(self, x: Tensor, grid: Grid, context: Tensor, source: Grid, mask: Tensor | None) -> Tensor:
        if self.lrpe:
            check_axes(grid, source, "; use rotary=False")
        return self._attend(x, grid, context, source, mask, False)

    def _attend(
        self, x: Tensor, grid: Grid, context: Tensor, source: Grid, mask: Tensor | None, causal: bool
    ) -> Tensor:
        (context,) = zero_padding(mask, context)
        q, k, v = (
            proj(tokens).unflatten(-1, (self.heads, -1))
            for proj, tokens in ((self.q_proj, x), (self.k_proj, context), (self.v_proj, context))
        )
        if self.lrpe:
            q, k = (
                rotate(y, *tables(self.lrpe(layout.shape), y.shape[-1], y.dtype))
                for y, layout in ((q, grid), (k, source))
            )
        keys = None if mask is None else mask[:, None, None]
        plain = causal and grid.length == grid.frame_count > 0 and keys is None
        if causal and not plain:  # torch takes a mask or is_causal, not both
            frame = grid.coordinates(x.device)[:, 0]
            before = frame[:, None] >= frame
            keys = before if keys is None else keys & before
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = softmax_attention(q, k, v, attn_mask=keys, is_causal=plain)
        return self.o_proj(y.transpose(1, 2).flatten(2))
