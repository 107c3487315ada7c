"""Gated linear attention (Yang et al., 2024, arXiv 2312.06635): a decay for every key channel that
depends on the token."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndlightnet.nn.mixers.base import zero_padding
from ndlightnet.nn.mixers.keyed import Inputs, Keyed
from ndlightnet.nn.mixers.recurrent import Scan
from ndlightnet.ops.dispatch import Impl
from ndlightnet.ops.dtypes import accumulator

RANK, TEMPERATURE = 16, 16.0


class GLA(Keyed):
    """GLA: o_proj(norm(m_t^T q_t) * SiLU(gate)), m_t = Diag(alpha_t) m_(t-1) + k_t v_t^T, with
    alpha_t = sigmoid(low-rank(x_t))^(1/16) and key_dim = value_dim / 2.

    Args:
        dim: channels of a token.
        heads: default: one per 64 channels.
        scan: how a grid is covered; see Recurrent.
        impl: "auto", "torch", "fla" or "reference"; see ndlightnet.ops.recurrence.gated.

    Parameters: 4 dim^2 + 24 dim + dim / heads + dim / 2.
    """

    def __init__(self, dim: int, heads: int | None = None, *, scan: Scan = "both", impl: Impl = "auto") -> None:
        super().__init__(dim, heads, scan, impl, key_ratio=0.5)
        keys = self.heads * self.key_dim
        self.width = 3 * keys + 2 * dim
        self.in_proj = nn.Linear(dim, 2 * keys + 2 * dim, bias=False)
        self.decay_proj = nn.Sequential(nn.Linear(dim, RANK, bias=False), nn.Linear(RANK, keys, bias=True))
        self.norm = nn.RMSNorm(self.value_dim, eps=1e-5)

    def project(self, x: Tensor) -> Tensor:
        return torch.cat([self.in_proj(x), self.decay_proj(x)], -1)

    def inputs(self, z: Tensor, mask: Tensor | None) -> Inputs:
        keys, values = self.key_dim, self.value_dim
        q, k, v, gate, decay = self.split(z, keys, keys, values, values, keys)
        decay = F.logsigmoid(decay.to(accumulator(decay))) / TEMPERATURE
        k, v, decay = zero_padding(mask, k, v, decay)
        return Inputs(q * keys**-0.5, k, v, decay, gate=gate)
