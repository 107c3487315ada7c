"""Local mixing in plain torch: a sum of shifted tokens, or a convolution where that is faster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ndlightnet.layout import Grid, Ragged
from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.local_mixing.offsets import Offsets
from ndlightnet.ops.plain import plain
from ndlightnet.ops.recurrence.chunks import exact

Box = tuple[slice, ...]

NUMBERS = 2**18  # from so many on a convolution of few taps is faster than shifts


@lru_cache(1024)
def _overlap(shape: Sequence[int], offset: Sequence[int]) -> tuple[Box, Box] | None:
    """Return the cells t that an offset's tap adds to and the cells t - offset that it reads, as
    slices of (batch, *shape, dim); None if there are none."""
    into, source = [slice(None)], [slice(None)]
    for size, o in zip(shape, offset, strict=True):
        if abs(o) >= size:
            return None
        into.append(slice(max(0, o), size + min(0, o)))
        source.append(slice(max(0, -o), size - max(0, o)))
    return tuple(into), tuple(source)


class _Mix(torch.autograd.Function):
    """Sum of weight_i * x_(t - offsets_i) on a grid. x (batch, *grid, dim) and weight (taps, dim) have one dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Offsets) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.offsets = offsets
        if _convolves(x, offsets):
            return _convolve(x, weight, offsets)
        here = (0,) * len(offsets[0])
        u = x * weight[offsets.index(here)] if here in offsets else torch.zeros_like(x)
        for w, offset in zip(weight, offsets, strict=True):
            if offset != here and (overlap := _overlap(x.shape[1:-1], offset)):
                u[overlap[0]].addcmul_(x[overlap[1]], w)
        return u

    @staticmethod
    def backward(ctx: Any, du: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            back = tuple(tuple(-o for o in offset) for offset in ctx.offsets)
            dx = _Mix.apply(du, weight, back)
        if ctx.needs_input_grad[1]:
            dweight = _Correlation.apply(du, x, ctx.offsets)
        return dx, dweight, None


class _Correlation(torch.autograd.Function):
    """Sums over all cells of du_t * x_(t - offsets_i): the gradient of weight_i, (taps, dim)."""

    @staticmethod
    def forward(ctx: Any, du: Tensor, x: Tensor, offsets: Offsets) -> Tensor:
        ctx.save_for_backward(du, x)
        ctx.offsets = offsets
        out = x.new_zeros(len(offsets), x.shape[-1])
        for group in _groups(offsets):
            if len(group) > 2 and _has_onednn(x):
                out[group] = _kernel_gradient(du, x, [offsets[i] for i in group])
                continue
            for i in group:
                if overlap := _overlap(x.shape[1:-1], offsets[i]):
                    torch.sum((du[overlap[0]] * x[overlap[1]]).flatten(0, -2), 0, out=out[i])
        return out

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> Any:
        du, x = ctx.saved_tensors
        back = tuple(tuple(-o for o in offset) for offset in ctx.offsets)
        return _Mix.apply(x, dw, ctx.offsets), _Mix.apply(du, dw, back), None


def _reach(offsets: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Return how many cells the taps read before and after a cell along each axis."""
    axes = range(len(offsets[0]))
    before = [max(0, *(offset[axis] for offset in offsets)) for axis in axes]
    return before, [max(0, *(-offset[axis] for offset in offsets)) for axis in axes]


def _has_onednn(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32


def _convolves(x: Tensor, offsets: Offsets) -> bool:
    """Return whether a convolution over the box of all taps is faster: measured on a CPU."""
    enough = len(offsets) > 7 or x.numel() >= NUMBERS  # else shifts are done before a convolution has begun
    expanded = 0 in x.stride()  # as the gradient of a sum is: a convolution would copy it
    if not (enough and not expanded and _has_onednn(x) and x.ndim - 2 in (2, 3)):
        return False
    return 4 * len(offsets) > math.prod(1 + b + a for b, a in zip(*_reach(offsets), strict=True))


def _convolve(x: Tensor, weight: Tensor, offsets: Offsets) -> Tensor:
    """Compute `_Mix` by a depthwise convolution. x (batch, *grid, dim)."""
    before, after = _reach(offsets)
    box = [1 + b + a for b, a in zip(before, after, strict=True)]
    taps = tuple(torch.tensor([b - o[i] for o in offsets]) for i, b in enumerate(before))
    kernel = weight.new_zeros(*box, weight.shape[1]).index_put(taps, weight)
    pads = [p for pair in zip(reversed(before), reversed(after), strict=True) for p in pair]
    cells, padding = x.movedim(-1, 1), before
    if before != after:
        cells, padding = torch.nn.functional.pad(cells, pads), [0] * len(box)
    conv = torch.nn.functional.conv2d if len(box) == 2 else torch.nn.functional.conv3d
    with exact(x):
        u = conv(cells, kernel.movedim(-1, 0)[:, None], padding=padding, groups=x.shape[-1])
    u = u.movedim(1, -1)
    # not as a view: what an autograd.Function returns as one cannot be changed in place
    return u.new_empty(0).set_(u.untyped_storage(), u.storage_offset(), u.shape, u.stride())  # type: ignore[no-untyped-call]


def _groups(offsets: Offsets) -> list[list[int]]:
    """Return the taps that are one kernel of a convolution over the last two axes of at most three columns: for wider
    ones oneDNN takes up to 30 times as long to find the gradient of the kernel."""
    groups: dict[Any, list[int]] = {}
    for tap, offset in enumerate(offsets):
        groups.setdefault((*offset[:-2], (offset[-1] + 1) // 3), []).append(tap)
    return list(groups.values())


def _kernel_gradient(du: Tensor, x: Tensor, offsets: Sequence[Sequence[int]]) -> Tensor:
    """Compute `_Correlation` for a group of taps."""
    high, low = ([pick(along) for along in zip(*offsets, strict=True)] for pick in (max, min))
    if any(a >= n or -b >= n for a, b, n in zip(low, high, x.shape[1:-1], strict=True)):
        return x.new_zeros(len(offsets), x.shape[-1])
    # what a kernel reads on both sides is padding of the convolution, else of x
    both = [b if b == -a else 0 for b, a in zip(high, low, strict=True)]
    pads = [n for b, a, p in zip(reversed(high), reversed(low), reversed(both), strict=True) for n in (b - p, -a - p)]
    if any(pads):
        x = torch.nn.functional.pad(x, [0, 0, *pads])
    du, x = (cells.flatten(0, -4).movedim(-1, 1) for cells in (du, x))
    kernel = x.new_empty(x.shape[1], 1, *(1 + b - a for b, a in zip(high[-2:], low[-2:], strict=True)))
    options = [1, 1], both[-2:], [1, 1], False, [0, 0], x.shape[1], [False, True, False]
    gradient = torch.ops.aten.convolution_backward(du, x, kernel, None, *options)[1]
    rows, columns = ([high[axis] - offset[axis] for offset in offsets] for axis in (-2, -1))
    return gradient[:, 0, rows, columns].T


def _traced(x: Tensor, weight: Tensor, offsets: Offsets) -> Tensor:
    """Compute the same as `_Mix` with operations that compilers fuse and exporters translate."""
    shape, pads = x.shape[1:-1], [0, 0]
    before, after = _reach(offsets)
    for pair in zip(reversed(before), reversed(after), strict=True):
        pads += pair
    padded = torch.nn.functional.pad(x, pads)
    u: Any = 0
    for w, offset in zip(weight, offsets, strict=True):
        shifted = padded
        for axis, size in enumerate(shape):
            shifted = shifted.narrow(1 + axis, before[axis] - offset[axis], size)
        u = u + shifted * w
    return u


def on_grid(x: Tensor, weight: Tensor, offsets: Offsets, grid: Grid) -> Tensor:
    """Mix tokens (batch, length, dim) of one grid."""
    acc = accumulator(x)
    cells, weight = grid.unflatten(x.to(acc)), weight.to(acc)
    if torch.compiler.is_compiling() or plain():
        u = _traced(cells, weight, offsets)
    else:
        if grid.ndim == 1:  # the row of an image
            cells, offsets = cells[:, None], tuple((0, *offset) for offset in offsets)
        u = _Mix.apply(cells, weight, offsets)  # type: ignore[no-untyped-call]
    return u.reshape(x.shape).to(x.dtype)


def mixed(x: Tensor, weight: Tensor, offsets: Offsets, layout: Any) -> Tensor:
    """Mix tokens (batch, length, dim)."""
    sources = layout.table(("neighbours", offsets, x.device), lambda: _neighbours(layout, offsets).to(x.device))
    if sources is None:
        return on_grid(x, weight, offsets, layout)
    acc = accumulator(x)
    source = torch.cat([x[0].to(acc), x.new_zeros(1, x.shape[-1], dtype=acc)])
    u: Any = 0
    for w, at in zip(weight.to(acc), sources, strict=True):
        u = u + w * source.index_select(0, at)
    return u.to(x.dtype)[None]


def _neighbours(layout: Ragged, offsets: Offsets) -> Tensor:
    """Return the token that each tap reads for every token, (taps, length); layout.length if it is
    outside the sample."""
    at = layout.coordinates()
    owner = layout.sample_of_token(at.device)
    shapes = torch.tensor(layout.shapes)
    steps = shapes.flip(1).cumprod(1).flip(1) // shapes.clamp(min=1)
    size, step = shapes[owner], steps[owner]
    first = torch.tensor(layout.offsets[:-1])[owner]
    sources = []
    for offset in offsets:
        source = at - torch.tensor(offset)
        inside = ((source >= 0) & (source < size)).all(1)
        sources.append(torch.where(inside, first + (source * step).sum(1), layout.length))
    return torch.stack(sources)
