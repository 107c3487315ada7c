"""LightNet attention whose decay is not that of its key: the ablation "no share" of LightNet's Table 4."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ndlightnet.layout import Grid
from ndlightnet.nn.initial import Device
from ndlightnet.nn.mixers.base import check_axes, expand_to, zero_padding
from ndlightnet.nn.mixers.keyed import Inputs, Keyed
from ndlightnet.nn.mixers.recurrent import Scan
from ndlightnet.nn.position import MDLRPE
from ndlightnet.nn.projections import project
from ndlightnet.ops.dispatch import Impl
from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.position import key_features
from ndlightnet.ops.recurrence.wkv import LOWEST


class UnsharedLightNet(Keyed):
    """The paper's layer (published_mixer) with a second map f for the decay (LightNet, arXiv 2405.21022, Table 4):

        m_t = Diag(1 - exp(f_t) / sum_(s <= t) exp(f_s)) m_(t-1) + (exp(k_t) / sum_(s <= t) exp(k_s)) v_t^T
        y_t = o_proj(norm(merge heads m_t^T SiLU(q_t)) * sigmoid(gate_t)), keys and queries with cosine MD-LRPE

    LightNet has f = k, so that m_t is a softmax over tokens, which one pass over a grid gives. For another f the order
    of tokens matters: a grid is scanned, and a frame of several tokens is read one after the other if causal.

    The paper prints 379 M parameters, without sharing 385 M, for 26 layers of width 1,024: f is of low rank, 94 to 131.
    Here it is dim / 8.

    Args:
        dim: channels of a token.
        heads: default: one per 64 channels.
        scan: how a grid is covered; see Recurrent.
        impl: "auto", "torch", "fla" or "reference"; see ndlightnet.ops.recurrence.gated.

    The cross form needs as many axes in the source. Parameters: 4 dim^2 + 2 dim^2 / heads + 2 dim (dim // 8) + 3 dim.
    """

    def __init__(self, dim: int, heads: int | None = None, *, scan: Scan = "both", impl: Impl = "auto") -> None:
        super().__init__(dim, heads, scan, impl, key_ratio=2.0)  # keys by cosines and by sines of their angles
        self.width, low, rank = 7 * dim, self.value_dim, max(1, dim // 8)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.decay_proj = nn.Sequential(nn.Linear(dim, rank, bias=False), nn.Linear(rank, dim, bias=False))
        self.gate = nn.Sequential(nn.Linear(dim, low, bias=False), nn.Linear(low, dim, bias=False))
        self.lrpe = MDLRPE(self.heads, self.value_dim, "cosine")
        self.norm = nn.LayerNorm(dim, eps=1e-6)

    def project(self, x: Tensor) -> Tensor:
        qkv = project(x, self.q_proj, self.k_proj, self.v_proj)
        return torch.cat([*qkv, self.decay_proj(x), self.gate(x)], -1)

    def place(self, z: Tensor, grid: Grid) -> Tensor:
        factors = key_features(self.lrpe(grid), self.value_dim, z.dtype).flatten(-2)
        return torch.cat([z, factors.expand(*z.shape[:-1], -1)], -1)

    def values(self, x: Tensor) -> Tensor:
        return self.v_proj(x)

    def inputs(self, z: Tensor, mask: Tensor | None) -> Inputs:
        q, k, v, decay, gate, factors = self.split(z, *[self.value_dim] * 5, 2 * self.value_dim)
        logits = torch.cat([k, decay], -1).to(accumulator(k))
        if mask is not None:
            logits = logits.masked_fill(~expand_to(mask, logits), LOWEST)
        (v,) = zero_padding(mask, v)
        return Inputs(F.silu(q).repeat(1, 1, 1, 2) * factors, factors, v, logits, gate=gate)

    def recur(self, inputs: Inputs, memory: Tensor, inclusive: int) -> tuple[Tensor, Tensor]:
        # the memory's last column: logarithms of the sums of exp(k) and of exp(f)
        logits: Any = inputs.log_decay
        sums = torch.cat([memory[:, None, ..., -1], logits.to(memory.dtype)], 1).logcumsumexp(1)
        k = (logits - sums[:, 1:]).chunk(2, -1)[0]
        log_decay = (sums[:, :-1] - sums[:, 1:]).chunk(2, -1)[1].repeat(1, 1, 1, 2)
        k = k.exp().to(inputs.v.dtype).repeat(1, 1, 1, 2) * inputs.k
        y, last = super().recur(inputs._replace(k=k, log_decay=log_decay), memory[..., :-1], inclusive)
        return y, torch.cat([last, sums[:, -1, ..., None]], -1)

    def output(self, inputs: Inputs, y: Tensor) -> Tensor:
        return self.o_proj(self.norm(y.flatten(2)) * torch.sigmoid(inputs.gate.flatten(2)))

    def initial_memory(self, batch: int, device: Device) -> Tensor:
        return F.pad(super().initial_memory(batch, device), (0, 1), value=LOWEST)

    def mix_context(self, x: Tensor, grid: Grid, context: Tensor, source: Grid, mask: Tensor | None) -> Tensor:
        check_axes(grid, source)
        return super().mix_context(x, grid, context, source, mask)
