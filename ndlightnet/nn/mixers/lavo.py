"""LAVO: softmax attention to the neighbourhood, and to an orthogonal memory of all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ndlightnet.layout import Grid, per_axis
from ndlightnet.nn.initial import Device, Space, assign
from ndlightnet.nn.mixers.base import StreamingMixer, default_heads, zero_padding
from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.lavo import WindowSums, amounts, memory_read, past_means, token_mean
from ndlightnet.ops.local import append_frames, local_attention

MEMORIES = 64  # most vectors in a head's memory


class LAVOState(NamedTuple):
    """State of the causal form; all zeros before the first frame."""

    keys: Tensor  # (batch, window - 1, *space, heads, head_dim) of the last frames
    values: Tensor
    done: Tensor  # the other three: see WindowSums
    pending: Tensor
    frames: Tensor


class LAVO(StreamingMixer):
    """LAVO (arXiv 2312.11135): o_proj(merge heads (local + memory) / 2), where local is softmax attention to the
    neighbourhood with learnt biases and memory what the query reads from an orthogonal memory; see ndlightnet.ops.local
    and ndlightnet.ops.lavo.

    A head's memory has as many vectors as its dim, up to 64; they start orthonormal and are learnt without constraint,
    as in the paper. It compresses the local features of all tokens; in the causal form, of the tokens in all windows of
    frames (steps of the first axis) that ended before the token's window began. In the first window the memory is empty
    and the read is 0. Within its frame a causal token sees its neighbourhood.

    Args:
        dim: channels of a token.
        heads: default: one per 64 channels. Head dim = dim / heads.
        window: the neighbourhood: |j - i| < window on an axis. One number for all axes, which then share a table of
            biases, or one per axis. "auto": 16 / number of axes, so that the neighbourhood on a volume does not grow
            too large (9^3); text gains from more than 16 (the paper's best is 64). None: no local branch; the memory
            compresses the values, in the causal form those of all frames so far.
        position: whether the local branch has learnt biases.
        dissect: what the memory compresses, local features or, if False, the values, in the causal form those of all
            frames so far. (Table 9 of the paper is without position, then without both.)
        context_dim: channels of the source in the cross form, which has no local branch; with it the layer has no local
            branch in any form.

    Parameters: 4 dim^2 + memories dim + heads (2 window - 1), the last term, that of `position`, for each axis if
    `window` is one per axis.
    Without the local branch: 2 dim^2 + context_dim dim + memories dim.
    """

    undecayed = ("basis",)

    def __init__(
        self,
        dim: int,
        heads: int | None = None,
        *,
        window: int | Sequence[int] | Literal["auto"] | None = "auto",
        position: bool = True,
        dissect: bool = True,
        context_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.head_dim = default_heads(dim, heads)
        rows = min(MEMORIES, self.head_dim)  # no more vectors can be orthogonal
        if isinstance(window, str) and window != "auto":
            raise ValueError(f"window={window!r}: expected numbers, 'auto' or None")
        fixed = tuple(window) if isinstance(window, Sequence) and window != "auto" else window
        self.window = None if context_dim is not None else fixed
        sizes = self.windows(max(1, len(fixed)) if isinstance(fixed, tuple) else 1) or ()
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False) if sizes else None
        self.v_proj = nn.Linear(context_dim or dim, dim, bias=False)
        self.dissect = dissect
        self.bias = nn.ParameterList(torch.empty(self.heads, 2 * size - 1) for size in sizes if position)
        self.basis = nn.Parameter(torch.empty(self.heads, rows, self.head_dim))
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.reset_own()

    def reset_own(self) -> None:
        for bias in self.bias:
            nn.init.normal_(bias, std=self.head_dim**-0.5)
        # one by one, since orthogonal_ takes (heads, memories, head_dim) for a single matrix
        heads, *shape = self.basis.shape
        device = self.basis.device
        bases = [nn.init.orthogonal_(torch.empty(shape, device=device)) for _ in range(heads)]
        assign(self.basis, torch.stack(bases))

    @property
    def order_free(self) -> bool:  # type: ignore[override]
        return self.window is None

    def windows(self, ndim: int) -> tuple[int, ...] | None:
        """Return the window on each axis of a grid; None without the local branch."""
        if self.window is None:
            return None
        window = max(2, 16 // ndim) if isinstance(self.window, str) else self.window
        return per_axis("window", window, ndim)

    def mix(self, x: Tensor, layout: Grid, mask: Tensor | None, causal: bool) -> Tensor:
        self._check(x)
        (x,) = zero_padding(mask, x)
        if self.window is None and not causal:
            return self.mix_context(x, layout, x, layout, mask)
        real = None if mask is None else layout.unflatten(mask)
        q, k, v = self._project(layout.unflatten(x))
        if causal:
            return layout.flatten(self._causal(q, k, v, real, None)[0])
        local = self._local(q, k, v, real, causal=False)
        mean = token_mean(layout.flatten(local if self.dissect else v), mask)[:, None]
        return layout.flatten(self._output(q, mean, local))

    def mix_context(self, x: Tensor, grid: Grid, context: Tensor, source: Grid, mask: Tensor | None) -> Tensor:
        return self.read_source(x, grid, self.summarize_source(context, source, mask), source)

    def summarize_source(self, context: Tensor, source: Grid, mask: Tensor | None) -> tuple[Tensor]:
        self._check(context)
        # the mean of the values is the value of the mean
        mean = token_mean(context, mask).to(context.dtype)
        return (self._split(self.v_proj(mean))[:, None],)

    def read_source(self, x: Tensor, grid: Grid, summary: tuple[Any, ...], source: Grid) -> Tensor:
        return self._output(self._split(self.q_proj(x)), *summary)

    def _check(self, source: Tensor) -> None:
        if source.shape[-1] != self.v_proj.in_features:
            raise ValueError(f"tokens of {source.shape[-1]} channels: expected {self.v_proj.in_features}")

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, self.head_dim))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v (batch, *grid, heads, head_dim); without the local branch k is v."""
        q, v = self._split(self.q_proj(x)), self._split(self.v_proj(x))
        return q, v if self.k_proj is None else self._split(self.k_proj(x)), v

    def _local(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        ndim = q.ndim - 3
        tables = list(self.bias) if isinstance(self.window, tuple) else [*self.bias] * ndim
        return local_attention(q, k, v, self.windows(ndim) or 1, tables, mask=mask, causal=causal)

    def _causal(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sums: WindowSums | None
    ) -> tuple[Tensor, WindowSums]:
        """Mix q causally. k, v and mask may begin with earlier frames; `sums`: of all before q."""
        windows = self.windows(q.ndim - 3)
        local = None if windows is None else self._local(q, k, v, mask, causal=True)
        shape = (*q.shape[:2], Grid(q.shape[2:-2]).length)
        real = None if mask is None else mask[:, mask.shape[1] - q.shape[1] :].reshape(shape)
        features, window = v[:, v.shape[1] - q.shape[1] :], None
        if windows is not None and local is not None and self.dissect:
            features, window = local, windows[0]
        features = features.reshape(*shape, *q.shape[-2:])
        means, sums = past_means(features, window, mask=real, past=sums)
        return self._output(q, means, local), sums

    def _output(self, q: Tensor, mean: Tensor, local: Tensor | None = None) -> Tensor:
        h = amounts(self.basis, mean)
        y = memory_read(q.flatten(1, -3), self.basis, h).reshape(q.shape)
        return self.o_proj((y if local is None else (local + y) / 2).flatten(-2))

    def init_state(self, batch: int, device: Device = None, space: Space = ()) -> LAVOState:
        weight, frames = self.q_proj.weight, (self.windows(1 + len(space)) or (1,))[0] - 1
        size = (self.heads, self.head_dim)
        tail = torch.zeros(batch, frames, *space, *size, dtype=weight.dtype, device=device)
        total = torch.zeros(batch, *size, dtype=accumulator(weight), device=device)
        count = torch.zeros(batch, dtype=torch.int64, device=device)
        return LAVOState(tail, tail, total, total, count)

    def step(self, x: Tensor, grid: Grid, state: LAVOState) -> tuple[Tensor, LAVOState]:
        self._check(x)
        q, k, v = self._project(grid.unflatten(x))
        k, v, real, tail = append_frames(state.keys, state.values, state.frames, k, v)
        y, sums = self._causal(q, k, v, real, WindowSums(*state[2:]))
        return grid.flatten(y), LAVOState(*tail, *sums)
