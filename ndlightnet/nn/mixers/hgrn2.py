"""HGRN2 (Qin et al., 2024, arXiv 2404.07904): keys are 1 minus their decays."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndlightnet.nn.mixers.base import zero_padding
from ndlightnet.nn.mixers.keyed import Inputs, Keyed
from ndlightnet.nn.mixers.recurrent import Scan
from ndlightnet.ops.dispatch import Impl
from ndlightnet.ops.dtypes import accumulator


class HGRN2(Keyed):
    """HGRN2: o_proj(norm(m_t^T SiLU(q_t))), m_t = Diag(f_t) m_(t-1) + (1 - f_t) v_t^T, with
    f_t = sigmoid(.). (The original has a least f_t, which it raises from 0 layer by layer.)

    Args:
        dim: channels of a token.
        heads: default: one per 64 channels.
        scan: how a grid is covered; see Recurrent.
        impl: "auto", "torch", "fla" or "reference"; see ndlightnet.ops.recurrence.gated.

    Parameters: 4 dim^2 + dim.
    """

    def __init__(self, dim: int, heads: int | None = None, *, scan: Scan = "both", impl: Impl = "auto") -> None:
        super().__init__(dim, heads, scan, impl)
        self.width = 3 * dim
        self.in_proj = nn.Linear(dim, 3 * dim, bias=False)
        self.norm = nn.RMSNorm(dim, eps=1e-5)

    def inputs(self, z: Tensor, mask: Tensor | None) -> Inputs:
        q, decay, v = self.split(z, *[self.value_dim] * 3)
        log = F.logsigmoid(decay.to(accumulator(decay)))
        k = -torch.expm1(log)  # 1 - f, accurate also where it is tiny
        k, v, log = zero_padding(mask, k.to(v.dtype), v, log)
        return Inputs(F.silu(q), k, v, log)

    def output(self, inputs: Inputs, y: Tensor) -> Tensor:
        return self.o_proj(self.norm(y.flatten(2)))
