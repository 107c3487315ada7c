"""Gated linear attention: a memory whose rows decay, m_t = Diag(exp(l_t)) m_(t-1) + k_t v_t^T,
y_t = m_t^T q_t. Linear attention (l = 0), TNL and RetNet (l constant), GLA, HGRN2 are of this form.

Chunkwise: by scores inside a chunk, by one scan over memories between chunks. The gradient is
explicit and saves the memory after each chunk, nothing else of that size. No exponent is positive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ndlightnet.ops import fla
from ndlightnet.ops._once_differentiable import once_differentiable
from ndlightnet.ops.dispatch import Impl, resolve
from ndlightnet.ops.dtypes import accumulator, check_floats
from ndlightnet.ops.empty import empty_result
from ndlightnet.ops.plain import plain
from ndlightnet.ops.recurrence import memory
from ndlightnet.ops.recurrence.chunks import (
    Decay,
    exact,
    first_memory,
    floor_of,
    from_chunks,
    later_first,
    pieces,
    to_chunks,
    unaliased,
    work_dtype,
)
from ndlightnet.ops.recurrence.scan import adjoints, before, memories

fla.declare("gated_linear_attention")


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
    *,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """Run gated linear attention causally, from the memory `state` to the last memory.

    q, k (batch, length, heads, dim), v (batch, length, heads, value_dim); log_decay <= 0, (batch, length, heads, dim)
    or (..., 1) for one a head, default 0; clamped at -30 (float64: -60). state (batch, heads, dim, value_dim). Returns
    y, like v, and the last memory in float32 (float64). A token with k = 0 and log_decay = 0 changes nothing.

    impl: "torch", "fla" (flash-linear-attention's kernels), "reference" (token by token) or "auto":
    fla where it is supported, for 16-bit inputs on CUDA.
    """
    decay, state = check(q, k, v, log_decay, state)
    chosen = resolve("gated_linear_attention", impl, k, v, decay, q, state)
    if q.shape[1] == 0:
        return empty_result(v, q, k, log_decay), state
    with exact(k):
        if chosen == "reference":
            keep = state.new_zeros(1, 1, 1, 1) if decay is None else decay
            return memory.reference(q, k, keep.exp()[..., None], v, state)
        if chosen == "fla":
            return fla.gated_linear_attention(q, k, v, decay, state)
        y, last = _run(q, k, v, decay, state)
    return y, last


def check(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """Return the decay as (batch, length, heads, dim or 1) or None, and the first memory."""
    check_floats(q=q, k=k, v=v)
    if k.ndim != 4 or q.shape != k.shape or v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: expected (batch, length, "
            "heads, dim) twice and (batch, length, heads, value_dim)"
        )
    (batch, n, heads, dim), value_dim, acc = k.shape, v.shape[-1], accumulator(v)
    decay = None
    if log_decay is not None:
        if log_decay.ndim != 4 or log_decay.shape[-1] not in (1, dim):
            raise ValueError(
                f"log_decay {tuple(log_decay.shape)}: expected (batch, length, heads, dim) "
                f"{(batch, n, heads, dim)}, or 1 instead of dim"
            )
        decay = log_decay.to(acc).clamp(min=floor_of(acc)).expand(batch, n, heads, -1)
    return decay, first_memory("state", state, (batch, heads, dim, value_dim), acc, k.device)


def chunkwise(form: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function of (q, k, v, ..., first memory) to the outputs and the last memory.

    form: a class of these inputs. run() returns the outputs in chunks and the memory after each chunk;
    backward(inputs, memories, dy, dlast) returns the gradients of all inputs.
    """

    class Chunkwise(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
            *tokens, memory = inputs
            ctx.pieces, outputs, kept = pieces(inputs[2], memory), [], []
            for piece in ctx.pieces:
                xs = cut(tokens, piece)
                y, m = form(*xs, memory).run()
                outputs.append(from_chunks(y, xs[2]))
                kept.append(m)
                memory = m[:, -1].view_as(memory)
            ctx.save_for_backward(*inputs, *kept)
            return unaliased(join(outputs)), memory.clone()

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, dy: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
            saved, count = ctx.saved_tensors, len(ctx.pieces)
            (*tokens, first), kept = saved[:-count], saved[-count:]
            starts = [first, *(m[:, -1].view_as(first) for m in kept[:-1])]
            grads = []
            with exact(first):
                for piece, start, m in reversed(list(zip(ctx.pieces, starts, kept, strict=True))):
                    inputs = (*cut(tokens, piece), start)
                    *of_tokens, dlast = form(*inputs).backward(inputs, m, dy[:, piece], dlast)
                    grads.append(of_tokens)
                joined = (None if x[0] is None else join(x) for x in zip(*grads[::-1], strict=True))
                return *joined, dlast

    def run(*inputs: Any) -> tuple[Tensor, Tensor]:
        if not plain():
            y, last = Chunkwise.apply(*inputs)  # type: ignore[no-untyped-call]
            return y, last
        y, m = form(*inputs).run()
        return from_chunks(y, inputs[2]), m[:, -1].view_as(inputs[-1])

    return run


def cut(xs: Sequence[Tensor | None], piece: slice) -> list[Any]:
    """Return a piece of the tokens of each x (batch, length, ...)."""
    return [None if x is None else x[:, piece] for x in xs]


def join(xs: Sequence[Tensor]) -> Tensor:
    """Join pieces of tokens."""
    return xs[0] if len(xs) == 1 else torch.cat(list(xs), 1)


class Chunks:
    """The chunkwise form and its gradients: q, k, v (batch * heads, chunks, chunk, .), decays, and
    the memory before the first chunk, (batch, heads, dim, value_dim)."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, decay: Decay, state: Tensor) -> None:
        self.q, self.k, self.v, self.d, self.first = q, k, v, decay, state.flatten(0, 1)

    def memories(self) -> Tensor:
        """Return the memory after each chunk."""
        added = (self.d.out(self.k).mT @ self.v).to(self.first.dtype)
        return memories(self.d.over(), added, self.first)

    def outputs(self, m: Tensor) -> Tensor:
        start = before(m, self.first, self.q.dtype)
        y = self.d.into(self.q) @ start + self.d.scores(self.q, self.k) @ self.v.nan_to_num(0, 0, 0)
        # a score of 0 times NaN would reach earlier tokens: NaN spreads from its token on only
        return y + (self.v - self.v).cumsum(-2)

    def read_gradients(self, m: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of scores, of q, and of k within its chunk; without a token's score with itself."""
        da = dy @ self.v.mT
        dq, dk = self.d.scores_backward(da, self.q, self.k)
        return da, dq + self.d.into(dy @ before(m, self.first, dy.dtype).mT), dk

    def gradients(self, m: Tensor, dy: Tensor, dlast: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of q, k, v, of the memories after each chunk and before the first,
        and of each token's score with itself (..., chunk, 1), which q's and k's leave out."""
        q, k, v, d = self.q, self.k, self.v, self.d
        read, over = (d.into(q).mT @ dy).to(m.dtype), d.over()
        dm = adjoints(over, after(read), dlast)
        dfirst = (dm[:, 0] if over is None else over[:, 0] * dm[:, 0]) + read[:, 0]
        da, dq, dk = self.read_gradients(m, dy)
        dk = dk + d.out(v @ dm.mT.to(v.dtype))
        dv = d.scores(q, k).mT @ dy + d.out(k) @ dm.to(k.dtype)
        return dq, dk, dv, dm, dfirst, da.diagonal(dim1=-2, dim2=-1)[..., None]


class _Gated(Chunks):
    def __init__(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor) -> None:
        q, k, v = (to_chunks(x, work_dtype(v)) for x in (q, k, v))
        super().__init__(q, k, v, Decay(None if decay is None else to_chunks(decay, state.dtype)), state)

    def run(self) -> tuple[Tensor, Tensor]:
        m = self.memories()
        return self.outputs(m), m

    def backward(self, inputs: Sequence[Any], m: Tensor, dy: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        _, _, v, decay, state = inputs
        dq, dk, dv, dm, dstate, diagonal = self.gradients(m, to_chunks(dy, self.v.dtype), dlast.flatten(0, 1))
        dl = None
        if decay is not None:
            # a token's read of itself is in both terms, and would only cost digits
            per_token = self.q * dq.to(m.dtype) - self.k * dk.to(m.dtype)
            dl = log_decay_gradient(decay, per_token, dm * m)
        dqkv = (dq + diagonal * self.k, dk + diagonal * self.q, dv)
        return *(from_chunks(x, v) for x in dqkv), dl, dstate.view_as(state)


_run = chunkwise(_Gated)


def after(grad: Tensor) -> Tensor:
    """Return the gradient from later chunks alone: each moved to the chunk before it."""
    return torch.cat([grad[:, 1:], torch.zeros_like(grad[:, :1])], 1)


def log_decay_gradient(decay: Tensor, per_token: Tensor, per_chunk: Tensor) -> Tensor:
    """Return d log decay_t = sum_(s >= t) (q dq - k dk)_s + rowsum(dm m), s in the chunk of t.
    per_token: the terms of the first sum; per_chunk: dm m of the memory after each chunk."""
    per_chunk = per_chunk.sum(-1)[..., None, :]
    if decay.shape[-1] == 1:
        per_token, per_chunk = (x.sum(-1, keepdim=True) for x in (per_token, per_chunk))
    return from_chunks(later_first(per_token) + per_chunk, decay)
