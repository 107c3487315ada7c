"""RWKV-4's time mixing (Peng et al., 2023, arXiv 2305.13048)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ndlightnet.layout.abstract import check_integers
from ndlightnet.nn.initial import Device, assign
from ndlightnet.nn.mixers.recurrent import Recurrent, Scan
from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.recurrence import wkv


class Inputs(NamedTuple):
    z: Tensor  # (batch, 1 + length, dim): the tokens and the one before
    k: Tensor  # (batch, length, dim)
    v: Tensor


class RWKV4(Recurrent):
    """RWKV-4: o_proj(sigmoid(r_t) * wkv_t); wkv_t is the mean of all v_s up to t, with weights
    exp(k_s - (t - 1 - s) w) before t and exp(k_t + bonus) at t, per channel, w = exp(decay); r, k,
    v are linear in a mixture of the token and the one before. Scanned in both directions it is one
    mean over all tokens, with exp(k_s - (|t - s| - 1) w), as in Vision-RWKV.

    Args:
        dim: channels of a token.
        scan: how a grid is covered; see Recurrent.

    The original initialises decays and mixtures by layer; here all layers are as its middle one.
    Parameters: 4 dim^2 + 5 dim.
    """

    lookback = 1

    def __init__(self, dim: int, *, scan: Scan = "both") -> None:
        super().__init__(scan)
        check_integers(1, dim=dim)
        self.width = dim
        self.decay, self.bonus, self.mix_k, self.mix_v, self.mix_r = (nn.Parameter(torch.empty(dim)) for _ in range(5))
        self.r_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.reset_own()

    def reset_own(self) -> None:
        dim, depth = self.width, 0.5
        at = torch.arange(dim, device=self.decay.device)
        ratio = at / max(1, dim - 1)
        assign(self.decay, -5 + 8 * ratio ** (0.7 + 1.3 * depth))
        assign(self.bonus, math.log(0.3) + 0.5 * ((at + 1) % 3 - 1))
        ratio = at / dim
        assign(self.mix_k, ratio ** (1 - depth))
        assign(self.mix_v, ratio ** (1 - depth) + 0.3 * depth)
        assign(self.mix_r, ratio ** ((1 - depth) / 2))

    def inputs(self, z: Tensor, mask: Tensor | None) -> Inputs:
        k, v = self.k_proj(token_shift(z, self.mix_k)), self.v_proj(token_shift(z, self.mix_v))
        return Inputs(z, k.to(accumulator(k)), v)

    def recur(self, inputs: Inputs, memory: Tensor, inclusive: int) -> tuple[Tensor, Tensor]:
        n, dtype, read = inclusive, inputs.k.dtype, []
        decay, bonus = self.decay.to(dtype).exp().expand(1, 1, -1), self.bonus.to(dtype)
        for k, v in wkv.segments(inputs.k, inputs.v):
            sums, memory = wkv.weighted_sums(k, v, decay, memory)
            with_self = wkv.merge(sums[:n], wkv.token(k[:n] + bonus, v[:n]))
            read.append(torch.cat([with_self, sums[n:]]) if n < sums.shape[0] else with_self)
        return read[0] if len(read) == 1 else torch.cat(read, 1), memory

    def join(self, one: Tensor, two: Tensor) -> Tensor:
        return wkv.merge(one, two)

    def output(self, inputs: Inputs, y: Tensor) -> Tensor:
        r = torch.sigmoid(self.r_proj(token_shift(inputs.z, self.mix_r)))
        return self.o_proj(r * wkv.mean(y).to(r.dtype))

    def initial_memory(self, batch: int, device: Device) -> Tensor:
        dtype = accumulator(self.decay)
        return wkv.empty(batch, self.width, dtype, device)


def token_shift(z: Tensor, mix: Tensor) -> Tensor:
    """Return mix * token + (1 - mix) * the token before; z (batch, 1 + length, dim)."""
    return torch.lerp(z[:, :-1], z[:, 1:], mix.to(z.dtype))
