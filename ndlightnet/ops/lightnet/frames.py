"""Axis-causal attention: causal along the first axis of a grid, free along the others.

A frame is one step of the first axis with all its tokens. Each frame is summarised by itself, its
State is merged with those of the frames before it, and its queries read the result: one pass over
the tokens, however many a query reads. `window` merges the last frames only, `forget` lowers the
`max` of a State with every later frame; both are exact: nothing is ever subtracted from a memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling as compiling
from torch.utils.checkpoint import checkpoint

from ndlightnet.layout import Grid, Layout, Ragged, as_layout
from ndlightnet.layout.abstract import exporting
from ndlightnet.ops.dispatch import Impl, resolve
from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.empty import empty_result
from ndlightnet.ops.lightnet import _triton, _triton_causal, parallel, reference
from ndlightnet.ops.lightnet.attention import (
    _check_state,
    _empty,
    _factors,
    _query,
    _theta,
    alone,
    causal_attention,
    check_inputs,
    check_rates,
    check_window,
    chunked,
    map_attention,
    mask_inputs,
    packed_position,
    summarize,
    token_window,
)
from ndlightnet.ops.lightnet.state import State, decay, merge, tile
from ndlightnet.ops.plain import plain
from ndlightnet.ops.position import Position, offset_gradient, offset_of, relative, shape_of
from ndlightnet.ops.recurrence.chunks import SEGMENT, exact
from ndlightnet.ops.recurrence.scan import before, prefix_maximum, scan

MERGED = 16  # frames of a window: with fewer, an exported graph merges States, for any number of frames
GROUP = 2**28  # bytes of the States that a GPU computes at once: in smaller groups it waits for the host


class Tokens(NamedTuple):
    """Arguments of an attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    position: Position | None

    def frames(self, first: int, count: int, size: int) -> Tokens:
        """Return `count` frames of `size` tokens, from frame `first` on."""
        q, k, v, mask, position = self
        now = slice(first * size, (first + count) * size)
        if position is not None:
            shape = shape_of(position)
            offset = offset_of(position) or (0,) * len(shape)
            position = position._replace(layout=(count, *shape[1:]), offset=(offset[0] + first, *offset[1:]))
        return Tokens(q[:, now], k[:, now], v[:, now], None if mask is None else mask[:, now], position)


# ------------------------------------------------------------------------ States of many frames
def _with_empty_before(states: State, empty: int) -> State:
    """Prepend `empty` empty States to States (batch, frames, ...)."""

    def join(x: Tensor, fill: float) -> Tensor:
        return torch.cat([x.new_full((x.shape[0], empty, *x.shape[2:]), fill), x], 1)

    return State(join(states.max, -torch.inf), join(states.sum, 0), join(states.memory, 0))


def _shifted(states: State, by: int) -> State:
    """Shift States `by` frames later, with empty ones in front."""
    n = states.max.shape[1]
    by = min(by, n)
    return _with_empty_before(State(*(x[:, : n - by] for x in states)), by)


def _merge_last(states: State, window: int) -> State:
    """Merge the last `window` States up to each frame, by doubling."""
    have, out, size, done = states, states, 1, 0
    while True:
        if window & size:
            out = merge(out, _shifted(have, done)) if done else have
            done += size
        if 2 * size > window:
            return out
        have, size = merge(have, _shifted(have, size)), 2 * size


def _merge_all(states: State) -> State:
    """Merge all States up to each frame, for any number of frames in an exported graph."""
    top = prefix_maximum(states.max.detach()).detach()
    fall = decay(before(top, torch.full_like(top[:, 0], -torch.inf)), top)
    weight, rows = decay(states.max.detach(), top), states.memory.shape[-2]
    falls, weights = (tile(x, rows, -1)[..., None] for x in (fall, weight))
    total = scan(fall, weight * states.sum)
    return State(top, total, scan(falls, weights * states.memory))


