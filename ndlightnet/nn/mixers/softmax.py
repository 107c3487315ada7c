"""Softmax attention (torch's scaled_dot_product_attention): the quadratic baseline."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ndlightnet.layout import Grid, Ragged
from ndlightnet.nn.heads import default_heads, split_heads
from ndlightnet.nn.mixers.mixer import Mixer, check_axes, check_source
from ndlightnet.nn.position import MDLRPE
from ndlightnet.ops import rotate, tables


class SoftmaxAttention(Mixer):
    """Multi-head softmax attention with rotary MD-LRPE, on a grid of any number of axes.

    heads: default one per 64 channels. context_dim: channels of the source in the cross form;
    default `dim`. rotary: position code in every layer.
    Parameters: 4 dim^2 (+ dim / 2 learnt angles).
    """

    def __init__(
        self,
        dim: int,
        heads: int | None = None,
        *,
        context_dim: int | None = None,
        rotary: bool = True,
    ) -> None:
        super().__init__()
        self.heads, head_dim = default_heads(dim, heads)
        source = context_dim or dim
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(source, dim, bias=False)
        self.v_proj = nn.Linear(source, dim, bias=False)
        self.lrpe = MDLRPE(self.heads, head_dim, "rotary") if rotary else None
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(
        self, x: Tensor, *, context: Tensor | None = None, mask: Tensor | None = None,
        causal: bool = False, layout: Ragged | None = None,
    ) -> Tensor:  # fmt: skip
        """Tokens (batch, *grid, dim) -> same shape. context: a source (batch, *its grid,
        context_dim) to read instead of x; with rotary its grid needs as many axes. mask: bool over
        the source's tokens (batch, *grid), False = padding. causal: along the first axis; without
        context. layout: of samples end to end (x (length, dim), mask (length,)), which are done one
        after the other."""
        check_source(context, causal, layout)
        if layout is not None:
            return layout.each(self, x, mask, causal=causal)
        grid, context = Grid.of(x), x if context is None else context
        source = Grid.of(context)
        if self.lrpe:
            check_axes(grid, source, "; use rotary=False")
        if mask is not None:  # else NaN in the padding would leak
            context = context.masked_fill(~mask[..., None], 0)
        q = split_heads(self.q_proj(x), self.heads, grid)
        k, v = (split_heads(proj(context), self.heads, source)
                for proj in (self.k_proj, self.v_proj))  # fmt: skip
        if self.lrpe:
            q, k = (
                rotate(part, *tables(self.lrpe(at.shape), part.shape[-1], part.dtype))
                for part, at in ((q, grid), (k, source))
            )
        keep = source.flatten_mask(mask)
        if keep is not None:
            keep = keep[:, None, None]
        tokens = grid.length // max(1, grid.shape[0])  # of a frame
        simple = causal and tokens == 1 and keep is None
        if causal and not simple:  # torch takes a mask or the flag, not both
            frame = torch.arange(grid.length, device=x.device) // max(1, tokens)
            before = frame[:, None] >= frame
            keep = before if keep is None else keep & before
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = scaled_dot_product_attention(q, k, v, attn_mask=keep, is_causal=simple)
        out: Tensor = self.o_proj(grid.unflatten(y.transpose(1, 2).flatten(2)))
        return out
