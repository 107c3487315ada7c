"""Convolutional layers of a U-Net, on the axes that torch has convolutions for (one to three).

Features are (batch, channels, *space). For the gradient a block keeps what its convolutions of kernel
size 3 return: what is normalised, its output too, is computed again by the convolutions that read it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet.layout import Grid
from ndlightnet.layout.abstract import exporting
from ndlightnet.nn import slabs
from ndlightnet.nn.layers import GridLayer
from ndlightnet.nn.stem import torch_layer
from ndlightnet.ops.instance_norm import instance_norm, instance_norm_silu, instance_norm_silu_, kernel_runs
from ndlightnet.ops.recompute import dropped
from ndlightnet.parallel import add_planes


def _conv(kind: str, dims: int) -> Any:
    return torch_layer(kind, dims, "separable=False")


class NormSiLU(nn.GroupNorm):
    """Instance normalisation, then SiLU: on any number of axes, also of a single cell, which
    torch's InstanceNorm refuses."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels)

    def forward(self, x: Tensor, residual: Tensor | None = None, layout: Grid | None = None) -> Tensor:
        """layout: as in `instance_norm_silu`."""
        return instance_norm_silu(x, self.weight, self.bias, residual, self.eps, layout=layout)

    def overwritten(self, x: Tensor, residual: Tensor | None = None, layout: Grid | None = None) -> Tensor:
        """Return the same without a gradient, in the place of x if a kernel runs."""
        if not kernel_runs(x):
            return self(x, residual, layout)
        return instance_norm_silu_(x, self.weight, self.bias, residual, self.eps, layout)

    def norm(self, x: Tensor, layout: Grid | None = None) -> Tensor:
        """Normalise alone."""
        return instance_norm(x, self.weight, self.bias, self.eps, layout)


class ConvBlock(GridLayer):
    """Two convolutions of kernel size 3 with a residual."""

    def __init__(self, dims: int, inputs: int, outputs: int) -> None:
        super().__init__()
        conv = _conv("Conv", dims)
        self.conv1 = conv(inputs, outputs, 3, padding=1, bias=False)
        self.norm1 = NormSiLU(outputs)
        self.conv2 = conv(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = NormSiLU(outputs)
        self.skip = nn.Identity() if inputs == outputs else conv(inputs, outputs, 1, bias=False)

    def forward(self, x: Tensor, layout: Grid | None = None) -> Tensor:
        layers = self.conv1, self.norm1, self.conv2, self.norm2
        if torch.is_grad_enabled() or any(m._forward_hooks or m._forward_pre_hooks for m in layers):
            return self.recomputed(self._forward, x, layout)
        # Whole volumes are large: what a convolution returns is overwritten, or freed before the next one runs.
        y = self.norm1.overwritten(_convolve(self.conv1, x, layout), layout=layout)
        y = _convolve(self.conv2, y, layout)
        if kernel_runs(y):
            return self.norm2.overwritten(y, _convolve(self.skip, x), layout)
        y = self.norm2.norm(y, layout)
        y += _convolve(self.skip, x)
        return nn.functional.silu(y, inplace=True)

    def _forward(self, x: Tensor, layout: Grid | None) -> Tensor:
        y = self.norm1(_convolve(self.conv1, x, layout), layout=layout)
        y = _convolve(self.conv2, y, layout)
        return self.norm2(y, _convolve(self.skip, x), layout)


def _convolve(conv: Any, x: Tensor, layout: Grid | None = None) -> Tensor:
    """Apply a convolution without bias. onnxscript 0.7.2 writes a bias of two axes where a Conv3d
    has none, which no runtime accepts: an exported graph gets zeros."""
    if exporting() and isinstance(conv, nn.Conv3d):
        return conv._conv_forward(x, conv.weight, x.new_zeros(conv.out_channels))
    if layout is not None and layout.axis is not None:
        return _convolve_slab(conv, x, layout, 2 + layout.axis)
    return conv(x)


def _convolve_slab(conv: Any, x: Tensor, layout: Grid, dim: int) -> Tensor:
    """Apply a convolution of kernel size 3 to a slab: that of the slab alone, and what the planes
    beside it add to its first and last plane along the dimension `dim` of x."""
    edged, received = layout.halo(x, dim, 1, 1)
    first, last = received()  # before conv: within predict_large it may have to begin again
    with dropped(x):  # the same numbers
        y = conv(edged)
    apply = slabs.conv3d if x.ndim == 5 else getattr(nn.functional, f"conv{x.ndim - 2}d")
    padding = [int(axis != dim) for axis in range(2, x.ndim)]

    def added(plane: Tensor, tap: int) -> Tensor:
        if plane.numel() == 0:
            return plane.sum(1, keepdim=True).expand(-1, y.shape[1], *plane.shape[2:])
        weight = conv.weight.narrow(dim, tap, 1)
        return apply(plane, weight, None, [1] * len(padding), padding)

    return add_planes(y, added(first, 0), added(last, 2), dim)


class Convolutional:
    """The layers of a U-Net from torch's convolutions and instance norm."""

    channel_axis = 1

    def __init__(self, dims: int) -> None:
        self.dims, self.conv, self.conv_up = dims, _conv("Conv", dims), _conv("ConvTranspose", dims)

    def level(
        self, inputs: int, width: int, step: tuple[int, ...] | None, count: int
    ) -> tuple[nn.Module, list[nn.Module]]:
        """Return the downsampling to a level of the encoder (step None: the first), its blocks."""
        down = self.conv(inputs, width, step, stride=step) if step else nn.Identity()
        widths = [width if step else inputs, *[width] * count][:count]
        return down, [ConvBlock(self.dims, n, width) for n in widths]

    def up(self, low: int, high: int, step: tuple[int, ...]) -> nn.Module:
        return self.conv_up(low, high, step, stride=step)

    def decoder(self, inputs: int, width: int) -> nn.Module:
        return ConvBlock(self.dims, inputs, width)

    def head(self, width: int, outputs: int) -> nn.Module:
        return self.conv(width, outputs, 1)
