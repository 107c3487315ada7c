"""State: the memory of a head, and the associative rule that merges two of them."""

from typing import NamedTuple

import torch
from torch import Tensor

from ndlightnet.ops.dtypes import finest

# Rates count as at most this one: the same weights, 0, where a channel's logits differ by less than
# 8,000 from a frame to the next, as exp(-104) is 0 in float32. Exponents are rate x frames in
# float32; of 131,072 frames they stay below 2^30, where their rounding is less than 64 and differs
# from exp's range, 88. An int: torch.compile makes an input of a float.
MOST_FORGET = 8192


class State(NamedTuple):
    """Memory of one LightNet head: maximum, sum and memory of the tokens up to now.

    With p_u = exp(k_u - max), per key channel:  sum = sum_u p_u,  memory = sum_u p_u f_u v_u^T,
    where f_u is 1, or (cos, sin) of the token's MD-LRPE angles (then the memory has 2 * dim rows).
    float32 (float64 for float64 inputs). `max` carries no gradient: outputs do not depend on it,
    and the kernels may store another number near the maximum.
    """

    max: Tensor  # (batch, heads, dim); -inf where there were no tokens
    sum: Tensor  # (batch, heads, dim)
    memory: Tensor  # (batch, heads, dim or 2 * dim, value_dim)

    @staticmethod
    def empty(
        batch: int,
        heads: int,
        dim: int,
        value_dim: int,
        rotated: bool = False,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "State":
        """Return the State of no tokens. `rotated`: for keys with MD-LRPE."""
        zeros = torch.zeros(batch, heads, dim, dtype=dtype, device=device)
        rows = dim * (2 if rotated else 1)
        memory = torch.zeros(batch, heads, rows, value_dim, dtype=dtype, device=device)
        return State(zeros - torch.inf, zeros, memory)

    def merged(self, axis: int) -> "State":
        """Merge States along a leading axis. Differentiable, as `merge`."""
        top = self.max.amax(axis).detach()
        weight = decay(self.max.detach(), top.unsqueeze(axis))
        memory = tile(weight, self.memory.shape[-2], -1)[..., None] * self.memory
        return State(top, (weight * self.sum).sum(axis), memory.sum(axis))

    def decayed(self, frames: Tensor | int, forget: float | Tensor) -> "State":
        """Multiply the weight of States by exp(-forget * frames)."""
        if not isinstance(forget, Tensor) and forget == 0:
            return self
        return reweighted(self, -frames * decay_rates(forget, self.max.device))


def decay(before: Tensor, after: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return exp(before - after) for before <= after, and 0 for before = -inf (no tokens). dtype:
    of the difference and the result, if not that of both."""
    gap = before - after.masked_fill(after == -torch.inf, 0)
    return torch.exp(gap if dtype is None else gap.to(dtype))


def tile(x: Tensor, rows: int, dim: int) -> Tensor:
    """Repeat key channels on `dim` for the cos and sin halves of `rows` memory rows."""
    return x if x.shape[dim] == rows else torch.cat([x, x], dim)


def decay_rates(forget: float | Tensor, device: torch.device) -> Tensor:
    """Return `forget`, a number or one per head, as a tensor () or (heads, 1) up to MOST_FORGET."""
    if isinstance(forget, Tensor):
        return forget.to(device, finest(device))[:, None].clamp(max=MOST_FORGET)
    return torch.full((), min(forget, MOST_FORGET), dtype=finest(device), device=device)


def reweighted(state: State, by: Tensor) -> State:
    """Multiply the weight of a State by exp(by). `by` is added to the maximum; the digits that the
    maximum's dtype cannot hold go into sum and memory."""
    high = state.max.detach().to(by.dtype) + by
    top = high.to(state.max.dtype)
    rest = torch.exp(torch.where(top == -torch.inf, 0, high - top)).to(state.sum.dtype)
    memory = tile(rest, state.memory.shape[-2], -1)[..., None] * state.memory
    return State(top, rest * state.sum, memory)


def merge(first: State, second: State) -> State:
    """Merge two sources' States (online softmax). Associative, commutative, differentiable."""
    top = torch.maximum(first.max, second.max).detach()
    a, b = decay(first.max.detach(), top), decay(second.max.detach(), top)
    rows = first.memory.shape[-2]
    memory = tile(a, rows, -1)[..., None] * first.memory + tile(b, rows, -1)[..., None] * second.memory
    return State(top, a * first.sum + b * second.sum, memory)