class SlidingMerge(torch.autograd.Function):
    """Sliding merge that saves two maxima only. Its gradient is the same merge in reverse order, of the gradients of
    sums and memories, with the negative maximum instead of the maximum: every exponent stays at or below 0."""

    @staticmethod
    def forward(ctx: Any, top: Tensor, total: Tensor, memory: Tensor, window: int) -> tuple[Tensor, Tensor, Tensor]:
        out = _merge_last(State(top, total, memory), window)
        ctx.window = window
        ctx.save_for_backward(top, out.max)
        ctx.mark_non_differentiable(out.max)
        return out.max, out.sum, out.memory

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        top, after = ctx.saved_tensors
        states = State(torch.where(after == -torch.inf, after, -after), grads[1], grads[2])
        merged = _merge_last(State(*(x.flip(1) for x in states)), ctx.window)
        ref, total, memory = (x.flip(1) for x in merged)
        fall = decay(top, -ref)
        return None, fall * total, tile(fall, memory.shape[-2], -1)[..., None] * memory, None


def sliding_merge(states: State, window: int | None = None, impl: Impl = "auto") -> State:
    """Merge the last `window` States up to each frame; States are (batch, frames, heads, ·).

    None: all States up to the frame.
    """
    if window is None and plain():
        return _merge_all(states)
    frames = states.max.shape[1]
    if window is None or window >= frames:  # a power of two takes one chain of merges
        window = 1 << max(0, frames - 1).bit_length()
    if resolve("sliding_merge", impl, states.sum, None, states.memory) == "triton":
        return State(*_triton_causal.sliding_merge(*states, window))
    if plain():
        return _merge_last(State(*states), window)
    return State(*SlidingMerge.apply(*states, window))  # type: ignore[no-untyped-call]


