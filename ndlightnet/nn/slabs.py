"""torch's convolutions, cut where torch has only slow kernels for the whole: tensors of 2^31 numbers
and more are convolved slab by slab (some kernels of cuDNN are many times slower for these), a small
sample of three axes on a CPU as a batch of two halves (without oneDNN it takes up to 17 times as long).
Those of kernel size 1 are matrix products. For the gradient inputs that are `recomputable` are not kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format

from ndlightnet.ops.dtypes import product_dtype
from ndlightnet.ops.plain import plain
from ndlightnet.ops.recompute import dropped, recomputable
from ndlightnet.parallel import split_sizes

NUMBERS = 2**31  # a slab of several planes has fewer
LINES = 20480  # up to so many lines of numbers torch convolves one sample without oneDNN
PRODUCTS = 2**20  # from so many products on, oneDNN gains more than two halves cost
GPUS = ("cuda",)  # where the gradients of a convolution are made one after the other
CELLS = 2**14  # of a product for the gradient of a weight
SAMPLES = 32  # from so many on, products of whole samples fill a GPU


@dataclass(frozen=True)
class _Slab:
    """x, y: first plane and number of planes that are read and written. zeros: planes of padding
    before and after those that are read."""

    x: tuple[int, int]
    y: tuple[int, int]
    zeros: tuple[int, int]


class _InSlabs:
    """A convolution whose slabs lie along the first axis, each of a plane at least. As a whole go:
    dilated ones and those with padding of another kind than zeros; transposed ones whose stride is
    not their kernel; transforms of torch.func."""

    def _by_slabs(self: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return the convolution of x in slabs, or as a product, None if it is to be torch's of the whole."""
        slabs, product = self._slabs(x), self._is_product(x, weight)
        if not (slabs or product or self._by_steps(x)):
            return None
        inputs: list[Any] = [t if t is None else t.to(product_dtype(t)) for t in (x, weight, bias)]  # as autocast does
        padding = [0, *self.padding[1:]] if slabs else self.padding  # `_read` has that along the first axis
        options = self.stride, padding, self.dilation, self.transposed, self.output_padding, self.groups
        y: Tensor = _Convolve.apply(slabs, None if product else options, *inputs)
        return recomputable(y, _Convolve.again, x) if product and bias is None else y

    def _by_steps(self: Any, x: Tensor) -> bool:
        """Return whether gradients are computed one after the other, so that less is alive at a time."""
        if plain() or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return False
        plainly = self.padding_mode == "zeros" and not isinstance(self.padding, str)
        return x.device.type in GPUS and plainly and x.ndim == 2 + len(self.kernel_size) and x.is_contiguous()

    def _is_product(self: Any, x: Tensor, weight: Tensor) -> bool:
        if plain() or self.transposed or self.groups > 1 or x.ndim != 2 + len(self.kernel_size):
            return False
        if x.shape[1] != weight.shape[1] or product_dtype(x) != product_dtype(weight):
            return False  # torch's convolution says what is wrong
        padding = {0} if isinstance(self.padding, str) else set(self.padding)
        return {*self.kernel_size, *self.stride} == {1} and padding == {0} and x.is_contiguous()

    def _slabs(self: Any, x: Tensor) -> list[_Slab]:
        """Return the slabs for x; none: as a whole."""
        axes, padding = len(self.kernel_size), self.padding
        if plain() or x.ndim != 2 + axes or not self._divides():
            return []
        sizes = list(zip(x.shape[2:], self.kernel_size, self.stride, padding, strict=True))
        space = [n * s if self.transposed else (n + 2 * p - k) // s + 1 for n, k, s, p in sizes]
        # of a plane of x and of y; not len(x), which is a constant for torch.export
        read = x.shape[0] * self.in_channels * math.prod(x.shape[3:])
        written = x.shape[0] * self.out_channels * math.prod(space[1:])
        size, kernel, step, pad = sizes[0]
        if max(read * size, written * space[0]) < NUMBERS or min(space) < 1:
            return []
        if self.transposed:
            pieces = _split(size, (NUMBERS - 1) // max(read, written * step))
            return [_Slab((at, n), (at * step, n * step), (0, 0)) for at, n in pieces]
        most = min((NUMBERS - 1) // written, ((NUMBERS - 1) // read - kernel) // step + 1)
        slabs = []
        for at, n in _split(space[0], most):
            first, end = at * step - pad, (at + n - 1) * step - pad + kernel
            # both within the axis, where all that a slab reads is padding
            start, stop = (min(max(0, plane), size) for plane in (first, end))
            before = start - first if stop > start else end - first
            behind = end - first - before - (stop - start)
            slabs.append(_Slab((start, stop - start), (at, n), (before, behind)))
        return slabs

    def _divides(self: Any) -> bool:
        if set(self.dilation) != {1} or self.padding_mode != "zeros" or isinstance(self.padding, str):
            return False
        if not self.transposed:
            return True
        added = (*self.padding, *self.output_padding)
        return tuple(self.kernel_size) == tuple(self.stride) and not any(added)


def _split(planes: int, most: int) -> list[tuple[int, int]]:
    """Return the starts and sizes of pieces of at most `most` planes, or of one."""
    sizes = split_sizes(planes, -(-planes // max(1, most)))
    return list(zip(accumulate(sizes, initial=0), sizes, strict=False))


class _Convolve(torch.autograd.Function):
    """slabs: none for the whole. options: of torch.convolution; None: a product."""

    @staticmethod
    def forward(
        ctx: Any, slabs: Sequence[_Slab], options: Any, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.slabs, ctx.options, ctx.bias = slabs, options, None if bias is None else [len(bias)]
        return _convolved(slabs, options, x, weight, bias)

    @staticmethod
    def again(ctx: Any) -> Tensor:
        x, weight = ctx.saved_tensors
        return _convolved(ctx.slabs, ctx.options, x, weight, None)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[2:])
        if not ctx.slabs:
            inputs = [x]
            del x
            return None, None, *_gradients(dy, inputs, weight, ctx.bias, ctx.options, needed)
        dx, done = torch.empty_like(x) if needed[0] else None, 0
        sums: list[Tensor | None] = [None, None]  # gradients of weight and bias, float32 or wider
        for slab in ctx.slabs:
            inputs = [_read(x, slab)]
            read, *grads = _gradients(dy.narrow(2, *slab.y), inputs, weight, ctx.bias, ctx.options, needed)
            if dx is not None:
                done = _add_planes(dx, done, read.narrow(2, slab.zeros[0], slab.x[1]), slab.x[0])
            for at, grad in enumerate(grads):
                if needed[1 + at]:
                    grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
                    sums[at] = grad if (total := sums[at]) is None else total + grad
            del read, grads
        if dx is not None:
            dx.narrow(2, done, x.shape[2] - done).zero_()
        return None, None, dx, *[None if g is None else g.to(weight.dtype) for g in sums]


def _add_planes(total: Tensor, done: int, planes: Tensor, start: int) -> int:
    """Add planes to `total` from plane `start` on, of which the first `done` are written. Return how many are then."""
    common = min(max(0, done - start), planes.shape[2])
    if start > done:
        total.narrow(2, done, start - done).zero_()
    total.narrow(2, start, common).add_(planes.narrow(2, 0, common))
    stop = start + planes.shape[2]
    total.narrow(2, start + common, stop - start - common).copy_(planes.narrow(2, common, stop - start - common))
    return max(done, stop)


def _convolved(slabs: Sequence[_Slab], options: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not slabs:
        return _convolve(x, weight, bias, options)
    y, planes = None, sum(slab.y[1] for slab in slabs)
    for slab in slabs:
        piece = _convolve(_read(x, slab), weight, bias, options)
        if y is None:
            y = piece.new_empty((*piece.shape[:2], planes, *piece.shape[3:]))
        y.narrow(2, *slab.y).copy_(piece)
        del piece  # before the next one is made
    assert y is not None
    return y


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, options: Any) -> Tensor:
    if options is not None:
        return torch.convolution(x, weight, bias, *options)
    if weight.shape[1] == 1:  # there is nothing to sum, and torch multiplies faster in a convolution
        multiplied: Tensor = getattr(nn.functional, f"conv{x.ndim - 2}d")(x, weight, bias)
        return multiplied
    y = _product(weight.flatten(1), x.flatten(2))
    y = y if bias is None else y.add_(bias[:, None])
    # no view: what a Function returns may be changed in place
    result: Tensor = torch.ops.aten._unsafe_view(y, [*y.shape[:2], *x.shape[2:]])
    return result


def _product(weight: Tensor, cells: Tensor) -> Tensor:
    """Return weight (outputs, inputs) times cells (batch, inputs, length)."""
    if weight.shape[1] == 1:
        return weight * cells
    return torch.bmm(weight.expand(len(cells), -1, -1), cells)


def _gradients(
    dy: Tensor, inputs: list[Tensor], weight: Tensor, bias: Any, options: Any, needed: Sequence[bool]
) -> list[Any]:
    """Return the gradients of x, weight and bias that are needed. inputs: x alone, which may be freed before its
    gradient is made; bias: its size, if there is one."""
    x = inputs.pop()
    shape, (wants_x, wants_weight, wants_bias) = x.shape, needed
    dx = dweight = dbias = None
    if options is None:
        pull, matrix = dy.flatten(2), weight.flatten(1)
        if wants_weight:
            dweight = _sum_products(pull, x.flatten(2)).view_as(weight).to(weight.dtype)
        del x
        dx = _product(matrix.t(), pull).view(shape) if wants_x else None
        return [dx, dweight, pull.sum((0, 2)) if wants_bias else None]
    backward = torch.ops.aten.convolution_backward
    if not torch.compiler.is_compiling():  # whose strict mode reads no layouts
        dy = dy.contiguous(memory_format=suggest_memory_format(x))  # once for both
    if wants_weight or wants_bias:
        _, dweight, dbias = backward(dy, x, weight, bias, *options, [False, wants_weight, wants_bias])
    del x
    if wants_x:  # of x it is a matter of the shape alone
        like = dy.new_empty(1).expand(shape)
        dx = backward(dy, like, weight, bias, *options, [True, False, False])[0]
    return [dx, dweight, dbias]


def _sum_products(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum over the batch and the length n of a (batch, k, n) times b (batch, m, n), float32 or wider: as
    products of `CELLS`, since a product that sums millions of cells to few numbers fills no GPU."""
    chunks = a.shape[2] // CELLS if len(a) < SAMPLES else 0
    whole = chunks * CELLS
    acc = torch.promote_types(a.dtype, torch.float32)
    total = torch.bmm(a[..., whole:], b[..., whole:].mT).sum(0, dtype=acc)
    if not chunks:
        return total
    for row, column in zip(a[..., :whole], b[..., :whole], strict=True):
        left, right = (x.unflatten(1, (chunks, CELLS)).movedim(1, 0) for x in (row, column))
        total = total + torch.bmm(left, right.mT).sum(0, dtype=acc)
    return total


def _read(x: Tensor, slab: _Slab) -> Tensor:
    x = x.narrow(2, *slab.x)
    return nn.functional.pad(x, (0, 0) * (x.ndim - 3) + slab.zeros) if any(slab.zeros) else x


def conv3d(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """Convolve (batch, channels, *space) on three axes: a small sample on a CPU as a batch of two halves."""
    sizes = list(zip(x.shape[2:], weight.shape[2:], stride, padding, strict=True))
    space = [(n + 2 * p - k) // s + 1 for n, k, s, p in sizes]
    if not _without_onednn(x, weight, space):
        return nn.functional.conv3d(x, weight, bias, tuple(stride), tuple(padding))
    axis = space.index(max(space))
    n, kernel, step, pad = sizes[axis]
    half = -(-space[axis] // 2)
    read = (half - 1) * step + kernel  # planes of x for a half
    missing = [0, 0] * (2 - axis) + [pad, half * step + read - pad - n]
    x = nn.functional.pad(x, missing)
    halves = torch.cat([x.narrow(2 + axis, start, read) for start in (0, half * step)])
    padding = [0 if k == axis else p for k, p in enumerate(padding)]
    first, second = nn.functional.conv3d(halves, weight, bias, tuple(stride), tuple(padding)).chunk(2)
    return torch.cat([first, second.narrow(2 + axis, 0, space[axis] - half)], 2 + axis)


def _without_onednn(x: Tensor, weight: Tensor, space: Sequence[int]) -> bool:
    """Return whether torch convolves x without oneDNN, but with it as a batch of two."""
    small = x.shape[0] == 1 and x.shape[1] * x.shape[2] * x.shape[3] <= LINES and max(weight.shape[3:]) > 1
    cut = max(space) > 1 and min(space) > 0 and weight.numel() * math.prod(space) >= PRODUCTS
    float32 = x.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return x.device.type == "cpu" and float32 and small and cut


class _Conv(_InSlabs):
    def _conv_forward(self: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        with dropped(input):
            y = self._by_slabs(input, weight, bias)
            if y is not None:
                return y
            if input.ndim == 5 and self.groups == 1 and not plain() and self._divides():
                return conv3d(input, weight, bias, self.stride, self.padding)
            return super()._conv_forward(input, weight, bias)  # type: ignore[misc]


class _ConvTranspose(_InSlabs):
    def forward(self: Any, input: Tensor, output_size: Any = None) -> Tensor:
        with dropped(input):
            y = self._by_slabs(input, self.weight, self.bias) if output_size is None else None
            return super().forward(input, output_size) if y is None else y  # type: ignore[misc]


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
