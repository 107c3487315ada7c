"""LightNet attention as a layer (LightNet, Eq. 5 and 6): linear cost on a grid of any number of
axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet.layout import Grid, Ragged
from ndlightnet.nn.constants import Constants
from ndlightnet.nn.heads import default_heads, split_heads
from ndlightnet.nn.mixers.mixer import Mixer, check_axes, check_source, drawn_like
from ndlightnet.nn.position import MDLRPE
from ndlightnet.ops import (
    attention_step,
    axis_causal_attention,
    global_attention,
    norm_gate,
    read,
    summarize,
    supported,
)  # fmt: skip
from ndlightnet.ops.dispatch import Impl
from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.lightnet.state import State
from ndlightnet.ops.position import Kind, Position


class LightNetAttention(Constants, Mixer):
    """o = o_proj(norm(merge heads SiLU(q) . M) * sigmoid(low-rank gate)),  M = softmax(k over
    tokens)^T v.

    Args:
        dim: channels of a token.
        heads: default: one per 64 channels. Head dim = dim / heads.
        context_dim: channels of the source in the cross form; default `dim`.
        lrpe: position code of every layer, "cosine", "rotary" (global form only) or None.
        learn_theta: angles learnt (one factor per head and slot) or fixed.
        gate_rank: rank of the output gate; default the head dim.
        bias: biases in the projections.
        window: causal form: a frame (a step of the first axis) sees the last `window` frames,
            itself included. Default: all before it.
        forget: causal form: what lies a frame back weighs exp(-forget), two frames exp(-2 forget);
            a number, or one per head.
        impl: "auto", "torch", "triton" or "reference"; see ndlightnet.ops.

    Parameters: 4 dim^2 + 2 gate_rank dim + 3 dim (with learnt cosine angles, without biases).
    """

    def __init__(
        self,
        dim: int,
        heads: int | None = None,
        *,
        context_dim: int | None = None,
        lrpe: Kind | None = "cosine",
        learn_theta: bool = True,
        gate_rank: int | None = None,
        bias: bool = False,
        window: int | None = None,
        forget: float | Sequence[float] = 0.0,
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        if window is not None and window < 1:
            raise ValueError(f"window={window}: expected 1 or more frames, or None")
        self.window = window
        self.heads, self.head_dim = default_heads(dim, heads)
        rates = [forget] * self.heads if isinstance(forget, int | float) else list(forget)
        if len(rates) != self.heads or not all(0 <= rate < float("inf") for rate in rates):
            raise ValueError(
                f"forget={forget}: expected a finite number, 0 or more, or {self.heads} of them, "
                "one per head"
            )
        self.fades = any(rates)
        self.forget: float | Tensor
        self.rates = None if isinstance(forget, int | float) else rates
        if isinstance(forget, int | float):
            self.forget = float(forget)
        self.register_constants()
        self.impl = impl
        source = context_dim or dim
        rank = gate_rank or self.head_dim
        self.q_proj = nn.Linear(dim, dim, bias=bias)
        self.k_proj = nn.Linear(source, dim, bias=bias)
        self.v_proj = nn.Linear(source, dim, bias=bias)
        # the sigmoid is in norm_gate
        self.gate = nn.Sequential(nn.Linear(dim, rank, bias=bias), nn.Linear(rank, dim, bias=bias))
        self.lrpe = MDLRPE(self.heads, self.head_dim, lrpe, learn_theta) if lrpe else None
        # float32 statistics and a small eps: the variance of the read falls like 1 / length
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.o_proj = nn.Linear(dim, dim, bias=bias)

    def constants(self) -> dict[str, Tensor]:
        return {} if self.rates is None else {"forget": torch.tensor(self.rates)}

    def forward(
        self,
        x: Tensor,
        *,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
        layout: Ragged | None = None,
    ) -> Tensor:
        """Tokens (batch, *grid, dim) -> same shape.

        context: a source (batch, *its grid, context_dim) to read instead of x; its grid may have
        another shape but, with lrpe, as many axes. mask: bool over the source's tokens (batch,
        *grid), False = padding, which is not read. causal: along the first axis; a token sees its
        own frame and those before it (with one axis: the tokens before it). Without context.
        layout: of samples end to end; then x is (length, dim), mask (length,), without context.
        """
        if not causal and (self.window is not None or self.fades):
            raise ValueError(
                f"causal=False with window={self.window}, forget={self.forget}: a frame before "
                "another one is what they are about, expected causal=True"
            )
        check_source(context, causal, layout)
        if layout is not None:
            return self._packed(x, layout, mask, causal)
        grid = Grid.of(x)
        source = x if context is None else context
        source_grid = Grid.of(source)
        if self.lrpe:
            check_axes(grid, source_grid, "; use lrpe=None")
        mask = source_grid.flatten_mask(mask)
        place = self.lrpe(grid.shape) if self.lrpe else None
        q = split_heads(self.q_proj(x), self.heads, grid)
        k = split_heads(self.k_proj(source), self.heads, source_grid)
        v = split_heads(self.v_proj(source), self.heads, source_grid)
        if causal:
            y, _ = self._causal(q, k, v, grid, mask, place, None)
        elif context is None:
            y = global_attention(q, k, v, mask=mask, lrpe=place, impl=self.impl)
        else:
            source_place = self.lrpe(source_grid.shape) if self.lrpe else None
            state = summarize(k, v, mask=mask, lrpe=source_place, impl=self.impl)
            y = read(q, state, lrpe=place, impl=self.impl)
        return self._output(x, grid.unflatten(y.flatten(2)))

    def _packed(self, x: Tensor, layout: Ragged, mask: Tensor | None, causal: bool) -> Tensor:
        q, k, v = (
            proj(x[None]).unflatten(-1, (self.heads, self.head_dim))
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        place = self.lrpe(layout.shapes[0]) if self.lrpe else None
        how: Any = {"mask": None if mask is None else mask[None], "lrpe": place, "impl": self.impl}
        if causal:
            self._refuse_rotary()
            how |= {"window": self.window, "forget": self.forget}
            y = axis_causal_attention(q, k, v, layout, **how)[0]
        else:
            y = global_attention(q, k, v, layout=layout, **how)
        return self._output(x, y[0].flatten(1))

    def _causal(
        self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, mask: Tensor | None,
        place: Position | None, state: State | None,
    ) -> tuple[Tensor, State]:  # fmt: skip
        self._refuse_rotary()
        return axis_causal_attention(
            q, k, v, grid.shape[0], mask=mask, lrpe=place, state=state, window=self.window,
            forget=self.forget, impl=self.impl,
        )  # fmt: skip

    def _refuse_rotary(self) -> None:
        if self.lrpe and self.lrpe.kind == "rotary":
            raise ValueError(
                "causal=True with lrpe='rotary': a pair's channels decay differently, so scores "
                "would depend on absolute position; use 'cosine' or None"
            )

    def implementation(self, x: Tensor, causal: bool = False) -> str:
        if self.impl != "auto":
            return self.impl
        operation = "axis_causal_attention" if causal else "global_attention"
        place = self.lrpe(Grid.of(x).shape) if self.lrpe else None
        drawn = drawn_like(x, 0, self.heads, self.head_dim)
        support = supported(operation, drawn, lrpe=place)
        return "triton" if x.is_cuda and support else f"torch ({support.reason})"

    def _output(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.gate(x)
        y = norm_gate(y, logits, self.norm.weight, self.norm.bias, self.norm.eps, self.impl)
        out: Tensor = self.o_proj(y)
        return out

    def init_state(
        self, batch: int, device: torch.device | str | None = None, space: tuple[int, ...] = ()
    ) -> State:
        """The State before the first frame, of any shape."""
        dim, dtype = self.head_dim, accumulator(self.q_proj.weight)
        empty = State.empty(
            batch, self.heads, dim, dim, self.lrpe is not None, dtype=dtype, device=device
        )
        if self.window is None:
            return empty
        return State(*(torch.stack([x], 1).repeat_interleave(self.window - 1, 1) for x in empty))

    def advance(self, x: Tensor, state: State, position: int | Tensor) -> tuple[Tensor, State]:
        """The next frames (batch, frames, *space, dim) of the causal form; `position`: how many
        came before, one number or (batch,) of them."""
        self._refuse_rotary()
        grid = Grid.of(x)
        q, k, v = (
            split_heads(proj(x), self.heads, grid)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        start = (position, *[0] * (grid.ndim - 1))
        place = self.lrpe(grid.shape, start) if self.lrpe else None
        if grid.length == 1 and self.window is None and not self.fades:
            y, state = attention_step(q[:, 0], k[:, 0], v[:, 0], state, lrpe=place, impl=self.impl)
        else:
            y, state = self._causal(q, k, v, grid, None, place, state)
        return self._output(x, y.reshape(x.shape)), state
