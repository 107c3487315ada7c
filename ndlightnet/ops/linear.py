"""Linear attention: y_t = sum_s (q_t . k_s) v_s, over all tokens or causal along the frames of a grid, where q and k
are features of queries and keys; with a denominator y_t is divided by sum_s q_t . k_s.

q, k (batch, length, heads, dim), v (batch, length, heads, value_dim). Sums are float32 (float64 for
float64 inputs), outputs have v's dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ndlightnet.ops.dispatch import OPERATIONS, Impl, Operation, resolve
from ndlightnet.ops.dtypes import accumulator, check_floats
from ndlightnet.ops.empty import empty_result
from ndlightnet.ops.recurrence.chunks import exact
from ndlightnet.ops.recurrence.gated import gated_linear_attention
from ndlightnet.ops.recurrence.scan import prefix_sum

EPS = 1e-6  # the least denominator
# global, or causal along frames of more than one token
OPERATIONS["linear_attention"] = Operation(("torch", "reference"))


class Sums(NamedTuple):
    """State of linear attention: sums over its keys and values."""

    sum: Tensor  # (batch, heads, dim): of keys
    memory: Tensor  # (batch, heads, dim, value_dim): of keys times values


def gather(k: Tensor, v: Tensor) -> Sums:
    """Sum over tokens: k (..., length, heads, dim), v (..., length, heads, value_dim)."""
    acc = accumulator(v)
    with exact(k):
        k, v = (x.to(acc).transpose(-3, -2) for x in (k, v))
        return Sums(k.sum(-2), k.mT @ v)


def read_sums(q: Tensor, sums: Sums, dtype: torch.dtype, denominator: bool) -> Tensor:
    """Read Sums with queries (..., length, heads, dim): (..., length, heads, value_dim)."""
    with exact(q):
        q = q.to(sums.memory.dtype).transpose(-3, -2)
        y = q @ sums.memory
        if denominator:
            y = y / (q @ sums.sum[..., None]).clamp(min=EPS)
        return y.to(dtype).transpose(-3, -2)


def linear_attention(q: Tensor, k: Tensor, v: Tensor, *, denominator: bool, impl: Impl = "auto") -> Tensor:
    """Read all keys and values with every query; queries and keys may differ in length.

    impl: "torch", "reference" (all scores at once) or "auto".
    """
    check_floats(q=q, k=k, v=v)
    if k.shape[:-1] != v.shape[:-1] or q.shape[-2:] != k.shape[-2:]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: expected (batch, length, "
            "heads, dim) twice and (batch, length, heads, value_dim)"
        )
    if resolve("linear_attention", impl, k, v) == "reference":
        return _reference(q, k, v, None, None, denominator)
    return read_sums(q, gather(k, v), v.dtype, denominator)


def causal_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, frames: int, sums: Sums, *, denominator: bool, impl: Impl = "auto"
) -> tuple[Tensor, Sums]:
    """Run linear attention causally along `frames` equal parts of the sequence: a token reads its
    frame, those before it, and `sums`, the Sums before the sequence. Returns y and the final Sums.

    impl: for frames of one token as in `gated_linear_attention`, else as in `linear_attention`.
    """
    if k.shape[1] == 0:
        return empty_result(v, q, k), sums
    if frames < 1 or k.shape[1] % frames:
        raise ValueError(f"frames={frames}: expected a divisor of the length {k.shape[1]}")
    single = frames == k.shape[1]
    operation = "gated_linear_attention" if single else "linear_attention"
    if resolve(operation, impl, k, v) == "reference":
        new = gather(k, v)
        last = Sums(sums.sum + new.sum, sums.memory + new.memory)
        return _reference(q, k, v, frames, sums, denominator), last
    if single:
        y, memory = gated_linear_attention(q, k, v, None, sums.memory, impl=impl)
        with exact(k):
            keys = k.to(sums.sum.dtype)
            if denominator:
                total = sums.sum[:, None] + prefix_sum(keys)
                weight = (q.to(keys.dtype) * total).sum(-1, keepdim=True).clamp(min=EPS)
                y = (y / weight).to(v.dtype)
            return y, Sums(sums.sum + keys.sum(1), memory)
    q, k, v = (x.unflatten(1, (frames, -1)) for x in (q, k, v))
    new = gather(k, v)
    totals = Sums(*(first[:, None] + prefix_sum(x) for first, x in zip(sums, new, strict=True)))
    y = read_sums(q, totals, v.dtype, denominator)
    return y.flatten(1, 2), Sums(*(x[:, -1] for x in totals))


def _reference(q: Tensor, k: Tensor, v: Tensor, frames: int | None, sums: Sums | None, denominator: bool) -> Tensor:
    """Compute y from all scores q_t . k_s: the specification; not causal without `frames`."""
    dtype, acc, n = v.dtype, accumulator(v), k.shape[1]
    q, k, v = (x.to(acc) for x in (q, k, v))
    with exact(q):
        scores = torch.einsum("bthk,bshk->bths", q, k)
        if frames is not None:
            frame = torch.arange(n, device=q.device) * frames // n
            scores = scores * (frame[:, None, None] >= frame)
        y, total = torch.einsum("bths,bshd->bthd", scores, v), scores.sum(-1)
        if sums is not None:
            y = y + torch.einsum("bthk,bhkd->bthd", q, sums.memory)
            total = total + torch.einsum("bthk,bhk->bth", q, sums.sum)
        return (y / total.clamp(min=EPS)[..., None] if denominator else y).to(dtype)
