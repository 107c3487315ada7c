"""CrossBlock: a block that also reads another source, at once or, causally, step by step."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ndlightnet.layout import Grid
from ndlightnet.nn.block import Block
from ndlightnet.nn.mixers import LightNetAttention
from ndlightnet.nn.mixers.base import Factory, reads_context, streaming


class CrossState(NamedTuple):
    """State of a block after the tokens so far, with a row for each sample."""

    memory: Any  # of the mixer; of one that cannot advance, such as softmax attention, the normed tokens so far
    tail: Tensor  # the last normed tokens that the cross attention looks back at, as a short convolution does
    summary: Any  # what the cross attention keeps of the context
    source: Grid  # the grid of the context


class CrossBlock(Block):
    """A Block with cross attention between its mixer and its mlp: x + mixer(norm x), then
    x + cross(norm x, context), then x + mlp(norm x), with dropout of each branch. fixed: `cross` holds also if the
    mixer has no cross form, for which LightNetAttention stands otherwise. causal: of the mixer; `before` and `advance`
    are of the causal form."""

    cross: Any

    def __init__(
        self, dim: int, mixer: Factory, cross: Factory, fixed: bool = True, dropout: float = 0.0, causal: bool = True
    ) -> None:
        super().__init__(dim, mixer, dropout=dropout)
        self.causal = causal
        if not fixed and not reads_context(self.mixer):
            cross = LightNetAttention
        self.norm_cross = nn.LayerNorm(dim, eps=1e-6)
        self.cross = cross(dim)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        context: Tensor,
        context_mask: Tensor | None = None,
        layout: Grid | None = None,
        source: Grid | None = None,
    ) -> Tensor:
        """Map tokens (batch, length, dim) and a context (batch, source length, dim) to tokens. context_mask: bool
        (batch, source length), False = padding. layout, source: of the tokens and of the context; default: one axis."""
        places = {} if layout is None else {"layout": layout}
        x = x + self.dropout(self.mixer(self.norm1(x), causal=self.causal, **places))
        options = {"context": context, "mask": context_mask, "source": source, **places}
        options = {name: value for name, value in options.items() if value is not None}
        x = x + self.dropout(self.cross(self.norm_cross(x), **options))
        return x + self.dropout(self.mlp(self.norm2(x)))

    def before(self, context: Tensor, context_mask: Tensor | None = None) -> CrossState:
        """Return the state before the first token, for `advance`."""
        weight, batch = self.norm1.weight, len(context)

        def tokens(count: int) -> Tensor:
            return torch.zeros(batch, count, *weight.shape, dtype=weight.dtype, device=context.device)

        streams, source = hasattr(self.mixer, "advance"), Grid.of(context)
        memory = self.init_state(batch, context.device) if streams else tokens(0)
        summary = self.cross.summarize_source(context, source, context_mask)
        return CrossState(memory, tokens(getattr(self.cross, "lookback", 0)), summary, source)

    def advance(self, x: Tensor, state: CrossState, position: int | Tensor) -> tuple[Tensor, CrossState]:  # type: ignore[override]
        """Map the next tokens (batch, length, dim) and the state before them to those of `forward` and the state after
        them. position: number of tokens before them, an int or (batch,)."""
        length, (memory, tail, summary, source) = x.shape[1], state
        y = self.norm1(x)
        if hasattr(self.mixer, "advance"):
            y, memory = streaming(self.mixer).advance(y, memory, position)
        else:
            memory = torch.cat([memory, y.to(memory.dtype)], 1)
            y = self.mixer(memory, causal=True)[:, memory.shape[1] - length :]
        x = x + self.dropout(y)
        back = tail.shape[1]
        y = torch.cat([tail, self.norm_cross(x).to(tail.dtype)], 1)
        grid = Grid((y.shape[1],)).after(position - back)
        y, tail = self.cross.read_source(y, grid, summary, source)[:, back:], y[:, length:]
        x = x + self.dropout(y)
        return x + self.dropout(self.mlp(self.norm2(x))), CrossState(memory, tail, summary, source)
