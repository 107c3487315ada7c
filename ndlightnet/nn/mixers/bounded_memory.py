"""Attention with bounded-memory control (ABC; Peng et al., 2022, arXiv 2110.02488)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet.layout import Grid
from ndlightnet.layout.abstract import check_integers
from ndlightnet.nn.initial import Device, Space
from ndlightnet.nn.mixers.base import StreamingMixer, default_heads, zero_padding
from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.empty import empty_result
from ndlightnet.ops.lightnet.attention import summarize
from ndlightnet.ops.lightnet.slots import read_slots, read_slots_so_far
from ndlightnet.ops.lightnet.state import State


class ABCAttention(StreamingMixer):
    """ABC with learnt control: o_proj of softmax(q . K / sqrt(head_dim)) V, where K and V have `slots` rows: row
    m is the mean of the keys or values that are seen, with weights exp(w_m . x).

    Args:
        dim: channels of a token.
        heads: default: one per 64 channels.
        slots: rows of a head's memory.
        context_dim: channels of the source in the cross form; default `dim`.

    No position code.
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
        q, (logits, rows) = self._split(self.q_proj(x)), self._source(context, mask)
        if 0 in (x.numel(), context.numel()):
            return self.o_proj(empty_result(torch.zeros_like(q), q, logits, rows).flatten(2))
        y, _ = read_slots(q, summarize(logits, rows, mask=mask))
        return self.o_proj(y.flatten(2).to(x.dtype))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))

    def _source(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return logits (batch, length, heads, slots) and rows, the keys and values."""
        (x,) = zero_padding(mask, x)
        logits, k, v = (self._split(proj(x)) for proj in (self.control, self.k_proj, self.v_proj))
        return logits, torch.cat([k, v], -1)

    def _causal(self, x: Tensor, grid: Grid, mask: Tensor | None, state: State) -> tuple[Tensor, State]:
        q, (logits, rows) = self._split(self.q_proj(x)), self._source(x, mask)
        if x.numel() == 0:
            return self.o_proj(empty_result(q, logits, rows).flatten(2)), state
        y, _, state = read_slots_so_far(q, logits, rows, state, grid.frame().length, mask)
        return self.o_proj(y.flatten(2).to(x.dtype)), state

    def init_state(self, batch: int, device: Device = None, space: Space = ()) -> Any:
        dtype = accumulator(self.q_proj.weight)
        return State.empty(batch, self.heads, self.slots, 2 * self.head_dim, dtype=dtype, device=device)

    def step(self, x: Tensor, grid: Grid, state: Any) -> tuple[Tensor, Any]:
        return self._causal(x, grid, None, state)
