"""Attention with bounded-memory control (ABC; Peng et al., 2022, arXiv 2110.02488)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from ndlightnet.layout import Grid
from ndlightnet.layout.abstract import check_integers, exporting
from ndlightnet.nn.initial import Device, Space
from ndlightnet.nn.mixers.base import StreamingMixer, default_heads, zero_padding
from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.empty import empty_result
from ndlightnet.ops.plain import plain
from ndlightnet.ops.recurrence.chunks import exact
from ndlightnet.ops.recurrence.scan import prefix_maximum, scan

MOST = 2**24  # numbers of the memories that are held at once
LOWEST = -1e30  # a maximum of no logits


class ABCState(NamedTuple):
    """State of the causal form."""

    top: Tensor  # (batch, heads, slots): the largest logit of each slot
    memory: Tensor  # (batch, heads, slots, 2 head_dim + 1): sums of keys, values and 1, times exp(logit - top)


class ABCAttention(StreamingMixer):
    """ABC with learnt control: o_proj of softmax(q . K / sqrt(head_dim)) V, where K and V have `slots` rows: row
    m is the mean of the keys or values that are seen, with weights exp(w_m . x).

    Args:
        dim: channels of a token.
        heads: default: one per 64 channels.
        slots: rows of a head's memory.
        context_dim: channels of the source in the cross form; default `dim`.

    No position code. The causal form computes a memory for each frame, segment by segment.
    Parameters: 2 dim^2 + 2 context_dim dim + heads slots context_dim.
    """

    order_free = True

    def __init__(self, dim: int, heads: int | None = None, *, slots: int = 64, context_dim: int | None = None) -> None:
        super().__init__()
        self.heads, self.head_dim = default_heads(dim, heads)
        check_integers(1, slots=slots)
        self.slots, source = slots, context_dim or dim
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(source, dim, bias=False)
        self.v_proj = nn.Linear(source, dim, bias=False)
        self.control = nn.Linear(source, self.heads * slots, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def mix(self, x: Tensor, layout: Grid, mask: Tensor | None, causal: bool) -> Tensor:
        if not causal:
            return self.mix_context(x, layout, x, layout, mask)
        return self._causal(x, layout, mask, self.init_state(x.shape[0], x.device))[0]

    def mix_context(self, x: Tensor, grid: Grid, context: Tensor, source: Grid, mask: Tensor | None) -> Tensor:
        state = self.init_state(context.shape[0], context.device)[-2:]  # of mixers with more in it, too
        logits, rows = self._source(context, mask)
        if 0 in (x.numel(), context.numel()):
            q = self.q_proj(x)
            return self.o_proj(empty_result(torch.zeros_like(q), q, logits, rows))
        _, memory = memories_after(logits[:, None], rows[:, None], *state)
        return self.o_proj(_read(self._split(self.q_proj(x))[:, None], memory)[:, 0].flatten(2).to(x.dtype))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))

    def _source(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return logits (batch, length, heads, slots) and what is summed, keys, values and 1."""
        (x,) = zero_padding(mask, x)
        logits, k, v = (self._split(proj(x)) for proj in (self.control, self.k_proj, self.v_proj))
        logits = logits.to(accumulator(logits))
        if mask is not None:
            logits = logits.masked_fill(~mask[..., None, None], -torch.inf)
        return logits, pad(torch.cat([k, v], -1), (0, 1), value=1.0).to(logits.dtype)

    def _causal(self, x: Tensor, grid: Grid, mask: Tensor | None, state: ABCState) -> tuple[Tensor, ABCState]:
        inputs = (self._split(self.q_proj(x)), *self._source(x, mask))
        if x.numel() == 0:
            return self.o_proj(empty_result(*inputs).flatten(2)), state
        frames = grid.frame_count
        q, logits, rows = (y.unflatten(1, (frames, -1)) for y in inputs)

        def segment(now: slice, memories: Tensor) -> Tensor:
            return _read(q[:, now], memories)

        y, state = in_segments(segment, logits, rows, state)
        return self.o_proj(y.flatten(1, 2).flatten(2).to(x.dtype)), state

    def init_state(self, batch: int, device: Device = None, space: Space = ()) -> ABCState:
        dtype, shape = accumulator(self.q_proj.weight), (batch, self.heads, self.slots)
        top = torch.full(shape, LOWEST, dtype=dtype, device=device)
        return ABCState(top, torch.zeros(*shape, 2 * self.head_dim + 1, dtype=dtype, device=device))

    def step(self, x: Tensor, grid: Grid, state: ABCState) -> tuple[Tensor, ABCState]:
        return self._causal(x, grid, None, state)


def memories_after(logits: Tensor, rows: Tensor, top: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Return maxima (batch, frames, heads, slots) and memories after each frame. logits, rows: (batch, frames, tokens,
    heads, ...)."""
    with torch.no_grad():  # weights do not depend on it
        tops = prefix_maximum(torch.maximum(logits.amax(2), top[:, None]))
        before = torch.cat([top[:, None], tops[:, :-1]], 1)
        decay = (before - tops).exp()[..., None]
    with exact(rows):
        added = torch.einsum("bfshm,bfshd->bfhmd", (logits - tops[:, :, None]).exp(), rows)
        return tops, scan(decay, added, memory)


def _read(q: Tensor, memory: Tensor) -> Tensor:
    """Read memories (batch, frames, heads, slots, ...) with q (batch, frames, tokens, heads, dim)."""
    with exact(memory):
        k, v, count = memory.split([q.shape[-1], q.shape[-1], 1], -1)
        count = count.masked_fill(count == 0, 1)  # of no tokens
        scores = torch.einsum("bfshd,bfhmd->bfshm", q.to(k.dtype) / math.sqrt(q.shape[-1]), k / count)
        return torch.einsum("bfshm,bfhmd->bfshd", scores.softmax(-1), v / count)


def in_segments(
    read: Callable[[slice, Tensor], Tensor], logits: Tensor, rows: Tensor, state: ABCState
) -> tuple[Tensor, ABCState]:
    """Return read(frames, memories after each of them) of all frames, segment by segment, and the state after them.
    logits, rows: see `memories_after`."""

    def segment(now: slice, top: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tops, memories = memories_after(logits[:, now], rows[:, now], top, memory)
        return read(now, memories), tops[:, -1], memories[:, -1]

    frames, size = logits.shape[1], max(1, MOST // max(1, state.memory.numel()))
    pieces = [slice(None)]  # an exported graph has no number of segments
    if not exporting():
        pieces = [slice(start, start + size) for start in range(0, frames, size)]
    # memories are computed again in the backward pass
    run: Any = segment if plain() else partial(checkpoint, segment, use_reentrant=False, preserve_rng_state=False)
    outputs = []
    for now in pieces:
        y, *last = run(now, *state)
        state = ABCState(*last)
        outputs.append(y)
    return torch.cat(outputs, 1), state
