"""LightNet attention: one function per form of execution.

q, k `(batch, length, heads, dim)`, v `(batch, length, heads, value_dim)`: any float dtype;
statistics, memories and States in float32 (float64 for float64 inputs); outputs in q's dtype. SiLU
is applied to q here. There is no 1/sqrt(dim): the layer normalises the output. k is at once key and
decay.

  summarize           a source of keys and values -> State
  read                queries on a State (cross attention = summarize + read)
  global_attention    every token sees every token (Eq. 6)
  causal_attention    token t sees tokens up to t (Eq. 5), from a State to a State
  axis_causal_attention   causal along the first axis of a grid, free along the others; frames.py
  attention_step      one token, for decoding
  merge               two States -> the State of both sources
"""

from __future__ import annotations

import torch
from torch import Tensor

from ndlightnet.layout import Grid
from ndlightnet.ops import _registry, _triton, parallel, reference
from ndlightnet.ops._registry import Impl
from ndlightnet.ops._triton import Angles
from ndlightnet.ops.lrpe import Lrpe, key_features, query_features, rooted, settled
from ndlightnet.ops.recurrence.chunks import exact
from ndlightnet.ops.state import State, decay, merge, tile

__all__ = [
    "attention_step", "causal_attention", "global_attention", "merge", "read", "summarize",
]  # fmt: skip


def _check(k: Tensor, v: Tensor, mask: Tensor | None, lrpe: Lrpe | None, q: Tensor | None) -> None:
    if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"k {tuple(k.shape)}, v {tuple(v.shape)}: expected (batch, length, heads, dim) and "
            "(batch, length, heads, value_dim)"
        )
    if q is not None and q.shape != k.shape:
        raise ValueError(f"q {tuple(q.shape)}: expected the shape of k, {tuple(k.shape)}")
    if mask is not None and (mask.shape != k.shape[:2] or mask.dtype != torch.bool):
        raise ValueError(
            f"mask {tuple(mask.shape)} {mask.dtype}: expected bool {tuple(k.shape[:2])}"
        )
    _check_length(k, lrpe, "k")


def _check_length(x: Tensor, lrpe: Lrpe | None, name: str) -> None:
    if lrpe is not None and x.shape[1] != lrpe.prefix + Grid(lrpe.shape).length:
        raise ValueError(
            f"{name} has {x.shape[1]} tokens, lrpe describes {lrpe.prefix} + a grid {lrpe.shape}"
        )


def _check_state(state: State, k: Tensor, v: Tensor, lrpe: Lrpe | None) -> None:
    batch, _, heads, dim = k.shape
    rows = dim if lrpe is None else 2 * dim
    expected = (batch, heads, rows, v.shape[-1])
    if tuple(state.memory.shape) != expected or tuple(state.sum.shape) != (batch, heads, dim):
        raise ValueError(
            f"state.memory {tuple(state.memory.shape)}, state.sum {tuple(state.sum.shape)}: "
            f"expected {expected} and {(batch, heads, dim)}; keys with MD-LRPE need 2 * dim rows"
        )


def _empty(k: Tensor, v: Tensor, lrpe: Lrpe | None) -> State:
    batch, _, heads, dim = k.shape
    return State.empty(
        batch, heads, dim, v.shape[-1], lrpe is not None,
        dtype=parallel.accumulator(k), device=k.device,
    )  # fmt: skip


