"""Convolutional layers of a U-Net, on the axes that torch has convolutions for (one to three).

Features are (batch, channels, *space). For the gradient a block keeps what its convolutions return
and its output: what lies between is computed again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ndlightnet.layout import Grid
from ndlightnet.nn import slabs
from ndlightnet.nn.layers import GridLayer
from ndlightnet.nn.stem import torch_layer
from ndlightnet.ops.instance_norm import instance_norm, instance_norm_silu, instance_norm_silu_, kernel_runs
from ndlightnet.ops.plain import plain
from ndlightnet.parallel import add_planes


def _conv(kind: str, dims: int) -> Any:
    return torch_layer(kind, dims, "separable=False")


class NormSiLU(nn.GroupNorm):
    """Instance normalisation, then SiLU: on any number of axes, also of a single cell, which
    torch's InstanceNorm refuses."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, layout: Grid | None = None, statistics: Any = None
    ) -> Tensor:
        """layout, statistics: as in `instance_norm_silu`."""
        options: Any = {"layout": layout, "statistics": statistics}
        return instance_norm_silu(x, self.weight, self.bias, residual, self.eps, **options)

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
        y = _convolve(self.conv1, x, layout)
        y = _convolve_norm(self.conv2, self.norm1, y, layout)
        return self.norm2(y, _convolve(self.skip, x), layout)


def _convolve(conv: Any, x: Tensor, layout: Grid | None = None) -> Tensor:
    """Apply a convolution without bias. onnxscript 0.7.2 writes a bias of two axes where a Conv3d
    has none, which no runtime accepts: an exported graph gets zeros."""
    if torch.compiler.is_exporting() and isinstance(conv, nn.Conv3d):
        return conv._conv_forward(x, conv.weight, x.new_zeros(conv.out_channels))
    if layout is not None and layout.axis is not None:
        return _convolve_slab(conv, x, layout, 2 + layout.axis)
    return conv(x)


def _convolve_slab(conv: Any, x: Tensor, layout: Grid, dim: int) -> Tensor:
    """Apply a convolution of kernel size 3 to a slab: that of the slab alone, and what the planes
    beside it add to its first and last plane along the dimension `dim` of x."""
    x, received = layout.halo(x, dim, 1, 1)
    first, last = received()  # before conv: within predict_large it may have to begin again
    y = conv(x)
    apply = slabs.conv3d if x.ndim == 5 else getattr(nn.functional, f"conv{x.ndim - 2}d")
    padding = [int(axis != dim) for axis in range(2, x.ndim)]

    def added(plane: Tensor, tap: int) -> Tensor:
        if plane.numel() == 0:
            return plane.sum(1, keepdim=True).expand(-1, y.shape[1], *plane.shape[2:])
        weight = conv.weight.narrow(dim, tap, 1)
        return apply(plane, weight, None, [1] * len(padding), padding)

    return add_planes(y, added(first, 0), added(last, 2), dim)


def _convolve_norm(conv: nn.Module, norm: NormSiLU, x: Tensor, layout: Grid | None = None) -> Tensor:
    """Return conv(norm(x)), where the convolution keeps x for its gradient, as the norm does, and
    not norm(x), a memory-bound pass that is made again (and calls the norm's hooks again)."""
    statistics: list[Any] = []
    y = norm(x, layout=layout, statistics=statistics)
    if not (torch.is_grad_enabled() and _may_hook()):
        return _convolve(conv, y, layout)
    x, result = x.detach(), (y.data_ptr(), y.shape, y._version)
    inputs = (x, *norm.parameters())
    before = _versions(*inputs)

    def pack(saved: Tensor) -> tuple[Tensor | None, tuple[int, ...]]:
        if (saved.data_ptr(), saved.shape, saved._version) == result:
            return None, before
        return saved, _versions(saved)

    def unpack(packed: tuple[Tensor | None, tuple[int, ...]]) -> Tensor:
        saved, versions = packed
        if _versions(*inputs if saved is None else (saved,)) != versions:  # as torch says otherwise
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation, in {norm} or what follows it"
            )
        if saved is not None:
            return saved
        with torch.no_grad():
            detached = [tuple(sums.detach() for sums in one) for one in statistics]
            return norm(x, layout=layout, statistics=detached)

    with saved_tensors_hooks(pack, unpack):
        return _convolve(conv, y, layout)


def _may_hook() -> bool:
    """Return whether to say what is kept: hooks of others (checkpointing, offloading) decide
    before, and torch.compile by itself."""
    if torch.compiler.is_compiling() or plain():
        return False
    autograd: Any = torch._C._autograd
    if autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
        return False
    return autograd._top_saved_tensors_default_hooks(False) is None


def _versions(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(x._version for x in tensors)


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
