"""Networks of fewer axes for series over time: every frame by itself, or frames as channels. What a
series gains from a network that has time for an axis is measured against them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class FrameByFrame(nn.Module):
    """A network of dense prediction that maps each frame (step of the first axis) by itself.

    net: maps (batch, channels, *space) to (batch, classes, *space), or in training to a list of such on coarser grids.
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
        return [level.unflatten(0, frames.shape[:2]).transpose(1, 2) for level in y]


class FramesAsChannels(nn.Module):
    """A network of dense prediction that maps all frames (steps of the first axis) at once, as
    channels: the number of frames is fixed.

    net: maps (batch, channels * frames, *space) to (batch, classes * frames, *space).
    """

    def __init__(self, net: nn.Module, frames: int) -> None:
        super().__init__()
        self.net, self.frames = net, frames

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, frames, *space) to (batch, classes, frames, *space)."""
        if x.shape[2] != self.frames:
            raise ValueError(
                f"input of shape {tuple(x.shape)}: expected {self.frames} frames, as many as the "
                "network has channels for"
            )
        y: Tensor = self.net(x.flatten(1, 2))
        return y.unflatten(1, (-1, self.frames))
