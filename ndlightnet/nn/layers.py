"""Layers that see more than one cell, and sequences of layers with some of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ndlightnet.layout import Grid
from ndlightnet.nn.initial import Initialized


class GridLayer(Initialized):
    """A layer that is called with the layout of its input: None, or a Slab within `shard_grid`."""

    grad_checkpointing = False

    def recomputed(self, function: Any, *inputs: Any) -> Tensor:
        """Call a function, whose activations are computed again in the backward pass with
        `grad_checkpointing`."""
        if self.grad_checkpointing and self.training:
            out: Tensor = checkpoint(function, *inputs, use_reentrant=False)
            return out
        result: Tensor = function(*inputs)
        return result


class Layers(Initialized, nn.Sequential):
    """Layers one after the other; those on a grid get its layout."""

    def forward(self, x: Tensor, layout: Grid | None = None) -> Tensor:
        for layer in self:
            x = layer(x, layout) if isinstance(layer, GridLayer) else layer(x)
        return x
