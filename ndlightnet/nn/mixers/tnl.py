"""TNL (Qin et al., 2023, arXiv 2307.14995) and RetNet's retention: one fixed decay per head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndlightnet.nn.initial import assign
from ndlightnet.nn.mixers.base import zero_padding
from ndlightnet.nn.mixers.keyed import Inputs, Keyed
from ndlightnet.nn.mixers.recurrent import Scan
from ndlightnet.ops.dispatch import Impl
from ndlightnet.ops.dtypes import accumulator


class TNL(Keyed):
    """TNL: o_proj(norm(m_t^T q_t) * sigmoid(gate)), m_t = lambda m_(t-1) + k_t v_t^T, with q and k after SiLU, a norm
    without weights for each head, and lambda = exp(-2^(-8 h / heads)) in head h = 1, ..., heads.

    Args:
        dim: channels of a token.
        heads: default: one per 64 channels.
        scan: how a grid is covered; see Recurrent.
        impl: "auto", "torch", "fla" or "reference"; see ndlightnet.ops.recurrence.gated.

    Parameters: 5 dim^2 + heads (the latter fixed).
    """

    def __init__(self, dim: int, heads: int | None = None, *, scan: Scan = "both", impl: Impl = "auto") -> None:
        super().__init__(dim, heads, scan, impl, decays=1)
        self.width = 4 * dim
        self.in_proj = nn.Linear(dim, self.width, bias=False)
        self.slope = nn.Parameter(torch.empty(self.heads), requires_grad=False)
        self.reset_own()

    def reset_own(self) -> None:
        head = torch.arange(1, self.heads + 1, device=self.slope.device)
        # softplus of the parameter is the slope
        assign(self.slope, torch.log(torch.expm1(2.0 ** (-8 * head / self.heads))))

    def inputs(self, z: Tensor, mask: Tensor | None) -> Inputs:
        q, k, v, gate = self.split(z, *[self.value_dim] * 4)
        q, k = F.silu(q), F.silu(k)
        decay = -F.softplus(self.slope.to(accumulator(self.slope)))
        decay = decay[:, None].expand(*z.shape[:2], -1, -1)
        k, v, decay = zero_padding(mask, k, v, decay)
        return Inputs(q, k, v, decay, gate=gate)

    def output(self, inputs: Inputs, y: Tensor) -> Tensor:
        y = F.rms_norm(y.to(accumulator(y)), y.shape[-1:], eps=1e-6)
        y = y.to(inputs.v.dtype) * torch.sigmoid(inputs.gate)
        return self.o_proj(y.flatten(2))
