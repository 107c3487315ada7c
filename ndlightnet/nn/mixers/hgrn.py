"""HGRN (Qin, Yang and Zhong, 2023, arXiv 2311.04823): a gated recurrence of complex channels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndlightnet.layout.abstract import check_integers
from ndlightnet.nn.initial import Device, assign
from ndlightnet.nn.mixers.recurrent import Recurrent, Scan, exclude_self
from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.recurrence.scan import scan as linear_scan
from ndlightnet.ops.recurrence.ssm import COMPLEX


class Inputs(NamedTuple):
    """Inputs of the recurrence, (batch, length, dim), real; see HGRN."""

    real: Tensor  # of the candidates c
    imag: Tensor
    decay: Tensor  # logits of f
    gate: Tensor  # (batch, length, 2 dim)


class HGRN(Recurrent):
    """HGRN: o_proj(norm(SiLU(gate) * [Re h, Im h])), h_t = f_t exp(i theta) h_(t-1) + (1 - f_t) c_t, with Re c and Im c
    = SiLU(.), f = sigmoid(.) of the token; theta is learnt. (The original has a least f, which it raises from 0 layer
    by layer.)

    Args:
        dim: channels of a token.
        scan: how a grid is covered; see Recurrent.

    Parameters: 7 dim^2 + 3 dim.
    """

    undecayed = ("theta",)

    def __init__(self, dim: int, *, scan: Scan = "both") -> None:
        super().__init__(scan)
        check_integers(1, dim=dim)
        self.dim, self.width = dim, 5 * dim
        self.in_proj = nn.Linear(dim, 5 * dim, bias=False)
        self.theta = nn.Parameter(torch.empty(dim, dtype=torch.float32))
        self.norm = nn.RMSNorm(2 * dim, eps=1e-5)
        self.o_proj = nn.Linear(2 * dim, dim, bias=False)
        self.reset_own()

    def reset_own(self) -> None:
        # angles of a step, fast to slow
        assign(self.theta, 10000.0 ** (-torch.arange(self.dim, device=self.theta.device) / self.dim))

    def project(self, x: Tensor) -> Tensor:
        return self.in_proj(x)

    def values(self, x: Tensor) -> Tensor:
        return F.linear(x, self.in_proj.weight[: 2 * self.dim])

    def inputs(self, z: Tensor, mask: Tensor | None) -> Inputs:
        real, imag, decay, gate = z.split([self.dim] * 3 + [2 * self.dim], -1)
        return Inputs(real, imag, decay, gate)

    def recur(self, inputs: Inputs, memory: Tensor, inclusive: int) -> tuple[Tensor, Tensor]:
        real, imag, decay = (x.to(memory.real.dtype) for x in inputs[:3])
        f = decay.sigmoid()
        added = torch.sigmoid(-decay) * torch.complex(F.silu(real), F.silu(imag))
        theta = self.theta.to(f.dtype)
        h = linear_scan(f * torch.polar(torch.ones_like(theta), theta), added, memory)
        last = h[:, -1] if h.shape[1] else memory
        read = exclude_self(h, inclusive, lambda n: added[n])
        return torch.cat([read.real, read.imag], -1).to(inputs.gate.dtype), last

    def output(self, inputs: Inputs, y: Tensor) -> Tensor:
        return self.o_proj(self.norm(F.silu(inputs.gate) * y))

    def initial_memory(self, batch: int, device: Device) -> Tensor:
        dtype = COMPLEX[accumulator(self.o_proj.weight)]
        return torch.zeros(batch, self.dim, dtype=dtype, device=device)