# ------------------------------------------------------------------------------------ attention
def axis_causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout | int,
    *,
    mask: Tensor | None = None,
    position: Position | None = None,
    state: State | None = None,
    window: int | None = None,
    forget: float | Tensor = 0.0,
    return_state: bool = True,
    impl: Impl = "auto",
) -> tuple[Tensor, Any]:
    """Let tokens attend to their frame and to earlier frames. Returns output and final State.

    q, k `(batch, length, heads, dim)`, v `(batch, length, heads, value_dim)` with
    length = frames * tokens of a frame. layout: a Grid whose first axis counts the frames, or their
    number; or a Ragged of samples end to end in one row (batch 1), each of which reads only itself;
    then `state` and the returned one are None. position: its first axis counts the frames; with a
    Ragged its grid may have any shape, without prefix or offset.

    state: State before the first frame; the returned one is for the frames that follow. window: a frame attends to the
    last `window` frames, itself included. Then the State holds `window - 1` frames separately: its tensors are (batch,
    window - 1, heads, ·). forget: decay rate; the weight of a frame is multiplied by exp(-forget) with every later
    frame: 0 or more, or (heads,) such numbers; it has no gradient. Above 8192 it counts as 8192, after which nothing is
    left of a frame. return_state: False returns None in place of the State, which for a window of tokens is larger than
    all else.

    Frames of one token are computed in chunks, as in `causal_attention`, in torch other frames too whose States take
    more memory than their tokens (small frames). With kernels or a window these States are computed for some frames at
    a time and recomputed in the backward pass.
    """
    grid: Any = as_layout(layout)
    if isinstance(grid, Ragged):  # kernels take the frames of all samples at once, by tables of a Ragged
        if state is not None:
            raise ValueError("state: expected None with samples end to end")
        return _ragged(Tokens(q, k, v, mask, position), grid, window, forget, impl), None
    frames, frame = grid.shapes[0][0], grid.frame()
    if grid.shared:
        options: Any = {"window": window, "forget": forget, "impl": impl}
        check_inputs(k, v, mask, position, q)
        check_decay(window, forget, k.shape[2])
        if position is not None:  # the gradient of theta counts from the first frame of the slab
            position = position._replace(layout=shape_of(position), offset=offset_of(position))

        def after() -> State:
            if window is None and not isinstance(forget, Tensor) and forget == 0:
                return summarize(k, v, mask=mask, position=position, impl=impl)
            last: State = axis_causal_attention(q, k, v, frames, mask=mask, position=position, **options)[1]
            return last

        state = grid.before(state, after, window, forget)
        if not frame.shared:
            options |= {"state": state, "return_state": False}
            return axis_causal_attention(q, k, v, frames, mask=mask, position=position, **options)
    check_inputs(k, v, mask, position, q)
    if k.shape[1] == 0:  # no frames, or none with tokens
        if state is None:
            state = _empty(k, v, position)
            if window is not None:
                state = _with_empty_before(State(*(x[:, None][:, :0] for x in state)), window - 1)
        return empty_result(v.to(q.dtype), q, k, _theta(position)), state if return_state else None
    if frames < 1 or k.shape[1] % frames:
        raise ValueError(f"frames={frames}: expected a divisor of the length, {k.shape[1]}")
    if position is not None and (shape_of(position)[0] != frames or position.prefix):
        raise ValueError(
            f"position of a grid {shape_of(position)} behind {position.prefix} tokens: expected {frames} "
            "frames and nothing in front"
        )
    check_decay(window, forget, k.shape[2])
    chosen = resolve("axis_causal_attention", impl, k, v, position=position)
    if frame.shared and chosen == "reference":
        raise ValueError("impl='reference' with slabs of a frame: expected 'auto', 'torch' or 'triton'")
    if k.shape[1] == frames and window is None and not frame.shared:
        if k.is_cpu and chosen == "torch" and state is None and not (return_state or plain() or compiling()):
            return alone(q, k, v, mask, position, forget), None
        out, state = causal_attention(q, k, v, mask=mask, position=position, state=state, forget=forget, impl=impl)
        return out, state if return_state else None
    position = relative(position)
    if state is not None:
        _check_frames(state, k, v, position, window)
        state = offset_gradient(state, position, -1)
    inputs = Tokens(q, k, v, mask, position)
    with exact(k):
        if chosen == "reference":
            out, state = reference.frames(q, k, v, frames, state, position, mask, window, forget)
            return out.to(q.dtype), offset_gradient(state, position, 1)
        by_token = k.shape[1] == frames and not frame.shared
        if exporting() and window is not None and window < MERGED:
            by_token = False  # the number of blocks depends on that of frames
        if by_token and window is not None and (state is None or frames >= window):
            out, state = _window(inputs, state, window, forget, chosen, return_state)
            return out, None if state is None else offset_gradient(state, position, 1)
        rules = (window, forget, chosen, frame)
        size, group = k.shape[1] // frames, frames
        if not plain() and not frame.shared:
            learnt = torch.is_grad_enabled()
            # a State costs less than chunks from fewer tokens on where none is saved for a backward
            least = size if learnt else 4 * size // 3
            if window is None and chosen == "torch" and states_outweigh_tokens(k, v, position, least):
                out, state = chunked(*inputs, state, forget, size)
                return out, state if return_state else None
            if window is None and k.is_cpu and not learnt and not compiling():
                group = max(1, SEGMENT // max(1, k.shape[0] * k.shape[2] * k.shape[3] * v.shape[3]))
            elif states_outweigh_tokens(k, v, position, size):
                group = max(1, round(frames**0.5))
                if k.is_cuda and not compiling():  # what is compiled holds for any batch
                    group = max(group, GROUP // max(1, k.shape[0] * k.shape[2] * state_bytes(k, v, position)))
        if group >= frames:
            out, state = _attend(inputs, state, frames, *rules)
            return out, offset_gradient(state, position, 1) if return_state else None
        run: Any = _attend
        if torch.is_grad_enabled():
            run = partial(checkpoint, _attend, use_reentrant=False, preserve_rng_state=False)
        outs = []
        for first in range(0, frames, group):
            count = min(group, frames - first)
            out, state = run(inputs.frames(first, count, size), state, count, *rules)
            outs.append(out)
        assert state is not None
        return torch.cat(outs, 1), offset_gradient(state, position, 1) if return_state else None


def check_decay(window: int | None, forget: float | Tensor, heads: int) -> None:
    check_window(window)
    check_rates(forget, heads)


def _check_frames(state: State, k: Tensor, v: Tensor, position: Position | None, window: int | None) -> None:
    if window is None:
        return _check_state(state, k, v, position)
    lead = (k.shape[0], window - 1, k.shape[2])
    if any(tuple(x.shape[:3]) != lead for x in state):
        raise ValueError(
            f"state.max {tuple(state.max.shape)}: expected (batch, window - 1, heads, dim) with {lead} in front"
        )
    if window > 1:
        _check_state(State(*(x[:, 0] for x in state)), k, v, position)
    return None


def states_outweigh_tokens(k: Tensor, v: Tensor, position: Position | None, tokens: int) -> bool:
    """Return whether the State of a frame of `tokens` tokens takes more memory than its q, k, v and output."""
    return state_bytes(k, v, position) > tokens * 2 * (k.shape[-1] + v.shape[-1]) * k.element_size()


def state_bytes(k: Tensor, v: Tensor, position: Position | None) -> int:
    """Return the bytes of the memory of a head's State."""
    return k.shape[-1] * v.shape[-1] * (1 if position is None else 2) * accumulator(k).itemsize


def decayed(states: State, forget: float | Tensor) -> State:
    """Multiply the weight of frame i of States (batch, frames, heads, ·) by exp(forget * (i + 1)),
    relative to the State before the first frame."""
    ages = torch.arange(1, states.max.shape[1] + 1, device=states.max.device)
    return states.decayed(-ages[:, None, None], forget)


def _attend(
    tokens: Tokens,
    state: State | None,
    frames: int,
    window: int | None,
    forget: float | Tensor,
    impl: Any,
    frame: Grid | None = None,
) -> tuple[Tensor, State]:
    """Run axis-causal attention on all frames at once. frame: the layout of one."""
    position = tokens.position
    frame_states, read = _by_triton(tokens, frames) if impl == "triton" else _by_torch(tokens, frames)
    if frame is not None and frame.shared:
        frame_states = frame.merge(offset_gradient(frame_states, position, 1))()
        frame_states = offset_gradient(frame_states, position, -1)
    all_states = frame_states = decayed(frame_states, forget)
    if state is not None:
        before = State(*(x[:, None] for x in state)) if window is None else state
        all_states = State(*(torch.cat(pair, 1) for pair in zip(before, frame_states, strict=True)))
    merged = sliding_merge(all_states, window, impl)
    # a slice of all frames would cost a copy in the backward pass
    out = read(merged if state is None else State(*(x[:, -frames:] for x in merged)))
    if window is None:
        last = State(*(x[:, -1].clone() for x in merged))
    else:
        last = _with_empty_before(all_states, max(0, window - 1 - all_states.max.shape[1]))
        last = State(*(x[:, x.shape[1] - (window - 1) :].clone() for x in last))
    return out, last.decayed(frames, forget)


def _window(
    tokens: Tokens, state: State | None, window: int, forget: float | Tensor, impl: Any, return_state: bool
) -> tuple[Tensor, State | None]:
    """Run frames of one token with a window; after a State, as many as it reaches one by one."""
    _, k, v, _, position = tokens
    n, last = k.shape[1], min(window - 1, k.shape[1])
    out = token_window(*tokens, window, forget, impl)
    if state is not None and window > 1:
        old, _ = _attend(tokens.frames(0, last, 1), state, last, window, forget, impl)
        out = torch.cat([old, out[:, last:]], 1)
    if not return_state:
        return out, None
    if window == 1:
        return out, State(*(x[:, None][:, :0] for x in _empty(k, v, position)))
    latest = tokens.frames(n - last, last, 1)
    states, _ = _by_triton(latest, last) if impl == "triton" else _by_torch(latest, last)
    return out, _with_empty_before(decayed(states, forget).decayed(last, forget), window - 1 - last)


Forms = tuple[State, Callable[[State], Tensor]]


def _by_torch(tokens: Tokens, frames: int) -> Forms:
    """Return the frames' States (batch, frames, heads, ·) and a function that reads such States."""
    q, k, v, mask, position = tokens
    k, v = mask_inputs(k, v, mask)
    w, shape = _factors(k, position), (frames, -1)
    f = _query(q, position, w).unflatten(1, shape)
    if w is not None:
        w = w.unflatten(-3, shape)
    frame_states = parallel.summarize(k.unflatten(1, shape), v.unflatten(1, shape), w)
    return frame_states, lambda merged: parallel.read(f, merged).flatten(1, 2).to(q.dtype)


def _by_triton(tokens: Tokens, frames: int) -> Forms:
    """Do the same as `_by_torch` with kernels, to which each frame is a sample."""
    q, k, v, mask, position = tokens
    batch, fields = k.shape[0], _triton.of_frames(position, k.shape[0], frames)

    def samples(x: Tensor) -> Tensor:
        return x.unflatten(1, (frames, -1)).flatten(0, 1)

    keep = None if mask is None else samples(mask)
    frame_states = _triton.summarize(samples(k), samples(v), keep, *fields)

    def read(merged: State) -> Tensor:
        total, memory = merged.sum.flatten(0, 1), merged.memory.flatten(0, 1)
        out: Tensor = _triton.read(samples(q), total, memory, *fields)
        return out.unflatten(0, (batch, frames)).flatten(1, 2)

    return State(*(x.unflatten(0, (batch, frames)) for x in frame_states)), read


def _ragged(tokens: Tokens, layout: Ragged, window: int | None, forget: float | Tensor, impl: Impl) -> Tensor:
    """Run samples end to end: by kernels, to which each frame is a sample, where frames are large
    enough to have a State each; elsewhere the samples of one shape at a time."""
    q, k, v, mask, position = tokens
    position = packed_position(layout, k, position)
    check_inputs(k, v, mask, position, q)
    check_decay(window, forget, k.shape[2])
    chosen: Any = resolve("axis_causal_attention", impl, k, v, position=position)
    pairs = zip(layout.lengths, layout.shapes, strict=True)
    small = min((n // shape[0] for n, shape in pairs if n), default=0)
    if chosen != "triton" or not layout.joint or states_outweigh_tokens(k, v, position, small):

        def alone(grid: Grid, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            options |= {"window": window, "forget": forget, "return_state": False, "impl": chosen}
            return axis_causal_attention(q, k, v, grid, **options)[0]

        return map_attention(alone, layout, q, k, v, mask, position)
    frames, at, longest = layout.frames(k.device)
    offset = torch.nn.functional.pad((at % longest)[:, None], (0, layout.ndim - 1)).int()
    fields = _triton.of_samples(position, frames, k, v.shape[-1], offset)
    frame_states = _triton.summarize(k, v, mask, *fields)

    def padded(x: Tensor, fill: float) -> Tensor:
        """Pad x (all frames, ...) to (samples, longest, ...), `fill` after each last frame."""
        table = x.new_full((len(layout) * longest, *x.shape[1:]), fill).index_copy(0, at, x)
        return table.unflatten(0, (len(layout), longest))

    states = State(*map(padded, frame_states, (-torch.inf, 0.0, 0.0)))
    merged = sliding_merge(decayed(states, forget), window, chosen)
    _, total, memory = (x.flatten(0, 1).index_select(0, at) for x in merged)
    out: Tensor = _triton.read(q, total, memory, *fields)
    return out
