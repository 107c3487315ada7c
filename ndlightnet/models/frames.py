"""A network of fewer axes for series over time: every frame by itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class FrameByFrame(nn.Module):
    """A network of dense prediction that maps each frame (step of the first axis) by itself: what a
    series gains from a network that sees its frames together is measured against this one.

    net: maps (batch, channels, *space) to (batch, classes, *space), or in training to a list of
    such on coarser grids.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        for name in ("in_channels", "out_channels"):
            if hasattr(net, name):
                setattr(self, name, getattr(net, name))
        dims: Any = getattr(net, "dims", None)
        self.dims = None if dims is None else dims + 1

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        """Map (batch, channels, frames, *space) to (batch, classes, frames, *space), or a list."""
        frames = x.transpose(1, 2)
        y = self.net(frames.flatten(0, 1))
        if isinstance(y, Tensor):
            return y.unflatten(0, frames.shape[:2]).transpose(1, 2)
        return [part.unflatten(0, frames.shape[:2]).transpose(1, 2) for part in y]
