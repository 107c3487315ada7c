"""Softmax attention to the neighbourhood only: the baseline of a window without a memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ndlightnet.layout import Grid, per_axis
from ndlightnet.nn.heads import default_heads
from ndlightnet.nn.mixers.base import Mixer, zero_padding
from ndlightnet.ops.local import local_attention


class WindowAttention(Mixer):
    """Multi-head softmax attention of each token to those within `window` steps of it along every
    axis (|j - i| < window), with learnt biases by distance, shared by the axes.

    heads: default one per 64 channels. window: one number for all axes, or one per axis; 4
    means 7 tokens along each axis.
    Parameters: 4 dim^2 + heads (2 max(window) - 1).
    """

    def __init__(
        self, dim: int, heads: int | None = None, *, window: int | Sequence[int] = 4
    ) -> None:
        super().__init__()
        self.heads, self.head_dim = default_heads(dim, heads)
        self.window = window if isinstance(window, int) else tuple(window)
        sizes = (self.window,) if isinstance(self.window, int) else self.window
        most = max(sizes, default=0)
        if min(sizes, default=0) < 1:
            raise ValueError(f"window={window!r}: expected 1 or more, or so many for each axis")
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        bias = torch.empty(self.heads, 2 * most - 1)
        self.bias = nn.Parameter(nn.init.normal_(bias, std=self.head_dim**-0.5))
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def mix(self, x: Tensor, layout: Grid, mask: Tensor | None, causal: bool) -> Tensor:
        (x,) = zero_padding(mask, x)
        q, k, v = (
            layout.unflatten(proj(x).unflatten(-1, (self.heads, self.head_dim)))
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        mask = None if mask is None else layout.unflatten(mask)
        windows = per_axis("window", self.window, layout.ndim)
        tables = [self.bias] * layout.ndim
        y = local_attention(q, k, v, windows, tables, mask=mask, causal=causal)
        out: Tensor = self.o_proj(layout.flatten(y).flatten(2))
        return out
