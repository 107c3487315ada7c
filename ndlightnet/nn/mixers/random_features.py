"""Attention by random features: Performer's (Choromanski et al., 2021, arXiv 2009.14794) and RFA's (Peng et al., 2021,
arXiv 2103.02143)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from ndlightnet.nn.initial import assign
from ndlightnet.nn.mixers.linear import LinearAttention
from ndlightnet.ops.dispatch import Impl
from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.recurrence.chunks import exact

MOST, SHIFT = 30.0, 25.0  # most of a scale times the root of head_dim, about that of w . x; of the exponents of keys


class RandomFeatureAttention(LinearAttention):
    """Linear attention (LAVO, Eq. 7 to 9) whose phi(q) . phi(k) estimates a kernel of softmax attention. Queries and
    keys have length 1, times a learnt scale for each head, at most 30 / sqrt(head_dim). As many directions w as a head
    has channels are fixed: orthogonal, with the lengths of Gaussian ones.

    Args:
        dim, heads, context_dim, impl: as in LinearAttention.
        kernel: "softmax": phi = exp(w . x - |x|^2 / 2) estimates exp(q . k) (Performer). "gaussian": phi = sin(w . x),
            cos(w . x) estimates exp(-|q - k|^2 / 2) (RFA), in a memory of two rows for each channel. As an estimate may
            be negative, each head's output is scaled to a root mean square of 1, not divided by their sum.

    Parameters: 4 dim^2 + heads; and dim^2 / heads fixed ones, the directions.
    """

    def __init__(
        self,
        dim: int,
        heads: int | None = None,
        *,
        context_dim: int | None = None,
        kernel: Literal["softmax", "gaussian"] = "softmax",
        impl: Impl = "auto",
    ) -> None:
        super().__init__(dim, heads, context_dim=context_dim, impl=impl)
        if kernel not in ("softmax", "gaussian"):
            raise ValueError(f"kernel={kernel!r}: expected 'softmax' or 'gaussian'")
        self.kernel, self.denominator = kernel, kernel == "softmax"
        self.log_scale = nn.Parameter(torch.empty(self.heads))
        shape = self.heads, self.head_dim, self.head_dim
        self.directions = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.reset_own()

    @torch.no_grad()
    def reset_own(self) -> None:
        nn.init.zeros_(self.log_scale)
        normal = torch.randn(self.directions.shape, dtype=torch.float32, device=self.directions.device)
        # rows of an orthogonal matrix, with the lengths of normal ones
        rows = torch.stack([nn.init.orthogonal_(torch.empty_like(head)) for head in normal])
        assign(self.directions, rows * normal.norm(dim=-1, keepdim=True))

    def features(self, x: Tensor, query: bool) -> Tensor:
        acc = accumulator(x)
        x = x.to(acc)
        scale = self.log_scale.to(acc).clamp(max=math.log(MOST / math.sqrt(self.head_dim))).exp()[:, None]
        x = x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() * scale
        with exact(x):
            z = torch.einsum("blhc,hfc->blhf", x, self.directions.to(acc))
        if self.kernel == "gaussian":
            return torch.cat([z.sin(), z.cos()], -1)
        # factors that all keys of a query share cancel: chosen so that sums are within float32, above the least one
        if query:
            return (z - z.amax(-1, keepdim=True)).exp()
        return (z + (scale.square() - x.square().sum(-1, keepdim=True)) / 2 + SHIFT).exp()

    def rows(self, ndim: int) -> int:
        return 1 if self.kernel == "softmax" else 2
