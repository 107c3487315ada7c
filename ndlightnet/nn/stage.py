"""Stage: LightNet blocks on a feature map."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ndlightnet.layout import Grid
from ndlightnet.nn.block import Block
from ndlightnet.nn.initial import Initialized
from ndlightnet.nn.mixers.base import Factory
from ndlightnet.nn.position import MDTPE


class Stage(Initialized):
    """LightNet blocks on a feature map: position code, then the blocks."""

    def __init__(
        self,
        dims: int,
        dim: int,
        factories: Sequence[Factory],
        mlp_ratio: float,
        tpe: bool,
        drop_path: float,
        channel_axis: int = 1,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.channel_axis, self.causal = channel_axis, causal
        self.tpe = MDTPE(dims, dim, causal=causal) if tpe and factories else None
        self.blocks = nn.ModuleList(Block(dim, one, mlp_ratio, drop_path) for one in factories)
        self.grad_checkpointing = False

    def forward(self, x: Tensor, layout: Grid | None = None) -> Tensor:
        return self._on_tokens(self._layers(), x, layout)

    def _layers(self) -> list[Any]:
        """Return the layers as functions of tokens (batch, length, dim) and their layout."""
        blocks = [partial(self._block, block) for block in self.blocks]
        return blocks if self.tpe is None else [partial(_encode, self.tpe), *blocks]

    def layers(self) -> list[Any]:
        """Return the layers as functions of features and their layout."""
        return [partial(self._on_tokens, [layer]) for layer in self._layers()]

    def _on_tokens(self, layers: Sequence[Any], x: Tensor, layout: Grid | None) -> Tensor:
        if not layers:
            return x
        x = x.movedim(self.channel_axis, -1)
        grid = layout or Grid.of(x)
        tokens = grid.flatten(x)
        for layer in layers:
            tokens = layer(tokens, grid)
        return grid.unflatten(tokens).movedim(-1, self.channel_axis)

    def _block(self, block: nn.Module, tokens: Tensor, grid: Grid) -> Tensor:
        if self.grad_checkpointing and self.training:
            run: Any = partial(checkpoint, block, use_reentrant=False)
        else:
            run = block
        out: Tensor = run(tokens, causal=self.causal, layout=grid)
        return out


def _encode(tpe: MDTPE, tokens: Tensor, grid: Grid) -> Tensor:
    out: Tensor = tpe(tokens, layout=grid)
    return out
