"""Mamba's selective scan (Gu and Dao, 2023, arXiv 2312.00752): a diagonal state-space model whose
step, input and output weights depend on the token.

    m_t = exp(delta_t A) * m_(t-1) + (delta_t u_t) B_t^T        y_t = m_t C_t

The decay is a full matrix (channels, state), so there is no form by matrix products; all memories of a segment come
from an associative scan. The gradient is explicit and saves the memory before each segment only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ndlightnet.ops._once_differentiable import once_differentiable
from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.empty import empty_result
from ndlightnet.ops.plain import plain
from ndlightnet.ops.recurrence.chunks import exact, first_memory, unaliased
from ndlightnet.ops.recurrence.scan import adjoints, memories

# Elements in the memories of a segment: on a CPU as many as its cache holds; elsewhere so many that
# a kernel takes longer to run than to launch.
SEGMENT, SEGMENT_CPU = 2**24, 2**19


def selective_scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, memory: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the selective scan from `memory` to the last memory.

    u, delta (batch, length, channels), delta >= 0; A (channels, state), negative; B, C (batch,
    length, state); memory (batch, channels, state). Returns y, like u, and the last memory in
    float32 (float64). A token with delta = 0 changes nothing.
    """
    (batch, n, channels), state = u.shape, A.shape[-1]
    shapes = [tuple(x.shape) for x in (delta, A, B, C)]
    if shapes != [(batch, n, channels), (channels, state), *[(batch, n, state)] * 2]:
        names = ", ".join(f"{k} {s}" for k, s in zip(("delta", "A", "B", "C"), shapes, strict=True))
        raise ValueError(
            f"u {tuple(u.shape)}, {names}: expected (batch, length, channels) twice, (channels, "
            "state), and (batch, length, state) twice"
        )
    acc = accumulator(u)
    memory = first_memory("memory", memory, (batch, channels, state), acc, u.device)
    if n == 0:
        return empty_result(u, delta, A, B, C), memory
    if plain():
        with exact(u):
            u_, delta_, b, c = (x.to(acc) for x in (u, delta, B, C))
            m = memories(_decay(delta_, A.to(acc)), _outer(delta_ * u_, b), memory)
            return (m * c[..., None, :]).sum(-1).to(u.dtype), m[:, -1]
    y, last = _Selective.apply(u, delta, A.to(acc), B, C, memory)  # type: ignore
    return y, last


class _Selective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, memory: Tensor
    ) -> tuple[Tensor, Tensor]:
        n, most = u.shape[1], SEGMENT_CPU if u.is_cpu else SEGMENT
        ctx.step = max(1, min(n, most // max(1, memory.numel())))
        starts, outputs = [], []
        for at in range(0, n, ctx.step):
            starts.append(memory)
            u_, delta_, b, c = _segment((u, delta, B, C), at, ctx.step, A.dtype)
            m = memories(_decay(delta_, A), _outer(delta_ * u_, b), memory)
            outputs.append((m * c[..., None, :]).sum(-1))
            memory = m[:, -1].clone()
        ctx.save_for_backward(u, delta, A, B, C, *starts)
        return unaliased(torch.cat(outputs, 1).to(u.dtype)), memory

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (u, delta, A, B, C, *starts), (dy, g_last) = ctx.saved_tensors, grads
        with exact(A):
            dA, segments = torch.zeros_like(A), []
            for number, start in reversed(list(enumerate(starts))):
                xs = _segment((u, delta, B, C, dy), number * ctx.step, ctx.step, A.dtype)
                segment, da, g_last = _segment_backward(xs, A, start, g_last)
                segments.append(segment)
                dA += da
            together = zip(zip(*segments[::-1], strict=True), (u, delta, B, C), strict=True)
            du, ddelta, dB, dC = (torch.cat(segment, 1).to(x.dtype) for segment, x in together)
        return du, ddelta, dA, dB, dC, g_last


def _segment_backward(
    xs: list[Tensor], A: Tensor, start: Tensor, g_last: Tensor
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Return gradients of (u, delta, B, C), of A, and of the memory before the segment."""
    u, delta, b, c, dy = xs
    f, added = _decay(delta, A), delta * u
    m = memories(f, _outer(added, b), start)
    dc = (dy[..., None, :] @ m)[..., 0, :]
    g = adjoints(f, _outer(dy, c), g_last)
    dadded, db = (g * b[..., None, :]).sum(-1), (added[..., None, :] @ g)[..., 0, :]
    f *= g
    before = f[:, 0].clone()
    f[:, 0] *= start
    f[:, 1:] *= m[:, :-1]  # the gradient of delta A
    ddelta = (f * A).sum(-1) + dadded * u
    return (dadded * delta, ddelta, db, dc), (f * delta[..., None]).sum((0, 1)), before


def _segment(xs: tuple[Tensor, ...], at: int, step: int, dtype: torch.dtype) -> list[Tensor]:
    return [x[:, at : at + step].to(dtype) for x in xs]


def _outer(x: Tensor, y: Tensor) -> Tensor:
    return x[..., None] * y[..., None, :]


def _decay(delta: Tensor, A: Tensor) -> Tensor:
    """Return exp(delta A), (batch, length, channels, state)."""
    return (delta[..., None] * A).exp_()
