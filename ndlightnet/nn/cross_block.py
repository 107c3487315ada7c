"""CrossBlock: a causal block that also reads another source, at once or step by step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet.layout import Grid
from ndlightnet.nn.block import Block
from ndlightnet.nn.initial import Device, Space
from ndlightnet.nn.mixers import LightNetAttention
from ndlightnet.nn.mixers.base import Factory, Mixer, reads_context


class CrossBlock(Block):
    """A causal Block with cross attention between its mixer and its mlp: x + mixer(norm x), then
    x + cross(norm x, context), then x + mlp(norm x), with dropout of each branch. fixed: `cross` holds also if the
    mixer has no cross form, for which LightNetAttention stands otherwise."""

    def __init__(self, dim: int, mixer: Factory, cross: Factory, fixed: bool = True, dropout: float = 0.0) -> None:
        super().__init__(dim, mixer, dropout=dropout)
        if not fixed and not reads_context(self.mixer):
            cross = LightNetAttention
        self.norm_cross = nn.LayerNorm(dim, eps=1e-6)
        self.cross = cross(dim)

    def forward(  # type: ignore[override]
        self, x: Tensor, context: Tensor, context_mask: Tensor | None = None
    ) -> Tensor:
        """Map tokens (batch, length, dim) and a context (batch, source length, dim) to tokens. context_mask: bool
        (batch, source length), False = padding."""
        x = x + self.dropout(self.mixer(self.norm1(x), causal=True))
        x = x + self.dropout(self._read(self.norm_cross(x), context, context_mask))
        return x + self.dropout(self.mlp(self.norm2(x)))

    def _read(self, x: Tensor, context: Tensor, mask: Tensor | None, layout: Grid | None = None) -> Tensor:
        options: dict[str, Any] = {"context": context} if mask is None else {"context": context, "mask": mask}
        if layout is not None and isinstance(self.cross, Mixer):
            options["layout"] = layout
        y: Tensor = self.cross(x, **options)
        return y

    def init_state(self, batch: int, device: Device = None, space: Space = ()) -> tuple[Any, Tensor]:
        """Return the state before the first token, for `advance`: that of the mixer, or the normed tokens so far of one
        that cannot advance, such as softmax attention; and the last tokens that the cross attention looks back at, as
        those with a short convolution do."""
        weight = self.norm1.weight

        def tokens(count: int) -> Tensor:
            return torch.zeros(batch, count, *weight.shape, dtype=weight.dtype, device=device)

        state = super().init_state(batch, device, space) if hasattr(self.mixer, "advance") else tokens(0)
        return state, tokens(getattr(self.cross, "lookback", 0))

    def advance(  # type: ignore[override]
        self, x: Tensor, state: Any, position: int | Tensor, context: Tensor, context_mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Map the next tokens (batch, length, dim) and the state before them to those of `forward` and the state after
        them. position: number of tokens before them, an int or (batch,)."""
        length, (memory, tail) = x.shape[1], state
        y = self.norm1(x)
        if hasattr(self.mixer, "advance"):
            y, memory = self.mixer.advance(y, memory, position)
        else:
            memory = torch.cat([memory, y.to(memory.dtype)], 1)
            y = self.mixer(memory, causal=True)[:, -length:]
        x = x + self.dropout(y)
        back = tail.shape[1]
        y = torch.cat([tail, self.norm_cross(x).to(tail.dtype)], 1)
        tail = y[:, length:]
        layout = Grid((y.shape[1],)).after(position - back)
        x = x + self.dropout(self._read(y, context, context_mask, layout)[:, back:])
        return x + self.dropout(self.mlp(self.norm2(x))), (memory, tail)
