"""Gated linear attention: a memory whose rows decay, m_t = Diag(exp(l_t)) m_(t-1) + k_t v_t^T,
y_t = m_t^T q_t. Linear attention (l = 0), TNL and RetNet (l constant), GLA, HGRN2 are of this form.

Chunkwise: inside a chunk by scores, between chunks by one scan over their memories. The gradient is
explicit and keeps the memory before each chunk, nothing else of that size. No exponent is positive.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ndlightnet.ops import _fla, memory
from ndlightnet.ops._fla import Impl
from ndlightnet.ops.chunks import (
    exact,
    floor_of,
    from_chunks,
    later_first,
    scores,
    scores_backward,
    to_chunks,
)
from ndlightnet.ops.parallel import accumulator
from ndlightnet.ops.scan import adjoints, before, memories


def gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, state: Tensor | None = None,
    *, impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Causal, from a memory to a memory.

    q, k (batch, length, heads, dim), v (batch, length, heads, value_dim); log_decay <= 0, (batch,
    length, heads, dim) or (..., 1) for one of a head, default 0; floored at -30 (float64: -60).
    state (batch, heads, dim, value_dim). Returns y as v, and the last memory in float32 (float64).
    A token with k = 0 and log_decay = 0 changes nothing.

    impl: "torch", "fla" (flash-linear-attention's kernels), "reference" (token by token) or "auto":
    fla where it can, for 16-bit inputs on CUDA.
    """
    decay, state = check(q, k, v, log_decay, state)
    chosen = _fla.choose(impl, "gated_linear_attention", k, v)
    if q.shape[1] == 0:
        return torch.zeros_like(v), state
    with exact(k):
        if chosen == "reference":
            return memory.reference(q, k, decay.exp()[..., None], v, state)
        if chosen == "fla":
            given = None if log_decay is None else decay
            return _fla.gated_linear_attention(q, k, v, given, state)
        y, last = _Gated.apply(q, k, v, decay, state)  # type: ignore[no-untyped-call]
    return y, last


def check(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The decay as (batch, length, heads, dim or 1), the memory to start from."""
    if k.ndim != 4 or q.shape != k.shape or v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: expected (batch, length, "
            "heads, dim) twice and (batch, length, heads, value_dim)"
        )
    (batch, n, heads, dim), wide, acc = k.shape, v.shape[-1], accumulator(v)
    if log_decay is None:
        log_decay = torch.zeros(1, 1, 1, 1, dtype=acc, device=k.device)
    if log_decay.ndim != 4 or log_decay.shape[-1] not in (1, dim):
        raise ValueError(
            f"log_decay {tuple(log_decay.shape)}: expected (batch, length, heads, dim) "
            f"{(batch, n, heads, dim)}, or 1 instead of dim"
        )
    decay = log_decay.to(acc).clamp(min=floor_of(acc)).expand(batch, n, heads, -1)
    if state is None:
        return decay, torch.zeros(batch, heads, dim, wide, dtype=acc, device=k.device)
    if tuple(state.shape) != (batch, heads, dim, wide):
        raise ValueError(
            f"state {tuple(state.shape)}: expected (batch, heads, dim, value_dim), "
            f"{(batch, heads, dim, wide)}"
        )
    return decay, state.to(acc)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        n, dtype = q.shape[1], v.dtype
        qc, kc, vc, lc = (to_chunks(x, decay.dtype) for x in (q, k, v, decay))
        g = lc.cumsum(-2)
        end = g[..., -1:, :]
        added = (kc * (end - g).exp()).mT @ vc
        m = memories(end.mT.exp(), added, state)
        y = (qc * g.exp()) @ before(m, state) + scores(qc, kc, g) @ vc
        ctx.save_for_backward(q, k, v, decay, state, m)
        return from_chunks(y, n, dtype), m[:, -1].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *given, state, m = ctx.saved_tensors
        with exact(m):
            return _backward(tuple(given), state, m, *grads)


def _backward(
    given: tuple[Tensor, ...], state: Tensor, m: Tensor, dy: Tensor, dlast: Tensor
) -> tuple[Tensor, ...]:
    n, (qc, kc, vc, lc, dyc) = dy.shape[1], (to_chunks(x, m.dtype) for x in (*given, dy))
    g = lc.cumsum(-2)
    end, start = g[..., -1:, :], before(m, state)
    into, out = g.exp(), (end - g).exp()
    pull = (qc * into).mT @ dyc
    dm = adjoints(end.mT.exp(), torch.cat([pull[:, 1:], torch.zeros_like(pull[:, :1])], 1), dlast)
    dstate = end[:, 0].mT.exp() * dm[:, 0] + pull[:, 0]
    dq, dk = scores_backward(dyc @ vc.mT, qc, kc, g)
    dq, dk = dq + (dyc @ start.mT) * into, dk + (vc @ dm.mT) * out
    dv = scores(qc, kc, g).mT @ dyc + (kc * out) @ dm
    dl, held = qc * dq - kc * dk, (dm * m).sum(-1)[..., None, :]
    if lc.shape[-1] == 1:
        dl, held = dl.sum(-1, keepdim=True), held.sum(-1, keepdim=True)
    dl = later_first(dl) + held
    parts = zip((dq, dk, dv, dl), given, strict=True)
    return (*(from_chunks(x, n, like.dtype) for x, like in parts), dstate)
