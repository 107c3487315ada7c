"""Nyström attention (Nyströmformer; Xiong et al., 2021, arXiv 2102.03902)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ndlightnet.layout import Grid
from ndlightnet.layout.abstract import check_integers
from ndlightnet.nn.mixers.base import Mixer, default_heads, zero_padding
from ndlightnet.nn.mixers.cosformer import margin
from ndlightnet.nn.projections import project
from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.empty import empty_result
from ndlightnet.ops.plain import softmax_attention
from ndlightnet.ops.recurrence.chunks import exact

STEPS = 6  # of the iteration for the pseudo-inverse, as in the paper


class NystromAttention(Mixer):
    """Nyström approximation of softmax attention, of linear cost, without the paper's convolution of the values (see
    WithLocal). With landmarks Q', K', the means of queries and keys over boxes of the grid, and s = head_dim^-1/2:

    o_proj of softmax(s Q K'^T) softmax(s Q' K'^T)^+ softmax(s Q' K^T) V.

    The boxes divide each axis of a sample, without the padding around it, into nearly equal pieces. Padding counts for
    no mean, and a box of nothing else is left out. No position code and no causal form: a landmark is a mean over
    earlier and later tokens.

    Args:
        dim: channels of a token.
        heads: default: one per 64 channels.
        landmarks: number of boxes: on `ndim` axes, round(landmarks^(1/ndim)) pieces of each.

    Parameters: 4 dim^2.
    """

    causal_form = False

    def __init__(self, dim: int, heads: int | None = None, *, landmarks: int = 64) -> None:
        super().__init__()
        self.heads, self.head_dim = default_heads(dim, heads)
        check_integers(1, landmarks=landmarks)
        self.landmarks = landmarks
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def mix(self, x: Tensor, layout: Grid, mask: Tensor | None, causal: bool) -> Tensor:
        (x,) = zero_padding(mask, x)
        q, k, v = (self._split(y) for y in project(x, self.q_proj, self.k_proj, self.v_proj))
        if x.numel() == 0:
            return self.o_proj(empty_result(q, k, v).transpose(1, 2).flatten(2))
        means, real = self._means(x, layout, mask)
        # the mean of the queries is the query of the mean
        near_q, near_k = (self._split(y) for y in project(means.to(x.dtype), self.q_proj, self.k_proj))
        read = softmax_attention(near_q, k, v, attn_mask=None if mask is None else mask[:, None, None])
        with exact(x):
            dtype = accumulator(q)
            scores = near_q.to(dtype) @ near_k.to(dtype).mT * self.head_dim**-0.5
            scores = scores.masked_fill(~real[:, None, None], torch.finfo(dtype).min)
            weights = scores.softmax(-1) * real[:, None, :, None]
            values = (inverse(weights) @ read.to(dtype)).to(q.dtype)
        y = softmax_attention(q, near_k, values, attn_mask=real[:, None, None])
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)

    def _means(self, x: Tensor, layout: Grid, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the means over the boxes (batch, boxes, dim), and which boxes have tokens (batch, boxes)."""
        real = torch.ones_like(x[..., 0], dtype=torch.bool) if mask is None else mask
        sums = layout.unflatten(torch.cat([x, real[..., None].to(x.dtype)], -1).to(accumulator(x)))
        pieces = round(self.landmarks ** (1 / layout.ndim))
        with exact(x):
            for axis, size in enumerate(layout.shape):
                front, behind = margin(layout.unflatten(real), axis)
                at, extent = torch.arange(size, device=x.device) - front[:, None], size - front - behind
                box = at * pieces // extent.clamp(min=1)[:, None]
                boxes = (box[..., None] == torch.arange(pieces, device=x.device)).to(sums.dtype)
                sums = torch.einsum("bn...,bnm->b...m", sums, boxes)
        sums = sums.flatten(2).mT
        count = sums[..., -1:]
        return sums[..., :-1] / count.clamp(min=1), count[..., 0] > 0


def inverse(a: Tensor) -> Tensor:
    """Approximate the Moore-Penrose inverse of a (..., n, n), with entries >= 0, by an iteration of order three."""
    norms = a.sum(-2).amax(-1) * a.sum(-1).amax(-1)
    z = a.mT / norms.masked_fill(norms == 0, 1)[..., None, None]
    one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for _ in range(STEPS):
        az = a @ z
        z = z @ (13 * one - az @ (15 * one - az @ (7 * one - az))) / 4
    return z