def _silence(k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Padding gets no weight, and whatever lies in it (even NaN) cannot leak."""
    if mask is None:
        return k, v
    hidden = ~mask[..., None, None]
    return k.masked_fill(hidden, -torch.inf), v.masked_fill(hidden, 0)


def _query(q: Tensor, lrpe: Lrpe | None) -> Tensor:
    phi = torch.nn.functional.silu(q.to(parallel.accumulator(q)))
    return phi if lrpe is None else query_features(phi, lrpe)


def _factors(k: Tensor, lrpe: Lrpe | None) -> Tensor | None:
    return None if lrpe is None else key_features(lrpe, k.shape[-1], parallel.accumulator(k))


def summarize(
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    lrpe: Lrpe | None = None,
    impl: Impl = "auto",
) -> State:
    """The State of a whole source, in one pass. mask: (batch, length) bool, False = padding."""
    _check(k, v, mask, lrpe, None)
    chosen = _registry.choose(impl, "summarize", k, v, lrpe)
    lrpe = rooted(lrpe)
    if chosen == "triton":
        state = State(*_triton.triton_summarize(k, v, mask, *Angles.of(lrpe).arguments))
        return settled(state, lrpe, 1)
    with exact(k):
        state = _empty(k, v, lrpe)
        if k.shape[1] == 0:
            return state
        if chosen == "reference":
            state = reference.attention(k, k, v, state, lrpe, mask, False)[1]
        else:
            k, v = _silence(k, v, mask)
            state = parallel.summarize(k, v, _factors(k, lrpe))
        return settled(state, lrpe, 1)


def read(q: Tensor, state: State, *, lrpe: Lrpe | None = None, impl: Impl = "auto") -> Tensor:
    """Queries (batch, length, heads, dim) on a State: (batch, length, heads, value_dim).

    `lrpe` places the queries; give it exactly when the source had one. Zero where the State is
    empty.
    """
    rows = state.memory.shape[-2]
    if q.ndim != 4 or rows != q.shape[-1] * (1 if lrpe is None else 2):
        raise ValueError(
            f"q {tuple(q.shape)} with{'out' if lrpe is None else ''} lrpe does not fit a memory "
            f"of {rows} rows: expected (batch, length, heads, dim) and as many, twice with lrpe"
        )
    _check_length(q, lrpe, "q")
    chosen = _registry.choose(impl, "read", q, None, lrpe, state)
    lrpe = rooted(lrpe)
    state = settled(state, lrpe, -1)
    if chosen == "triton":
        angles = Angles.of(lrpe).arguments
        out: Tensor = _triton.triton_read(q, state.sum, state.memory, *angles)
        return out
    with exact(q):
        how = reference.recall if chosen == "reference" else parallel.read
        return how(_query(q, lrpe), state).to(q.dtype)


def global_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    lrpe: Lrpe | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Softmax(K over tokens)^T V, read by SiLU(q) (Eq. 6). mask: (batch, length), False =
    padding."""
    _check(k, v, mask, lrpe, q)
    if lrpe is not None and lrpe.prefix == 0:  # only offsets count
        lrpe = lrpe._replace(start=None)
    chosen = _registry.choose(impl, "global_attention", k, v, lrpe)
    if chosen == "triton" and q.dtype == k.dtype:
        out: Tensor = _triton.triton_global(q, k, v, mask, *Angles.of(lrpe).arguments)[0]
        return out
    return read(q, summarize(k, v, mask=mask, lrpe=lrpe, impl=impl), lrpe=lrpe, impl=impl)


def _widest(k: Tensor, v: Tensor) -> int:
    """Key channels that a program of the causal form holds on chip beside the value channels."""
    whole = k.dtype == torch.bfloat16
    return min(128 if whole else 64, (128 if whole else 64) * 128 // max(64, v.shape[-1]))


def _causal(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, state: State | None, angles: Angles
) -> tuple[Tensor, State]:
    dim, most = k.shape[-1], _widest(k, v)
    if dim <= most:
        before = (None, None, None) if state is None else state
        out, *after = _triton.triton_causal(q, k, v, mask, *before, *angles.arguments)
        return out, State(*after[:3])
    # key channels add up, so a wide head goes in blocks of them
    outs, states = [], []
    for first in range(0, dim, most):
        block = slice(first, min(first + most, dim))
        past = None
        if state is not None:
            memory = torch.cat([m[:, :, block] for m in state.memory.split(dim, dim=2)], 2)
            past = State(state.max[..., block], state.sum[..., block], memory)
        out, part = _causal(q[..., block], k[..., block], v, mask, past, angles.slots(block))
        outs.append(out.float())
        states.append(part)
    tall = 1 if angles.theta is None else 2
    halves = [torch.cat([p.memory.chunk(tall, 2)[half] for p in states], 2) for half in range(tall)]
    top, total = (torch.cat([p[i] for p in states], -1) for i in (0, 1))
    return sum(outs[1:], outs[0]).to(q.dtype), State(top, total, torch.cat(halves, 2))


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    lrpe: Lrpe | None = None,
    state: State | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, State]:
    """Token t sees tokens up to t and what `state` holds (Eq. 5). Returns output and final State.

    With 16-bit inputs the kernels round exp(k - max) before both the sum and the memory of the
    final State are made of it, so that a query's weights add up to one.

    With kind="rotary" the result is not a function of offsets, because the two channels of a pair
    decay differently: prefer "cosine" here.
    """
    _check(k, v, mask, lrpe, q)
    chosen = _registry.choose(impl, "causal_attention", k, v, lrpe)
    if state is not None:
        _check_state(state, k, v, lrpe)
    if k.shape[1] == 0:
        state = _empty(k, v, lrpe) if state is None else state
        return v.new_empty(v.shape, dtype=q.dtype), state
    lrpe = rooted(lrpe)
    if state is not None:
        state = settled(state, lrpe, -1)
    with exact(k):
        if chosen == "triton":
            out, state = _causal(q, k, v, mask, state, Angles.of(lrpe))
            return out, settled(state, lrpe, 1)
        state = _empty(k, v, lrpe) if state is None else state
        if chosen == "reference":
            out, state = reference.attention(q, k, v, state, lrpe, mask, True)
        else:
            k, v = _silence(k, v, mask)
            out, *after = _registry.causal(_query(q, lrpe), k, v, _factors(k, lrpe), *state)
            state = State(*after)
        return out.to(q.dtype), settled(state, lrpe, 1)


def attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    *,
    lrpe: Lrpe | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, State]:
    """One token: q, k (batch, heads, dim), v (batch, heads, value_dim), and the State before it.

    `lrpe` describes this one token: shape (1, ...), `start` its coordinates.
    """
    q, k, v = q[:, None], k[:, None], v[:, None]
    _check(k, v, None, lrpe, q)
    _check_state(state, k, v, lrpe)
    chosen = _registry.choose(impl, "attention_step", k, v, lrpe, [q, *state])
    lrpe = rooted(lrpe)
    if chosen == "triton":
        angles = Angles.of(lrpe).arguments
        y, *after = _triton.triton_step(q[:, 0], k[:, 0], v[:, 0], *state, *angles)
        return y, State(*after)
    if chosen == "reference":
        y, state = causal_attention(q, k, v, lrpe=lrpe, state=state, impl=impl)
        return y[:, 0], state
    with exact(k):
        logit, value = k[:, 0].to(state.sum.dtype), v[:, 0].to(state.sum.dtype)
        top, w = logit.detach(), _factors(k, lrpe)
        p = decay(logit, top)  # 1, with the gradient of exp(k); 0 for a logit of -inf
        f = p if w is None else tile(p, w.shape[-1], -1) * w[..., 0, :, :]
        own = State(top, p, f[..., None] * value[..., None, :])
        state = merge(settled(state, lrpe, -1), own)
        y = parallel.read(_query(q, lrpe), state).to(q.dtype)
        return y[:, 0], settled(state, lrpe, 1)
