"""Mamba (Gu and Dao, 2023, arXiv 2312.00752): a selective state-space model."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndlightnet.layout.abstract import check_integers
from ndlightnet.nn.initial import Device, assign
from ndlightnet.nn.mixers.recurrent import Recurrent, Scan, exclude_self, init_dt_bias, short_conv
from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.recurrence.selective import selective_scan

TAPS = 4  # kernel size of the short convolution
EXPAND = 2
STEPS = 1e-3, 0.1  # range of the initial steps softplus(dt_bias)


class Inputs(NamedTuple):
    """Inputs of the recurrence, (batch, length, ...); see ndlightnet.ops.recurrence.selective."""

    u: Tensor
    delta: Tensor
    B: Tensor
    C: Tensor
    gate: Tensor


class Mamba(Recurrent):
    """Mamba: out_proj((y + D * u) * SiLU(gate)), u = SiLU of a causal convolution over 4 tokens,
    m_t = exp(delta_t A) * m_(t-1) + (delta_t u_t) B_t^T, y_t = m_t C_t; B, C and the step delta =
    softplus(low-rank(u) + dt_bias) depend on the token. The inner width is 2 dim.

    Args:
        dim: channels of a token.
        state: size of a channel's state.
        scan: how a grid is covered; see Recurrent.

    Parameters: 6 dim^2 + (6 state + 4 rank + 14) dim with rank = dim / 16, rounded up.
    """

    lookback = TAPS - 1

    undecayed = ("A_log",)

    def __init__(self, dim: int, state: int = 16, *, scan: Scan = "both") -> None:
        super().__init__(scan)
        check_integers(1, dim=dim)
        inner, self.rank, self.state = EXPAND * dim, math.ceil(dim / 16), state
        self.width = 2 * inner
        self.in_proj = nn.Linear(dim, 2 * inner, bias=False)
        self.conv = nn.Parameter(torch.empty(inner, TAPS))
        self.conv_bias = nn.Parameter(torch.empty(inner))
        self.x_proj = nn.Linear(inner, self.rank + 2 * state, bias=False)
        # a parameter, since `init_weights` of a network would initialise a linear map again
        self.delta_weight = nn.Parameter(torch.empty(inner, self.rank))
        self.dt_bias = nn.Parameter(torch.empty(inner))
        self.A_log = nn.Parameter(torch.empty(inner, state))
        self.D = nn.Parameter(torch.empty(inner))
        self.out_proj = nn.Linear(inner, dim, bias=False)
        self.reset_own()

    @torch.no_grad()
    def reset_own(self) -> None:
        self.conv.uniform_(-1, 1).div_(math.sqrt(TAPS))
        self.conv_bias.uniform_(-1, 1).div_(math.sqrt(TAPS))
        self.delta_weight.uniform_(-1, 1).div_(math.sqrt(self.rank))
        init_dt_bias(self.dt_bias, *STEPS)
        rates = torch.arange(1.0, self.state + 1, device=self.A_log.device)
        assign(self.A_log, rates.log().repeat(len(self.A_log), 1))
        self.D.fill_(1)

    def project(self, x: Tensor) -> Tensor:
        return self.in_proj(x)

    def values(self, x: Tensor) -> Tensor:
        return F.linear(x, self.in_proj.weight.chunk(2)[0])

    def output_map(self, values: Tensor) -> Tensor:
        return F.linear(values, self.out_proj.weight)

    def inputs(self, z: Tensor, mask: Tensor | None) -> Inputs:
        u, gate = z.chunk(2, -1)
        u = F.silu(short_conv(u, self.conv) + self.conv_bias.to(u.dtype))
        low, b, c = self.x_proj(u).split([self.rank, self.state, self.state], -1)
        logits = F.linear(low, self.delta_weight)
        acc = accumulator(logits)
        delta = F.softplus(logits.to(acc) + self.dt_bias.to(acc))
        return Inputs(u, delta, b, c, gate[:, self.lookback :])

    def recur(self, inputs: Inputs, memory: Tensor, inclusive: int) -> tuple[Tensor, Tensor]:
        u, delta, b, c, _ = inputs
        y, memory = selective_scan(u, delta, -self.A_log.to(delta.dtype).exp(), b, c, memory)

        def self_read(n: slice) -> Tensor:
            return (b[n] * c[n]).sum(-1, keepdim=True) * (delta[n] * u[n]).to(y.dtype)

        return exclude_self(y, inclusive, self_read), memory

    def output(self, inputs: Inputs, y: Tensor) -> Tensor:
        y = (y + self.D.to(y.dtype) * inputs.u) * F.silu(inputs.gate)
        return self.out_proj(y)

    def initial_memory(self, batch: int, device: Device) -> Tensor:
        dtype = accumulator(self.D)
        return torch.zeros(batch, *self.A_log.shape, dtype=dtype, device=device)
