"""Softmax attention (torch's scaled_dot_product_attention): the quadratic baseline."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ndlightnet.grid import Grid
from ndlightnet.nn.heads import default_heads, split_heads
from ndlightnet.nn.position import MDLRPE
from ndlightnet.ops import rotate, tables
from ndlightnet.ragged import Ragged


class SoftmaxAttention(nn.Module):
    """Multi-head softmax attention with rotary MD-LRPE, on a grid of any number of axes.

    heads: default one per 64 channels. rotary: position code in every layer.
    Parameters: 4 dim^2 (+ dim / 2 learnt angles).
    """

    def __init__(self, dim: int, heads: int | None = None, *, rotary: bool = True) -> None:
        super().__init__()
        self.heads, head_dim = default_heads(dim, heads)
        self.qkv_proj = nn.Linear(dim, 3 * dim, bias=False)
        self.lrpe = MDLRPE(self.heads, head_dim, "rotary") if rotary else None
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(
        self, x: Tensor, *, mask: Tensor | None = None, causal: bool = False,
        layout: Ragged | None = None,
    ) -> Tensor:  # fmt: skip
        """Tokens (batch, *grid, dim) -> same shape. mask: bool (batch, *grid), False = padding.
        causal: along the first axis. layout: of samples end to end (x (length, dim), mask
        (length,)), which are done one after the other."""
        if layout is not None:
            if mask is None:
                return layout.map(lambda one: self(one, causal=causal), x)
            return layout.map(lambda one, keep: self(one, mask=keep, causal=causal), x, mask)
        grid = Grid.of(x)
        q, k, v = (split_heads(part, self.heads, grid) for part in self.qkv_proj(x).chunk(3, -1))
        if self.lrpe:
            cos, sin = tables(self.lrpe(grid.shape), q.shape[-1], q.dtype)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        keep = grid.flatten_mask(mask)
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
