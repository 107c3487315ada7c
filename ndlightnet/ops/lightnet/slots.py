"""Softmax attention to the rows of a memory, of which each is a mean of all tokens so far (ABC, arXiv 2110.02488).

A token's read of LightNet's memory with a number f_m for each row is o = sum_m f_m M[m]. Its scores q . M[m] are the
gradients of q . o by f_m: both forms have the same chunks, and each is the other's gradient.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ndlightnet.ops._operator import Gradient, Operator
from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.lightnet import parallel
from ndlightnet.ops.lightnet.attention import mask_inputs, summarize
from ndlightnet.ops.lightnet.frames import sliding_merge, states_outweigh_tokens
from ndlightnet.ops.lightnet.state import State, merge
from ndlightnet.ops.plain import plain
from ndlightnet.ops.recurrence.chunks import exact


def read_slots(q: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """Return softmax(q . K / sqrt(dim)) V and the logarithm of the softmax's sum, for q (batch, length, heads, dim).

    state: of keys that are the logits of slots, and of values that are a token's key and value. K and V are the means
    over its tokens with weights exp(logit). Returns (batch, length, heads, dim) and (batch, length, heads), in float32
    (float64); 0 and -inf where the state is empty.
    """
    filled = state.sum > 0
    with exact(q):
        k, v = (state.memory / state.sum.masked_fill(~filled, 1)[..., None]).chunk(2, -1)
        scores = torch.einsum("blhd,bhmd->blhm", q.to(k.dtype) / math.sqrt(q.shape[-1]), k)
        scores = scores.masked_fill(~filled[:, None], -torch.inf)
        total = scores.logsumexp(-1)
        weights = (scores - total.masked_fill(total == -torch.inf, 0)[..., None]).exp()
        return torch.einsum("blhm,bhmd->blhd", weights, v), total


def read_slots_so_far(
    q: Tensor, logits: Tensor, rows: Tensor, state: State, frame: int, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, State]:
    """Return `read_slots` of q (batch, length, heads, dim) from the tokens of its frame of so many tokens, earlier ones
    and `state`, and the state after them. logits (batch, length, heads, slots); rows: keys and values, (batch, length,
    heads, 2 dim); mask: (batch, length) bool, False = padding.

    Frames that are larger than their state have a state each; smaller ones run in chunks."""
    if not plain() and q.shape[1] > frame and not states_outweigh_tokens(logits, rows, None, frame):

        def by_frame(x: Tensor) -> Tensor:
            return x.unflatten(1, (-1, frame)).flatten(0, 1)

        states = summarize(by_frame(logits), by_frame(rows), mask=None if mask is None else by_frame(mask))
        pairs = zip(state, (x.unflatten(0, (len(q), -1)) for x in states), strict=True)
        merged = sliding_merge(State(*(torch.cat([x[:, None], y], 1) for x, y in pairs)))
        y, total = read_slots(by_frame(q), State(*(x[:, 1:].flatten(0, 1) for x in merged)))
        y, total = (x.unflatten(0, (len(q), -1)).flatten(1, 2) for x in (y, total))
        return y, total, State(*(x[:, -1].clone() for x in merged))
    after = merge(state, summarize(logits, rows, mask=mask))
    if isinstance(q.shape[1], int) and q.shape[1] == frame:  # an exported graph has any number of frames
        return *read_slots(q, after), after
    logits, rows = mask_inputs(logits, rows, mask)
    with exact(q):
        k, v = rows.chunk(2, -1)
        before_k, before_v = (State(state.max, state.sum, memory) for memory in state.memory.chunk(2, -1))
        scores = _scores(q, logits, k, *before_k, frame) / math.sqrt(q.shape[-1])
        y, _ = parallel.causal(scores.softmax(-1), logits, v, None, None, before_v, frame)
        total = scores.logsumexp(-1)
    if mask is not None:
        so_far = mask.unflatten(1, (-1, frame)).any(-1).cumsum(1) > 0
        seen = (state.sum[:, None, :, 0] > 0) | so_far.repeat_interleave(frame, 1)[..., None]
        total = total.masked_fill(~seen, -torch.inf)
    return y, total, after


def _form(k: Tensor, v: Tensor, state: State, size: int) -> parallel.Causal:
    return parallel.Causal(torch.zeros_like(k), k, v, None, None, state, size)


def _scores_forward(q: Tensor, k: Tensor, v: Tensor, *state_and_size: Any) -> Tensor:
    *state, size = state_and_size
    return _form(k, v, State(*state), size).scores(q).contiguous()


def _scores_backward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *state, dout, size = rest
    first = State(*state)
    dq = parallel.causal_form(dout, k, v, None, None, first, size)[0]
    zeros = (torch.zeros_like(x) for x in state[1:])
    _, dk, dv, _, *dstate = parallel.causal_gradients((dout, k, v, None, None, first), size, q, *zeros)
    pairs = zip((dq, dk, dv, *dstate), (q, k, v, *state[1:]), strict=True)
    return tuple(x.to(like.dtype).contiguous() for x, like in pairs)


INPUTS = "Tensor q, Tensor k, Tensor v, Tensor top, Tensor total, Tensor memory"
operator = Operator(
    f"slot_scores({INPUTS}, SymInt size) -> Tensor out",
    _scores_forward,
    lambda q, k, *_: k.new_empty(k.shape, dtype=accumulator(k)),
    Gradient(
        f"slot_scores_backward({INPUTS}, Tensor dout, SymInt size) "
        "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dtotal, Tensor dmemory)",
        _scores_backward,
    ),
    flops=lambda k, v, **_: 4 * math.prod(k) * v[-1],
)


def _scores(*inputs: Any) -> Tensor:
    out: Tensor = (_scores_forward if plain() else operator)(*inputs)
    return out
