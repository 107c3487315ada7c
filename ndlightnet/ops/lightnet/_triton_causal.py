"""The Triton form of the causal operations, as in _triton.py: attention over tokens, one step of
it, and the merge of frames' States."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ndlightnet.ops._operator import Gradient, Operator
from ndlightnet.ops.dispatch import OPERATIONS, Operation
from ndlightnet.ops.lightnet._triton import KERNELS, _attention_flops, _head_limits, _state, _theta_gradient
from ndlightnet.ops.lightnet.state import State
from ndlightnet.ops.position import Position
from ndlightnet_kernels.position import FIELDS, SCHEMA, FlatPosition


def _like(*xs: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in xs)


# -------------------------------------------------------------------------------------- causal
def _causal(*inputs: Any) -> Any:
    """Return output, final State (max, sum, memory), and for the backward the States of all
    segments. forget: decay rates (heads,) float32."""
    from ndlightnet_kernels import causal

    q, k, v, mask, forget, *first = inputs[:-FIELDS]
    out, last, entry = causal.forward(q, k, v, mask, forget, tuple(first), FlatPosition(*inputs[-FIELDS:]))
    return out, *last, *entry


def _causal_fake(q: Tensor, k: Tensor, v: Tensor, *inputs: Any) -> Any:
    from ndlightnet_kernels import plans

    fields = inputs[-FIELDS:]
    segments, rows = plans.plan_segments(k, v.shape[-1], FlatPosition(*fields).kind)[0], k.shape[0] * k.shape[2]
    last = _state(k, v.shape[-1], fields)
    states = zip(last, (segments + 1, segments, segments), strict=True)
    entry = [x.new_empty(rows, n, *x.shape[2:]) for x, n in states]
    return q.new_empty(v.shape), *last, *entry, k.new_empty(rows, segments, dtype=torch.int32)


def _causal_backward(*inputs: Any) -> Any:
    from ndlightnet_kernels import causal_backward as kernels

    q, k, v, mask, forget, *entry, dout, dtotal, dmemory, past, learn = inputs[:-FIELDS]
    position = FlatPosition(*inputs[-FIELDS:])
    dout = torch.zeros_like(v, dtype=q.dtype) if dout is None else dout
    *grads, dtheta = kernels.backward(q, k, v, mask, forget, tuple(entry), position, dout, dtotal, dmemory, past, learn)
    return *grads, _theta_gradient(dtheta, position.theta, learn)


def _causal_backward_fake(q: Tensor, k: Tensor, v: Tensor, *inputs: Any) -> Any:
    past, learn, *fields = inputs[-FIELDS - 2 :]
    before = _state(k, v.shape[-1], fields)[1:] if past else (None, None)
    theta = fields[0]
    return *_like(q, k, v), *before, theta.new_empty(theta.shape) if learn else None


def _causal_limits(
    operation: str, x: Tensor, v: Tensor | None = None, *_: Any, position: Position | None = None
) -> str:
    rotary = position is not None and position.kind == "rotary"
    reason = f"kind='rotary' in {operation}: expected 'cosine' or no position" if rotary else ""
    return _head_limits(x, v, position=position) or reason


OPERATIONS["axis_causal_attention"] = Operation(KERNELS, partial(_causal_limits, "axis_causal_attention"))
INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? forget"
causal_operator = Operator(
    f"causal_attention({INPUTS}, Tensor? first_top, Tensor? first_total, Tensor? first_memory, {SCHEMA}) -> "
    "(Tensor out, Tensor last_top, Tensor last_total, Tensor last_memory, "
    "Tensor top, Tensor total, Tensor memory, Tensor flag)",
    _causal,
    _causal_fake,
    Gradient(
        f"causal_attention_backward({INPUTS}, Tensor top, Tensor total, Tensor memory, Tensor flag, Tensor? dout, "
        f"Tensor? dlast_total, Tensor? dlast_memory, bool has_first_total, bool needs_theta, {SCHEMA}) -> "
        "(Tensor dq, Tensor dk, Tensor dv, Tensor dfirst_total, Tensor dfirst_memory, Tensor dtheta)",
        _causal_backward,
        _causal_backward_fake,
    ),
    flops=_attention_flops,
    implementations=KERNELS,
    limits=partial(_causal_limits, "causal_attention"),
)


def causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    forget: Tensor | None,
    state: State | None,
    position: FlatPosition,
) -> tuple[Tensor, State]:
    """Run the operator. Heads too wide for a program go in blocks of key channels, which add up.
    forget: decay rates (heads,) float32."""
    from ndlightnet_kernels import plans

    dim, blocks = k.shape[-1], plans.channel_blocks(k, v.shape[-1])
    if len(blocks) == 1:
        before = (None, None, None) if state is None else state
        out, *after = causal_operator(q, k, v, mask, forget, *before, *position)
        return out, State(*after[:3])
    outs, states = [], []
    for block in blocks:
        past: Any = (None, None, None)
        if state is not None:
            memory = torch.cat([m[:, :, block] for m in state.memory.split(dim, dim=2)], 2)
            past = (state.max[..., block], state.sum[..., block], memory)
        out, *after = causal_operator(q[..., block], k[..., block], v, mask, forget, *past, *position.slots(block))
        outs.append(out.float())
        states.append(State(*after[:3]))
    halves = zip(*(p.memory.chunk(position.halves, 2) for p in states), strict=True)
    memory = torch.cat([rows for half in halves for rows in half], 2)
    top, total = (torch.cat([p[i] for p in states], -1) for i in (0, 1))
    return sum(outs[1:], outs[0]).to(q.dtype), State(top, total, memory)


# ---------------------------------------------------------------------------------------- step
def _step(q: Tensor, k: Tensor, v: Tensor, top: Tensor, total: Tensor, memory: Tensor, *fields: Any) -> Any:
    from ndlightnet_kernels import step

    return step.step(q, k, v, top, total, memory, FlatPosition(*fields))


def _step_limits(x: Tensor, v: Tensor | None = None, *others: Any, position: Position | None = None) -> str:
    inputs = (x, v, *others, position and position.theta)
    learnt = torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in inputs)
    reason = "a gradient: the kernel of a step has no backward; use torch.no_grad()" if learnt else ""
    return reason or _causal_limits("attention_step", x, v, position=position)


step = Operator(
    f"attention_step(Tensor q, Tensor k, Tensor v, Tensor top, Tensor total, Tensor memory, {SCHEMA}) "
    "-> (Tensor out, Tensor next_top, Tensor next_total, Tensor next_memory)",
    _step,
    lambda q, k, v, *inputs: (q.new_empty(v.shape), *_like(*inputs[:3])),
    flops=_attention_flops,
    implementations=KERNELS,
    limits=_step_limits,
)


# ------------------------------------------------------------------------ merge of many States
def _merge(top: Tensor, total: Tensor, memory: Tensor, window: int) -> Any:
    from ndlightnet_kernels import frames

    return frames.sliding_merge(top, total, memory, window)


def _merge_backward(top: Tensor, after: Tensor, dtotal: Tensor, dmemory: Tensor, window: int) -> Any:
    from ndlightnet_kernels import frames

    return frames.sliding_merge_backward(top, after, dtotal, dmemory, window)


sliding_merge = Operator(
    "sliding_merge(Tensor top, Tensor total, Tensor memory, SymInt window) "
    "-> (Tensor merged_top, Tensor merged_total, Tensor merged_memory)",
    _merge,
    lambda top, total, memory, _: _like(top, total, memory),
    Gradient(
        "sliding_merge_backward(Tensor top, Tensor merged_top, Tensor dmerged_total, Tensor dmerged_memory, "
        "SymInt window) -> (Tensor dtotal, Tensor dmemory)",
        _merge_backward,
        lambda top, after, dtotal, dmemory, _: _like(dtotal, dmemory),
    ),
    implementations=("torch", "triton"),
    limits=_head_limits,
)
