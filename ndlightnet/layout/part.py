"""Part layout: a slab of a larger grid, whose other slabs other processes hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ndlightnet.layout.base import Shape
from ndlightnet.layout.exchange import Exchange, Pending
from ndlightnet.layout.grid import Grid
from ndlightnet.layout.wide import cat, copy, split


@dataclass(frozen=True)
class Part(Grid):
    """A slab of a grid: all of it along the other axes, and a part along one.

    shape: of the slab. axis: the axis that is split. sizes: tokens of each part along it.
    exchange: how the parts meet. The offset follows from the sizes.
    """

    axis: int = 0
    sizes: Shape = ()
    exchange: Exchange = field(default=None, compare=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.offset is None:
            at = [0] * self.ndim
            at[self.axis] = self.starts[self.rank]
            object.__setattr__(self, "offset", tuple(at))

    @property
    def rank(self) -> int:
        return self.exchange.rank

    @property
    def starts(self) -> Shape:
        """First token of each part along the axis, and their number."""
        return (0, *accumulate(self.sizes))

    @property
    def whole(self) -> Grid:
        """The grid that this is a part of."""
        return Grid(self._with(sum(self.sizes)))

    def _with(self, size: int) -> Shape:
        return (*self.shape[: self.axis], size, *self.shape[self.axis + 1 :])

    def strided(self, step: Shape) -> Part:
        """Return the part of the coarser grid, of ceil(size / step) cells."""
        by = step[self.axis]
        if any(size % by for size in self.sizes[:-1]):
            raise ValueError(
                f"slabs of {self.sizes} along axis {self.axis}: expected multiples of {by}, all "
                "but the last one, so that no patch or stride lies in two of them"
            )
        shape = tuple(-(-n // m) for n, m in zip(self.shape, step, strict=True))
        sizes = tuple(-(-n // by) for n in self.sizes)
        return Part(shape, axis=self.axis, sizes=sizes, exchange=self.exchange)

    def after(self, frames: int | Tensor) -> Part:
        if self.axis == 0:
            raise ValueError("a stream with axis=0: expected another axis, frames come in turn")
        at: list[int | Tensor] = [frames, *[0] * (self.ndim - 1)]
        at[self.axis] = self.starts[self.rank]
        return replace(self, offset=tuple(at))

    def frame(self) -> Part:
        return Part(self.shape[1:], axis=self.axis - 1, sizes=self.sizes, exchange=self.exchange)

    def unflatten(self, x: Tensor) -> Tensor:
        return carry_sizes(super().unflatten(x), self.axis, self.sizes)

    def sums(self, x: Tensor) -> tuple[Tensor, int]:
        return self.total(x.sum(1)), self.whole.length

    def map_samples(self, function: Callable[..., Tensor], *xs: Tensor | None) -> Tensor:
        raise ValueError(f"{self}: expected whole samples")

    # --------------------------------------------------------------------------- how parts meet
    def gather(self, x: Tensor) -> Callable[[], Tensor]:
        """Return, when called, x of all parts: (parts, ...). All have one shape."""
        received = self.exchange.for_all(x)
        return lambda: torch.stack(received())

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of x over all parts."""
        return self.exchange.total(x)

    def halo(self, x: Tensor, dim: int, before: int, after: int) -> tuple[Tensor, Pending]:
        """Return x, and, when called, the `before` steps before this part along the dimension `dim`
        of x, which is the axis that is split, and the `after` steps behind it: fewer at the ends
        of the grid. The x that is returned is for one operator, whose gradient is a new tensor: to
        that the gradients of what neighbours read are added."""
        starts, rank, parts = self.starts, self.rank, range(len(self.sizes))

        def reach(reader: int, part: int) -> int:
            """Return how many steps of a part lie within what `reader` reads."""
            if part < reader:
                return max(0, starts[part + 1] - max(starts[part], starts[reader] - before))
            end = min(starts[part + 1], starts[reader + 1] + after)
            return max(0, end - starts[part]) if part > reader else 0

        def span(reader: int) -> tuple[int, int]:
            n = reach(reader, rank)
            return (x.shape[dim] - n if reader > rank else 0), n

        def shape(part: int) -> Shape:
            return (*x.shape[:dim], reach(rank, part), *x.shape[dim + 1 :])

        x, *edges = _Edges.apply(x, dim, [span(i) for i in parts])  # type: ignore[no-untyped-call]
        received = self.exchange.swap(edges, [shape(i) for i in parts])

        def joined(planes: list[Tensor]) -> Tensor:
            some = [plane for plane in planes if plane.shape[dim]]
            return some[0] if len(some) == 1 else torch.cat(planes, dim)

        def wait() -> list[Tensor]:
            planes = received()  # the own one is empty
            return [joined(planes[: rank + 1]), joined(planes[rank:])]

        return x, wait

    def to_channels(self, x: Tensor) -> Callable[[], Tensor]:
        """Return, when called, all tokens of the whole grid, of a part of the channels: (batch,
        length, dim) -> (batch, whole length, part of dim), contiguous. The inverse is `to_slabs`.
        """
        widths = self._widths(x.shape[-1])
        shapes = [(len(x), n, widths[self.rank]) for n in self.lengths]
        received = self.exchange.swap(split(x, widths, -1), shapes)
        return lambda: self.joined(received())

    def joined(self, slabs: Sequence[Tensor]) -> Tensor:
        """Join the tokens (batch, length, ...) of all parts: (batch, whole length, ...)."""
        pairs = zip(slabs, self.sizes, strict=True)
        cells = [x.reshape(len(x), *self._with(size), *x.shape[2:]) for x, size in pairs]
        return cat(cells, 1 + self.axis).flatten(1, self.ndim)

    def to_slabs(self, x: Tensor, dim: int) -> Callable[[], Tensor]:
        """Return, when called, this part's tokens with all `dim` channels."""
        widths, whole = self._widths(dim), self.whole
        slabs = split(whole.unflatten(x), self.sizes, 1 + self.axis)
        shapes = [(len(x), self.length, width) for width in widths]
        given = [slab.flatten(1, self.ndim) for slab in slabs]
        received = self.exchange.swap(given, shapes)
        return lambda: cat(received(), -1)

    def channels(self, dim: int) -> slice:
        """Return which of `dim` channels `to_channels` gives this part."""
        widths = self._widths(dim)
        start = sum(widths[: self.rank])
        return slice(start, start + widths[self.rank])

    def _widths(self, dim: int) -> list[int]:
        parts = len(self.sizes)
        return [dim // parts + (i < dim % parts) for i in range(parts)]

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each part."""
        plane = math.prod(self._with(1))
        return [plane * size for size in self.sizes]

    def pool(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        if mask is None:
            return (self.total(exact.sum(1)) / self.whole.length).to(x.dtype)
        exact, count = exact.masked_fill(~mask[..., None], 0), mask.sum(1, keepdim=True)
        sums = self.total(torch.cat([exact.sum(1), count.to(exact.dtype)], 1))
        return (sums[:, :-1] / sums[:, -1:].clamp(min=1)).to(x.dtype)


def carry_sizes(slab: Any, axis: int, sizes: Shape) -> Tensor:
    """Let a slab carry the sizes of all slabs along the axis; tensors computed from it do not."""
    slab._slab = axis, sizes
    return slab  # type: ignore[no-any-return]


def carried_sizes(x: Tensor, axis: int) -> Shape | None:
    """Return the sizes that `carry_sizes` has set, None if there are none along this axis."""
    carried, sizes = getattr(x, "_slab", (None, None))
    return sizes if carried == axis else None


class _Edges(torch.autograd.Function):
    """Return x and copies of spans of it along a dimension. Their gradients are added to that of x
    in its place: as slices they would each be a tensor of zeros of the size of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, spans: Sequence[tuple[int, int]]) -> tuple[Tensor, ...]:
        ctx.dim, ctx.spans = dim, spans
        edges = [x.narrow(dim, at, n) for at, n in spans]
        copies = [x.new_empty(edge.shape) for edge in edges]
        for edge, place in zip(edges, copies, strict=True):
            copy(edge, place)
        return x.view_as(x), *copies

    @staticmethod
    def backward(ctx: Any, dx: Tensor, *edges: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # for a second derivative
            dx = dx.clone()
        for (at, n), edge in zip(ctx.spans, edges, strict=True):
            if n or torch.is_grad_enabled():  # all processes have the same exchanges
                dx.narrow(ctx.dim, at, n).add_(edge)
        return dx, None, None


class _Add(torch.autograd.Function):
    """Add planes to the first and the last steps of x, seen as `shape`, along a dimension, in the
    place of x: not of a view of it, whose gradient would be copied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, last: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
        ctx.sizes, ctx.dim, ctx.shape = (first.shape[dim], last.shape[dim]), dim, shape
        ctx.dtypes = first.dtype, last.dtype
        cells = x.view(shape)
        cells.narrow(dim, 0, ctx.sizes[0]).add_(first)
        cells.narrow(dim, shape[dim] - ctx.sizes[1], ctx.sizes[1]).add_(last)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (a, b), cells = ctx.sizes, dout.reshape(ctx.shape)
        first = cells.narrow(ctx.dim, 0, a)
        last = cells.narrow(ctx.dim, ctx.shape[ctx.dim] - b, b)
        return dout, first.to(ctx.dtypes[0]), last.to(ctx.dtypes[1]), None, None


def add_planes(x: Tensor, first: Tensor, last: Tensor, dim: int, shape: Sequence[int] | None = None) -> Tensor:
    """Return x + planes at its first and last steps along `dim` of its shape, or of x seen as
    `shape`; in the place of x, without a pass over the rest of it, forward or backward."""
    shape = x.shape if shape is None else shape
    if torch.compiler.is_compiling():  # which fuses this with what is beside it
        cells, a, b, n = x.view(shape), first.shape[dim], last.shape[dim], shape[dim]
        cells = cells.slice_scatter(cells.narrow(dim, 0, a) + first, dim, 0, a)
        cells = cells.slice_scatter(cells.narrow(dim, n - b, b) + last, dim, n - b, n)
        return cells.view(x.shape)
    out: Tensor = _Add.apply(x, first, last, dim, tuple(shape))  # type: ignore[no-untyped-call]
    return out
