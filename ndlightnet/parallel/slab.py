"""Slab layouts: a slab of a larger grid, whose other slabs other processes hold, and packs of slabs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ndlightnet.layout import Grid, Layout, Ragged
from ndlightnet.layout.abstract import Future, Shape
from ndlightnet.parallel.copies import add, cat, copy, split
from ndlightnet.parallel.exchange import Exchange, in_a_row

PART = 2**24  # numbers of an exchange, at least: of fewer, more of them take longer than what they overlap


@dataclass(frozen=True, repr=False)
class Slab(Grid):
    """A slab of a grid: all of it along the other axes, and some steps along one.

    shape: of the slab. axis: the axis that is cut. sizes: tokens of each slab along it.
    exchange: between the slabs. The offset follows from the sizes.
    """

    axis: int = 0  # type: ignore[assignment]
    sizes: Shape = ()
    exchange: Exchange = field(default=None, compare=False)  # type: ignore[assignment]

    shared = True

    def __post_init__(self) -> None:
        if self.offset is None:
            object.__setattr__(self, "offset", self._corner(0))

    def __repr__(self) -> str:
        return f"Slab({self.shape}, axis={self.axis}, sizes={self.sizes}) within shard_grid or predict_large"

    def _corner(self, frames: int | Tensor) -> tuple[int | Tensor, ...]:
        corner: list[int | Tensor] = [frames, *[0] * (self.ndim - 1)]
        corner[self.axis] = self.starts[self.rank]
        return tuple(corner)

    @property
    def rank(self) -> int:
        return self.exchange.rank

    @property
    def starts(self) -> Shape:
        """First token of each slab along the axis, and their number."""
        return (0, *accumulate(self.sizes))

    @property
    def start(self) -> Shape | None:  # type: ignore[override]
        """Coordinates of the first token in the whole grid; None in a stream, where they are tensors."""
        start = tuple(first for first in self.offset or () if isinstance(first, int))
        return start if len(start) == self.ndim else None

    @property
    def whole(self) -> Grid:
        return Grid(self._with(sum(self.sizes)))

    def _with(self, size: int) -> Shape:
        return (*self.shape[: self.axis], size, *self.shape[self.axis + 1 :])

    def strided(self, step: Shape, shape: Shape | None = None) -> Slab:
        by = step[self.axis]
        if any(size % by for size in self.sizes[:-1]):
            raise ValueError(
                f"slabs of {self.sizes} along axis {self.axis}: expected multiples of {by}, all "
                "but the last one, so that no patch or stride lies in two of them"
            )
        sizes = tuple(-(-n // by) for n in self.sizes)
        return Slab(super().strided(step, shape).shape, axis=self.axis, sizes=sizes, exchange=self.exchange)

    def after(self, frames: int | Tensor) -> Slab:
        if self.axis == 0:
            raise ValueError("a stream with axis=0: expected another axis, frames come in turn")
        return replace(self, offset=self._corner(frames))

    def frame(self) -> Grid:
        if self.axis == 0:
            return super().frame()
        return Slab(self.shape[1:], axis=self.axis - 1, sizes=self.sizes, exchange=self.exchange)

    def unflatten(self, x: Tensor) -> Tensor:
        return carry_sizes(super().unflatten(x), self.axis, self.sizes)

    def token_counts(self, device: torch.device) -> int:
        return self.whole.length

    def pool(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return Layout.pool(self, x, mask)

    # -------------------------------------------------------------------------- questions
    def gather(self, x: Tensor) -> Tensor:
        """Return x of all slabs: (slabs, ...). All have one shape."""
        return self._begin_gather(x)()

    def _begin_gather(self, x: Tensor) -> Callable[[], Tensor]:
        received = self.exchange.all_gather(x)
        return lambda: torch.stack(received())

    def total(self, sums: Tensor) -> Tensor:
        return self.exchange.total(sums)

    def draw(self, *shape: int, device: torch.device) -> Tensor:
        return self.gather(super().draw(*shape, device=device))[0]

    def merge(self, state: Any) -> Callable[[], Any]:
        """A State of each slab, which all slabs get, is all that they exchange: about 0.1 MB for
        each sample in a layer of 12 heads of 32 channels, however many tokens there are."""
        gathered = self._begin_gathered(state)
        return lambda: gathered().merged(0)

    def _begin_gathered(self, state: Any) -> Callable[[], Any]:
        """Return, when called, the States of all slabs, (slabs, ...)."""
        shapes = [x.shape for x in state]
        top, *rest = state
        flat = torch.cat([x.flatten() for x in (top.detach(), *rest)])
        gather, kind = self._begin_gather(flat), type(state)

        def wait() -> Any:
            rows = gather().split([shape.numel() for shape in shapes], 1)
            top, *rest = (x.unflatten(1, shape) for x, shape in zip(rows, shapes, strict=True))
            return kind(top.detach(), *rest)

        return wait

    def before(self, state: Any, after: Callable[[], Any], window: int | None, forget: Any) -> Any:
        """Of slabs along the first axis: the State of the slabs before, without touching those behind."""
        if self.axis != 0:
            return state
        if state is not None:
            raise ValueError("state: expected None where the first axis is split")
        if window == 1:  # no frame sees another
            return None
        state = after()
        kind, states = type(state), self._begin_gathered(state)()
        # An empty slice of what all slabs sent belongs to the graph of each: else the others would
        # wait for its gradient. A product with 0 would read what lies behind, and 0 * NaN is NaN.
        unused = sum(x[:0].sum() for x in states[1:])
        top, *rest = (torch.zeros_like(x) for x in state)
        earlier = [kind(top - torch.inf, *(x + unused for x in rest))]
        for i in range(self.rank):
            one = kind(*(x[i] for x in states)).decayed(sum(self.sizes[i + 1 : self.rank]), forget)
            if window is not None:
                most = min(self.sizes[i], window - 1)
                one = kind(*(x[:, x.shape[1] - most :] for x in one))
            earlier.append(one)
        if window is None:
            return kind(*(torch.stack(x) for x in zip(*earlier, strict=True))).merged(0)
        joined = [torch.cat(x, 1) for x in zip(*earlier, strict=True)]
        return kind(*(x[:, x.shape[1] - (window - 1) :] for x in joined))

    def halo(
        self, x: Tensor, dim: int, before: int, after: int, channels: slice = slice(None)
    ) -> tuple[Tensor, Future]:
        """The x that is returned is for one operator, whose gradient is a new tensor: to that the
        gradients of what neighbours read are added."""
        read = x[..., channels]
        starts, rank, slabs = self.starts, self.rank, range(len(self.sizes))

        def reach(reader: int, slab: int) -> int:
            """Return how many steps of a slab lie within what `reader` reads."""
            if slab < reader:
                return max(0, starts[slab + 1] - max(starts[slab], starts[reader] - before))
            end = min(starts[slab + 1], starts[reader + 1] + after)
            return max(0, end - starts[slab]) if slab > reader else 0

        def span(reader: int) -> tuple[int, int]:
            n = reach(reader, rank)
            return (x.shape[dim] - n if reader > rank else 0), n

        def shape(slab: int) -> Shape:
            return (*x.shape[:dim], reach(rank, slab), *read.shape[dim + 1 :])

        spans = [span(i) for i in slabs]
        if torch.compiler.is_compiling():  # torch 2.11 loses what `_Edges` adds to a view of a gradient
            edges = [read.narrow(dim, start, size) for start, size in spans]
        else:
            x, *edges = _Edges.apply(x, dim, spans, channels)  # type: ignore[no-untyped-call]
        received = self.exchange.all_to_all(edges, [shape(i) for i in slabs])

        def joined(planes: list[Tensor]) -> Tensor:
            some = [plane for plane in planes if plane.shape[dim]]
            return some[0] if len(some) == 1 else torch.cat(planes, dim)

        def wait() -> list[Tensor]:
            planes = received()  # the own one is empty
            return [joined(planes[: rank + 1]), joined(planes[rank:])]

        return x, wait

    def map_channels(self, function: Callable[..., Tensor], x: Tensor, mask: Tensor | None) -> Tensor:
        """Whole lines of some channels: two exchanges of the tokens, of one sample while another is computed. The
        states of all lines at a cut are more than the tokens, unless a slab has hundreds along the axis, and would go
        from slab to slab, one after the other."""
        plane = math.prod(self._with(1))
        lengths = [plane * size for size in self.sizes]
        widths = [x.shape[-1] // len(lengths) + (i < x.shape[-1] % len(lengths)) for i in range(len(lengths))]
        width, start = widths[self.rank], sum(widths[: self.rank])
        masks = None
        if mask is not None:
            masks = self.exchange.all_to_all([mask] * len(lengths), [(len(x), n) for n in lengths])
        grid = self.whole
        alone = max(1, grid.length * x.shape[-1] // len(lengths))  # numbers of a sample, the same on all slabs
        batches = [len(part) for part in x.split(-(-PART // alone))]
        lines = [
            self.exchange.all_to_all(pieces, [(n, size, width) for size in lengths])
            for n, pieces in zip(batches, split(x, widths, -1, batches), strict=True)
        ]
        keep = [None] * len(lines) if masks is None else self._joined(masks()).split(batches)
        scanned = []
        for n, received, kept in zip(batches, lines, keep, strict=True):
            y = grid.unflatten(function(grid, slice(start, start + width), self._joined(received()), kept))
            (pieces,) = split(y, self.sizes, 1 + self.axis, [n])
            slabs = [piece.flatten(1, self.ndim) for piece in pieces]
            scanned.append(self.exchange.all_to_all(slabs, [(n, self.length, width) for width in widths]))
        return cat([received() for received in scanned], -1)

    def _joined(self, slabs: Sequence[Tensor]) -> Tensor:
        """Join the tokens (batch, length, ...) of all slabs: (batch, whole length, ...)."""
        pairs = zip(slabs, self.sizes, strict=True)
        cells = [x.reshape(len(x), *self._with(size), *x.shape[2:]) for x, size in pairs]
        return cat([cells], 1 + self.axis).flatten(1, self.ndim)


class SlabPack(Ragged):
    """Slabs of samples of different shapes, end to end in one row. Layers take one sample after the other."""

    shared, joint = True, False

    def __init__(self, slabs: Iterable[Slab]) -> None:
        self.slabs = tuple(slabs)
        super().__init__(slab.shape for slab in self.slabs)

    def __repr__(self) -> str:
        return f"SlabPack({self.slabs})"

    def rows_of(self, samples: Sequence[int]) -> Slab:
        return self.slabs[samples[0]]

    def alike(self) -> list[list[int]]:
        return [[i] for i in range(len(self))]

    def map_channels(self, function: Callable[..., Tensor], x: Tensor, mask: Tensor | None) -> Tensor:
        return self.map_samples(lambda slab, x, mask: slab.map_channels(function, x, mask), x, mask)

    def total(self, sums: Tensor) -> Tensor:
        return self.slabs[0].total(sums)

    def draw(self, *shape: int, device: torch.device) -> Tensor:
        return self.slabs[0].draw(*shape, device=device)

    def token_counts(self, device: torch.device) -> Tensor:
        return torch.tensor([[max(1, slab.whole.length)] for slab in self.slabs], device=device)


def carry_sizes(slab: Any, axis: int, sizes: Shape) -> Tensor:
    """Let a slab carry the sizes of all slabs along the axis; tensors computed from it do not."""
    slab._slab = axis, sizes
    return slab  # type: ignore[no-any-return]


def carried_sizes(x: Tensor, axis: int) -> Shape | None:
    """Return the sizes that `carry_sizes` has set, None if there are none along this axis."""
    carried, sizes = getattr(x, "_slab", (None, None))
    return sizes if carried == axis else None


class _Edges(torch.autograd.Function):
    """Return x and copies of spans of some channels of it along a dimension. Their gradients are added to that of x
    in its place: as slices they would each be a tensor of zeros of the size of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, spans: Sequence[tuple[int, int]], channels: slice) -> tuple[Tensor, ...]:
        ctx.dim, ctx.spans, ctx.channels = dim, spans, channels
        edges = [x[..., channels].narrow(dim, at, n) for at, n in spans]
        copies = in_a_row(x, [edge.shape for edge in edges])
        for edge, place in zip(edges, copies, strict=True):
            copy(edge, place)
        return x.view_as(x), *copies

    @staticmethod
    def backward(ctx: Any, dx: Tensor, *edges: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # for a second derivative
            dx = dx.clone()
        for (at, n), edge in zip(ctx.spans, edges, strict=True):
            if n or torch.is_grad_enabled():  # all processes have the same exchanges
                add(edge, dx[..., ctx.channels].narrow(ctx.dim, at, n), ctx.dim)
        return dx, None, None, None


class _Add(torch.autograd.Function):
    """Add planes to the first and the last steps of x, seen as `shape`, along a dimension, in the
    place of x: not of a view of it, whose gradient would be copied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, last: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
        ctx.sizes, ctx.dim, ctx.shape = (first.shape[dim], last.shape[dim]), dim, shape
        ctx.dtypes = first.dtype, last.dtype
        cells = x.view(shape)
        add(first, cells.narrow(dim, 0, ctx.sizes[0]), dim)
        add(last, cells.narrow(dim, shape[dim] - ctx.sizes[1], ctx.sizes[1]), dim)
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
