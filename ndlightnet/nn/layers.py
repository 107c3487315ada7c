"""Layers that see more than one cell, and sequences of layers with some of them."""

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
from ndlightnet.nn.position import TPE, build_tpe


class GridLayer(Initialized):
    """A layer that is called with the layout of its input: None, or a Slab within `shard_grid`."""

    grad_checkpointing = False

    def recomputed(self, function: Any, *inputs: Any, **options: Any) -> Tensor:
        """Call a function, whose activations are computed again in the backward pass with `grad_checkpointing`."""
        if self.grad_checkpointing and self.training:
            return checkpoint(function, *inputs, use_reentrant=False, **options)
        return function(*inputs, **options)


class Layers(Initialized, nn.Sequential):
    """Layers one after the other; those on a grid get its layout."""

    def forward(self, x: Tensor, layout: Grid | None = None) -> Tensor:
        for layer in self:
            x = layer(x, layout) if isinstance(layer, GridLayer) else layer(x)
        return x


class Stage(GridLayer):
    """LightNet blocks on a feature map: position code, then the blocks."""

    def __init__(
        self, dims: int, dim: int, factories: Sequence[Factory], tpe: TPE, drop_path: float, axis: int, causal: bool
    ) -> None:
        super().__init__()
        self.channel_axis, self.causal = axis, causal
        self.tpe = build_tpe(tpe, dims, dim, causal=causal) if factories else None
        self.blocks = nn.ModuleList(Block(dim, factory, drop_path) for factory in factories)

    def forward(self, x: Tensor, layout: Grid | None = None) -> Tensor:
        return self._on_tokens(self._layers(), x, layout)

    def _layers(self) -> list[Any]:
        """Return the layers as functions of tokens (batch, length, dim) and their layout."""
        layers: list[Any] = [partial(self._block, block) for block in self.blocks]
        if (tpe := self.tpe) is not None:
            layers.insert(0, lambda tokens, grid: tpe(tokens, layout=grid))
        return layers

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
        return self.recomputed(block, tokens, causal=self.causal, layout=grid)
