"""torch's convolutions, which go over tensors of 2^31 numbers and more in slabs: for some of these
cuDNN only has kernels that are many times slower for each number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet.ops._once_differentiable import once_differentiable
from ndlightnet.ops.plain import plain

NUMBERS = 2**31  # a slab has fewer


@dataclass(frozen=True)
class _Slab:
    """x, y: first plane and number of planes that are read and written. zeros: planes of padding
    before and after those that are read."""

    x: tuple[int, int]
    y: tuple[int, int]
    zeros: tuple[int, int]


class _InSlabs:
    """A convolution without dilation, or a transposed one whose stride is its kernel. Its slabs lie
    along the first axis. A second derivative of slabs raises RuntimeError; transforms of torch.func
    take the whole."""

    def _slabs(self: Any, x: Tensor) -> list[_Slab]:
        """Return the slabs for x; none: as a whole."""
        grow = self.stride if self.transposed else [1] * (x.ndim - 2)
        kernel, step, pad = self.kernel_size[0], self.stride[0], self.padding[0]
        # not len(x), which is a constant for torch.export: an exported graph takes any size
        widest = max(self.in_channels, self.out_channels * math.prod(grow))
        numbers = x.shape[0] * widest * math.prod(x.shape[2:])
        if plain() or numbers < NUMBERS:
            return []
        size = x.shape[2]
        planes = size if self.transposed else (size + 2 * pad - kernel) // step + 1
        unit = numbers // size * (1 if self.transposed else step)  # numbers of a plane
        halo = 0 if self.transposed else max(0, kernel - step)
        most = max(1, (NUMBERS - 1 - halo * (numbers // size)) // unit)
        each = -(-planes // -(-planes // most))
        found = []
        for start in range(0, planes, each):
            count = min(each, planes - start)
            if self.transposed:
                found.append(_Slab((start, count), (start * step, count * step), (0, 0)))
                continue
            first, end = start * step - pad, (start + count - 1) * step - pad + kernel
            inside = max(0, first), min(size, end)
            zeros = inside[0] - first, end - inside[1]
            found.append(_Slab((inside[0], inside[1] - inside[0]), (start, count), zeros))
        return found

    def _made(self: Any, x: Tensor, slabs: Sequence[_Slab]) -> Tensor:
        kind = x.device.type
        inputs = [x, self.weight, self.bias]
        if torch.is_autocast_enabled(kind):
            to = torch.get_autocast_dtype(kind)
            inputs = [None if t is None else t.to(to) for t in inputs]
        padding = [0, *self.padding[1:]]
        how = self.stride, padding, self.dilation, self.transposed, self.output_padding, self.groups
        out: Tensor = _Convolve.apply(slabs, how, *inputs)
        return out


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, slabs: Sequence[_Slab], how: Any, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.slabs, ctx.how, ctx.bias = slabs, how, None if bias is None else [len(bias)]
        y, planes = None, sum(slab.y[1] for slab in slabs)
        for slab in slabs:
            part = torch.convolution(_read(x, slab), weight, bias, *how)
            if y is None:
                y = part.new_empty((*part.shape[:2], planes, *part.shape[3:]))
            y.narrow(2, *slab.y).copy_(part)
        assert y is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[2:])
        dx = torch.zeros_like(x) if needed[0] else None
        sums: list[Tensor | None] = [None, None]  # gradients of weight and bias, float32 or wider
        for slab in ctx.slabs:
            found = torch.ops.aten.convolution_backward(
                dy.narrow(2, *slab.y), _read(x, slab), weight, ctx.bias, *ctx.how, needed
            )
            if dx is not None:
                dx.narrow(2, *slab.x).add_(found[0].narrow(2, slab.zeros[0], slab.x[1]))
            for at, part in enumerate(found[1:]):
                if needed[1 + at]:
                    part = part.to(torch.promote_types(part.dtype, torch.float32))
                    before = sums[at]
                    sums[at] = part if before is None else before + part
        return None, None, dx, *[None if g is None else g.to(weight.dtype) for g in sums]


def _read(x: Tensor, slab: _Slab) -> Tensor:
    part = x.narrow(2, *slab.x)
    return nn.functional.pad(part, (0, 0) * (x.ndim - 3) + slab.zeros) if any(slab.zeros) else part


class _Conv(_InSlabs):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        slabs = self._slabs(input)
        if slabs:
            return self._made(input, slabs)
        out: Tensor = super()._conv_forward(input, weight, bias)  # type: ignore[misc]
        return out


class _ConvTranspose(_InSlabs):
    def forward(self, input: Tensor, output_size: Any = None) -> Tensor:
        slabs = self._slabs(input)
        if slabs:
            return self._made(input, slabs)
        out: Tensor = super().forward(input, output_size)  # type: ignore[misc]
        return out


class Conv1d(_Conv, nn.Conv1d):
    pass


class Conv2d(_Conv, nn.Conv2d):
    pass


class Conv3d(_Conv, nn.Conv3d):
    pass


class ConvTranspose1d(_ConvTranspose, nn.ConvTranspose1d):
    pass


class ConvTranspose2d(_ConvTranspose, nn.ConvTranspose2d):
    pass


class ConvTranspose3d(_ConvTranspose, nn.ConvTranspose3d):
    pass
