"""RWKV-4's weighted mean (Peng et al., 2023, arXiv 2305.13048), per channel with a decay w > 0:

    wkv_t = sum_s weight_ts v_s / sum_s weight_ts,  weight_ts = exp(k_s - (t - 1 - s) w) for s < t,
    and exp(k_t + bonus) for t itself.

Sums are tensors (..., 3, channels) of numerator, denominator and exponent. The first two are to be
multiplied by exp(exponent); an exponent close to the largest one in the sum keeps them in range.
Results do not depend on it, so it has no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.empty import empty_result
from ndlightnet.ops.plain import plain
from ndlightnet.ops.recurrence.scan import MAXIMUM, before, memories, scan

LOWEST = -1e30  # the exponent of a sum over no tokens
SEGMENT = 2**18  # numbers of k that a CPU takes at a time: of more, sums would be new pages of memory in every call


def segments(k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Cut k, v (batch, length, channels) into pieces to run one after the other: one, except on a CPU."""
    if not k.is_cpu or plain() or torch.compiler.is_compiling():
        return [(k, v)]
    step = max(1, SEGMENT // max(1, k.shape[0] * k.shape[2]))
    return list(zip(k.split(step, 1), v.split(step, 1), strict=True))


def weighted_sums(k: Tensor, v: Tensor, decay: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the sums over all tokens before each one, (batch, length, 3, channels), and after the
    last one, (batch, 3, channels), in float32 (float64).

    k, v (batch, length, channels); decay >= 0, (batch or 1, length or 1, channels); memory (batch,
    3, channels): the final sums of a call. A token with k = -inf and decay = 0 changes nothing.
    """
    batch, n, channels = k.shape
    if v.shape != k.shape or decay.ndim != 3 or decay.shape[-1] != channels:
        raise ValueError(
            f"k {tuple(k.shape)}, v {tuple(v.shape)}, decay {tuple(decay.shape)}: expected (batch, "
            "length, channels) twice and (batch or 1, length or 1, channels)"
        )
    acc = accumulator(v)
    if memory is None:
        memory = empty(batch, channels, acc, k.device)
    if tuple(memory.shape) != (batch, 3, channels):
        raise ValueError(f"memory {tuple(memory.shape)}: expected {(batch, 3, channels)}")
    memory = memory.to(acc)
    if n == 0:
        return empty_result(memory[:, None][:, :0], k, v, decay), memory
    k, decay = k.to(acc), decay.to(acc).expand(-1, n, -1)
    sums, last = memory[:, :2], memory[:, 2].detach()
    top = memories(-decay.detach(), k.detach().clone(), last, MAXIMUM)
    prior = before(top, last)
    fall = (prior - top - decay).exp()  # in this order: the first two are close
    grown = (k - top).exp()
    added = torch.stack([grown * v.to(acc), grown], 2)
    m = scan(fall[:, :, None], added, sums)
    return _sums(before(m, sums), prior), _sums(m[:, -1], top[:, -1])


def _sums(m: Tensor, top: Tensor) -> Tensor:
    return torch.cat([m, top[..., None, :]], -2)


def empty(batch: int, channels: int, dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """Return the sums before the first token."""
    zeros = torch.zeros(batch, 2, channels, dtype=dtype, device=device)
    return torch.nn.functional.pad(zeros, (0, 0, 0, 1), value=LOWEST)


def token(k: Tensor, v: Tensor) -> Tensor:
    """Return the sums of one token each, (..., 3, channels)."""
    return torch.stack([v.to(k.dtype), torch.ones_like(k), k], -2)


def merge(first: Tensor, second: Tensor) -> Tensor:
    """Merge the sums over two sets of tokens, (..., 3, channels)."""
    top = torch.maximum(first[..., 2:, :], second[..., 2:, :]).detach().clamp(min=LOWEST)
    first_sums, second_sums = (x[..., :2, :] * (x[..., 2:, :] - top).exp() for x in (first, second))
    return torch.cat([first_sums + second_sums, top], -2)


def mean(sums: Tensor) -> Tensor:
    """Return numerator / denominator, which is about 1 or more; 0 for a sum over no tokens."""
    return sums[..., 0, :] / sums[..., 1, :].clamp(min=1e-6)


def means(k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor) -> Tensor:
    """Return wkv of a sequence: k, v (batch, length, channels), w = exp(decay) and bonus
    (channels,) -> (batch, length, channels) in v's dtype."""
    acc = accumulator(v)
    sums, _ = weighted_sums(k, v, decay.to(acc).exp().expand(1, 1, -1))
    return mean(merge(sums, token(k.to(acc) + bonus.to(acc), v))).to(v.dtype)
