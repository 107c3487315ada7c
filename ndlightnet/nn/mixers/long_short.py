"""Long-short attention (Transformer-LS; Zhu et al., 2021, arXiv 2107.02192)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ndlightnet.layout import Grid, per_axis
from ndlightnet.nn.initial import Device, Space
from ndlightnet.nn.mixers.base import zero_padding
from ndlightnet.nn.mixers.bounded_memory import ABCAttention
from ndlightnet.ops.empty import empty_result
from ndlightnet.ops.lightnet.attention import summarize
from ndlightnet.ops.lightnet.slots import read_slots, read_slots_so_far
from ndlightnet.ops.lightnet.state import State
from ndlightnet.ops.local import append_frames, local_attention


class LongShortState(NamedTuple):
    """State of the causal form."""

    keys: Tensor  # (batch, window - 1, *space, heads, head_dim) of the last frames
    values: Tensor
    frames: Tensor  # (batch,) int64: number of frames so far
    max: Tensor  # these three: see State
    sum: Tensor
    memory: Tensor


class LongShortAttention(ABCAttention):
    """Long-short attention: o_proj of one softmax attention to the neighbourhood, with learnt biases by distance, and
    to `slots` keys and values that are projected from all tokens (LAVO, arXiv 2312.11135, Eq. 10), by each head for
    itself: with P = softmax(x W^P) over the tokens, K = P^T x W^K and V = P^T x W^V.

    The causal form projects all frames so far into as many slots; the paper keeps slots for each segment of the past
    (Eq. 11), in quadratic time. Its layer norms of both kinds of keys are left out, as in these equations. The cross
    form reads the projected source alone.

    Args:
        dim: channels of a token.
        heads: default: one per 64 channels.
        window: of the neighbourhood, |j - i| < window; one for all axes, or one per axis. "auto": 16 / number of axes.
        slots: projected keys of a head.

    Parameters: 4 dim^2 + heads slots dim + heads (2 max(window) - 1).
    """

    order_free = False

    def __init__(
        self,
        dim: int,
        heads: int | None = None,
        *,
        window: int | Sequence[int] | Literal["auto"] = "auto",
        slots: int = 64,
    ) -> None:
        super().__init__(dim, heads, slots=slots)
        self.window: Any = tuple(window) if isinstance(window, list | tuple) else window
        widest = max(self.windows(max(1, len(self.window)) if isinstance(self.window, tuple) else 1))
        self.bias = nn.Parameter(torch.empty(self.heads, 2 * widest - 1))
        self.reset_own()

    def reset_own(self) -> None:
        nn.init.normal_(self.bias, std=self.head_dim**-0.5)

    def mix_context(self, x: Tensor, grid: Grid, context: Tensor, source: Grid, mask: Tensor | None) -> Tensor:
        return super().mix_context(x, grid, context, source, mask) + 0 * self.bias.sum()  # DDP waits for its gradient

    def windows(self, ndim: int) -> tuple[int, ...]:
        """Return the window on each axis of a grid."""
        return per_axis("window", max(2, 16 // ndim) if self.window == "auto" else self.window, ndim)

    def mix(self, x: Tensor, layout: Grid, mask: Tensor | None, causal: bool) -> Tensor:
        return self._mix(x, layout, mask, self.init_state(x.shape[0], x.device, layout.shape[1:]), causal)[0]

    def step(self, x: Tensor, grid: Grid, state: Any) -> tuple[Tensor, Any]:
        return self._mix(x, grid, None, state, causal=True)

    def _mix(self, x: Tensor, grid: Grid, mask: Tensor | None, state: Any, causal: bool) -> tuple[Tensor, Any]:
        q, (logits, rows) = self._split(self.q_proj(*zero_padding(mask, x))), self._source(x, mask)
        if x.numel() == 0:
            return self.o_proj(empty_result(q, logits, rows, self.bias).flatten(2)), state
        slots = State(*state[3:])
        if causal:
            value, score, slots = read_slots_so_far(q, logits, rows, slots, grid.frame().length, mask)
        else:
            value, score = read_slots(q, summarize(logits, rows, mask=mask))
        q, k, v, value, score = (grid.unflatten(y) for y in (q, *rows.chunk(2, -1), value, score))
        mask = None if mask is None else grid.unflatten(mask)
        if causal:
            past, (k, v, real, tail) = state.keys.shape[1], append_frames(state.keys, state.values, state.frames, k, v)
            if mask is not None:
                real = real & nn.functional.pad(mask, [0, 0] * (grid.ndim - 1) + [past, 0], value=True)
            mask, state = real, LongShortState(*tail, state.frames + grid.frame_count, *slots)
        windows = self.windows(grid.ndim)
        biases = [self.bias] * len(windows)
        y = local_attention(q, k, v, windows, biases, mask=mask, causal=causal, beside=(score, value))
        return self.o_proj(grid.flatten(y).flatten(2)), state

    def init_state(self, batch: int, device: Device = None, space: Space = ()) -> Any:
        shape = (batch, self.windows(1 + len(space))[0] - 1, *space, self.heads, self.head_dim)
        tail = torch.zeros(shape, dtype=self.q_proj.weight.dtype, device=device)
        count = torch.zeros(batch, dtype=torch.int64, device=device)
        return LongShortState(tail, tail, count, *super().init_state(batch, device))
