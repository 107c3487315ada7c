"""Softmax attention to the neighbourhood only: a window without a memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ndlightnet.layout import Grid, Layout, per_axis
from ndlightnet.nn.initial import Device, Space
from ndlightnet.nn.mixers.base import StreamingMixer, default_heads, projected_like, zero_padding
from ndlightnet.nn.position import MDLRPE
from ndlightnet.nn.projections import project
from ndlightnet.ops.local import append_frames, attend_in_samples, flash_support, local_attention


class WindowState(NamedTuple):
    """State of the causal form; all zeros before the first frame."""

    keys: Tensor  # (batch, window - 1, *space, heads, head_dim) of the last frames
    values: Tensor
    frames: Tensor  # (batch,) int64: number of frames so far


class WindowAttention(StreamingMixer):
    """Multi-head softmax attention of each token to those within `window` steps of it along every
    axis (|j - i| < window), with a position code of relative positions.

    The causal form on one axis reads the last `window` tokens, itself included.

    Args:
        dim: channels of a token.
        heads: default: one per 64 channels.
        window: one number for all axes, or one per axis; 4 means 7 tokens along each axis.
        rotary: position code: rotary MD-LRPE of queries and keys, as in SoftmaxAttention. False:
            learnt biases by distance, shared by the axes. On one axis torch's flash attention runs
            the rotary form for 16-bit tensors on CUDA; biases exclude it.

    Parameters: 4 dim^2 + heads (2 max(window) - 1), with rotary 4 dim^2 + dim / 2.
    """

    ragged = True

    def __init__(
        self, dim: int, heads: int | None = None, *, window: int | Sequence[int] = 4, rotary: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.head_dim = default_heads(dim, heads)
        self.window = tuple(window) if isinstance(window, Sequence) else window
        axes = len(self.window) if isinstance(self.window, tuple) else 1
        sizes = per_axis("window", self.window, max(1, axes))
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.lrpe = MDLRPE(self.heads, self.head_dim, "rotary") if rotary else None
        self.bias: nn.Parameter | None = None
        if not rotary:
            self.bias = nn.Parameter(torch.empty(self.heads, 2 * max(sizes) - 1))
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.reset_own()

    def reset_own(self) -> None:
        if self.bias is not None:
            nn.init.normal_(self.bias, std=self.head_dim**-0.5)

    def mix(self, x: Tensor, layout: Layout, mask: Tensor | None, causal: bool) -> Tensor:
        (x,) = zero_padding(mask, x)
        attend, window = partial(self._attend, causal=causal), per_axis("window", self.window, layout.ndim)[0]
        y = attend_in_samples(attend, *self._project(x, layout), mask, layout, causal, window, self._tables(1))
        return self.o_proj(y.flatten(2))

    def _project(self, x: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v (batch, length, heads, head_dim)."""
        q, k, v = (
            y.unflatten(-1, (self.heads, self.head_dim)) for y in project(x, self.q_proj, self.k_proj, self.v_proj)
        )
        if self.lrpe:
            q, k = self.lrpe.rotate(layout, q, k)
        return q, k, v

    def _tables(self, ndim: int) -> list[Tensor]:
        return [] if self.bias is None else [self.bias] * ndim

    def _attend(self, grid: Grid, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        q, k, v = (grid.unflatten(y) for y in (q, k, v))
        return grid.flatten(self._read(q, k, v, None if mask is None else grid.unflatten(mask), causal))

    def _read(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        ndim = q.ndim - 3
        windows = per_axis("window", self.window, ndim)
        return local_attention(q, k, v, windows, self._tables(ndim), mask=mask, causal=causal)

    def implementation(self, x: Tensor, causal: bool = False) -> str:
        q = projected_like(x, *x.shape[1:-1], self.heads, self.head_dim)
        support = flash_support(q, self._tables(1), None)
        return "flash" if support else f"torch ({support.reason})"

    def init_state(self, batch: int, device: Device = None, space: Space = ()) -> WindowState:
        frames = per_axis("window", self.window, 1 + len(space))[0] - 1
        shape = (batch, frames, *space, self.heads, self.head_dim)
        tail = torch.zeros(shape, dtype=self.q_proj.weight.dtype, device=device)
        return WindowState(tail, tail, torch.zeros(batch, dtype=torch.int64, device=device))

    def step(self, x: Tensor, grid: Grid, state: WindowState) -> tuple[Tensor, WindowState]:
        q, k, v = (grid.unflatten(y) for y in self._project(x, grid))
        k, v, real, tail = append_frames(state.keys, state.values, state.frames, k, v)
        y = self.o_proj(grid.flatten(self._read(q, k, v, real, True)).flatten(2))
        return y, WindowState(*tail, state.frames + grid.frame_count)
