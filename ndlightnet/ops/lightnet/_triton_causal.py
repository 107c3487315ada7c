"""The Triton form of the causal operations, as in _triton.py: attention over tokens, one step of
it, and the merge of frames' States."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ndlightnet.ops._operator import Operator
from ndlightnet.ops.lightnet._triton import Flat, _dtheta, _fit, _like, _save, _saved, _state
from ndlightnet.ops.lightnet.state import State
from ndlightnet_kernels.position import FIELDS, SCHEMA


# -------------------------------------------------------------------------------------- causal
def _causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    forget: Tensor | None,
    top: Tensor | None,
    total: Tensor | None,
    memory: Tensor | None,
    *position: Any,
) -> Any:
    """Return output, final State (max, sum, memory), and for the backward the States of all
    segments. The first State is (top, total, memory); if None, an empty one. forget: decay rates
    (heads,) float32."""
    from ndlightnet_kernels import causal

    out, last, entry = causal.forward(q, k, v, mask, forget, (top, total, memory), Flat(*position))
    return out, *last, *entry


def _causal_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    from ndlightnet_kernels import plans

    parts, rows = plans.cut(k, v.shape[-1], Flat(*rest[-FIELDS:]).kind)[0], k.shape[0] * k.shape[2]
    last = _state(k, v.shape[-1], rest)
    states = zip(last, (parts + 1, parts, parts), strict=True)
    entry = [x.new_empty(rows, n, *x.shape[2:]) for x, n in states]
    return q.new_empty(v.shape), *last, *entry, k.new_empty(rows, parts, dtype=torch.int32)


def _causal_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    forget: Tensor | None,
    top: Tensor,
    total: Tensor,
    memory: Tensor,
    flag: Tensor,
    dout: Tensor,
    dtotal: Tensor | None,
    dmemory: Tensor | None,
    past: bool,
    learn: bool,
    *position: Any,
) -> Any:
    from ndlightnet_kernels import causal_backward as kernels

    where, entry = Flat(*position), (top, total, memory, flag)
    return kernels.backward(q, k, v, mask, forget, entry, where, dout, dtotal, dmemory, past, learn)


def _causal_backward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    past, before = rest[-FIELDS - 2], _state(k, v.shape[-1], rest)[1:]
    if not past:
        before = (before[0].new_empty(0), before[0].new_empty(0))
    return *_like(q, k, v), *before, _dtheta(q, rest)


def _causal_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.past = inputs[5] is not None
    _save(ctx, inputs[8:], *inputs[:5], *output[4:])
    ctx.mark_non_differentiable(output[1], *output[4:])
    ctx.set_materialize_grads(False)  # often nothing depends on the final State


def _causal_grads(
    ctx: Any, dout: Tensor | None, _: None, dtotal: Tensor | None, dmemory: Tensor | None, *__: None
) -> Any:
    tensors, where, learn = _saved(ctx)
    if dout is None:
        dout = torch.zeros_like(tensors[2], dtype=tensors[0].dtype)
    dq, dk, dv, dsum0, dmemory0, dtheta = causal_backward(*tensors, dout, dtotal, dmemory, ctx.past, learn, *where)
    past = (None, dsum0, dmemory0) if ctx.past else (None, None, None)
    return dq, dk, dv, None, None, *past, *_fit(dtheta, where.theta, learn)


causal_backward = Operator(
    "causal_attention_backward(Tensor q, Tensor k, Tensor v, Tensor? mask, "
    "Tensor? forget, Tensor top, Tensor total, Tensor memory, Tensor flag, Tensor dout, "
    f"Tensor? dtotal, Tensor? dmemory, bool past, bool learn, {SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _causal_backward,
    _causal_backward_fake,
)
causal_operator = Operator(
    "causal_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? forget, "
    f"Tensor? top, Tensor? total, Tensor? memory, {SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _causal,
    _causal_fake,
    _causal_save,
    _causal_grads,
)


def causal(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, forget: Tensor | None, state: State | None, where: Flat
) -> tuple[Tensor, State]:
    """Run the operator. Heads too wide for a program go in blocks of key channels, which add up.
    forget: decay rates (heads,) float32."""
    from ndlightnet_kernels import plans

    dim, blocks = k.shape[-1], plans.channel_blocks(k, v.shape[-1])
    if len(blocks) == 1:
        before = (None, None, None) if state is None else state
        out, *after = causal_operator(q, k, v, mask, forget, *before, *where)
        return out, State(*after[:3])
    outs, states = [], []
    for block in blocks:
        past: Any = (None, None, None)
        if state is not None:
            memory = torch.cat([m[:, :, block] for m in state.memory.split(dim, dim=2)], 2)
            past = (state.max[..., block], state.sum[..., block], memory)
        out, *after = causal_operator(q[..., block], k[..., block], v, mask, forget, *past, *where.slots(block))
        outs.append(out.float())
        states.append(State(*after[:3]))
    halves = zip(*(p.memory.chunk(where.halves, 2) for p in states), strict=True)
    memory = torch.cat([part for half in halves for part in half], 2)
    top, total = (torch.cat([p[i] for p in states], -1) for i in (0, 1))
    return sum(outs[1:], outs[0]).to(q.dtype), State(top, total, memory)


# ---------------------------------------------------------------------------------------- step
def _step(q: Tensor, k: Tensor, v: Tensor, top: Tensor, total: Tensor, memory: Tensor, *position: Any) -> Any:
    from ndlightnet_kernels import step

    return step.step(q, k, v, top, total, memory, Flat(*position))


def _step_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    return q.new_empty(v.shape), *_like(*rest[:3])


step = Operator(
    "attention_step(Tensor q, Tensor k, Tensor v, Tensor top, Tensor total, Tensor memory, "
    f"{SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
    _step,
    _step_fake,
)


# ------------------------------------------------------------------------ merge of many States
def _merge(top: Tensor, total: Tensor, memory: Tensor, window: int) -> Any:
    from ndlightnet_kernels import frames

    return frames.sliding_merge(top, total, memory, window)


def _merge_fake(top: Tensor, total: Tensor, memory: Tensor, window: int) -> Any:
    return _like(top, total, memory)


def _merge_backward(top: Tensor, after: Tensor, dtotal: Tensor, dmemory: Tensor, window: int) -> Any:
    from ndlightnet_kernels import frames

    return frames.sliding_merge_backward(top, after, dtotal, dmemory, window)


def _merge_backward_fake(top: Tensor, after: Tensor, dtotal: Tensor, dmemory: Tensor, window: int) -> Any:
    return _like(dtotal, dmemory)


def _merge_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.window = inputs[3]
    ctx.save_for_backward(inputs[0], output[0])
    ctx.mark_non_differentiable(output[0])


def _merge_grads(ctx: Any, _: Tensor, dtotal: Tensor, dmemory: Tensor) -> Any:
    grads = sliding_merge_backward(*ctx.saved_tensors, dtotal, dmemory, ctx.window)
    return None, *grads, None


sliding_merge_backward = Operator(
    "sliding_merge_backward(Tensor top, Tensor after, Tensor dtotal, Tensor dmemory, "
    "SymInt window) -> (Tensor, Tensor)",
    _merge_backward,
    _merge_backward_fake,
)
sliding_merge = Operator(
    "sliding_merge(Tensor top, Tensor total, Tensor memory, SymInt window) -> (Tensor, Tensor, Tensor)",
    _merge,
    _merge_fake,
    _merge_save,
    _merge_grads,
)
