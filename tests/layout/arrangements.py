"""Ways to lay out samples as tokens: each cuts samples (*grid, ...) into the rows of one layout for every process, and
joins what the processes return."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ndlightnet.layout import Boxes, Grid, Layout, Ragged
from ndlightnet.parallel import Slab, SlabPack

from .slab_threads import Threads, on_threads

Samples = list[Tensor]


@dataclass(frozen=True)
class Arrangement:
    """shapes: grids of the samples. count: of processes."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    count: int = 1

    def layout(self, exchange: Threads) -> Layout:
        return Grid(self.shapes[0])

    def rows(self, samples: Samples, rank: int) -> Tensor:
        """Return the tokens (batch, length, ...) of a process."""
        return torch.stack(samples).flatten(1, len(self.shapes[0]))

    def joined(self, rows: list[Tensor]) -> Samples:
        """Return the samples from what all processes return."""
        return list(rows[0].unflatten(1, self.shapes[0]))

    def run(self, function: Callable[[Layout, int], Any]) -> list[Any]:
        """Return function(layout, rank) of all processes."""
        return on_threads(self.count, lambda exchange: function(self.layout(exchange), exchange.rank))


class Pack(Arrangement):
    def layout(self, exchange: Threads) -> Layout:
        return Ragged(self.shapes)

    def rows(self, samples: Samples, rank: int) -> Tensor:
        return torch.cat([x.flatten(0, len(self.shapes[0]) - 1) for x in samples])[None]

    def joined(self, rows: list[Tensor]) -> Samples:
        lengths = [math.prod(shape) for shape in self.shapes]
        pairs = zip(rows[0][0].split(lengths), self.shapes, strict=True)
        return [x.unflatten(0, shape) for x, shape in pairs]


@dataclass(frozen=True)
class Slabs(Arrangement):
    """sizes: of the slabs along `axis`, of each sample."""

    axis: int = 0
    sizes: tuple[tuple[int, ...], ...] = ()

    def cut(self, samples: Samples, rank: int) -> Samples:
        return [x.split(sizes, self.axis)[rank] for x, sizes in zip(samples, self.sizes, strict=True)]

    def slab(self, sample: int, exchange: Threads) -> Slab:
        shape, sizes = list(self.shapes[sample]), self.sizes[sample]
        shape[self.axis] = sizes[exchange.rank]
        return Slab(tuple(shape), axis=self.axis, sizes=sizes, exchange=exchange)

    def layout(self, exchange: Threads) -> Layout:
        return self.slab(0, exchange)

    def rows(self, samples: Samples, rank: int) -> Tensor:
        return super().rows(self.cut(samples, rank), rank)

    def joined(self, rows: list[Tensor]) -> Samples:
        shape, cells = list(self.shapes[0]), []
        for x, size in zip(rows, self.sizes[0], strict=True):
            shape[self.axis] = size
            cells.append(x.unflatten(1, shape))
        return list(torch.cat(cells, 1 + self.axis))


class PackOfSlabs(Slabs):
    def layout(self, exchange: Threads) -> Layout:
        return SlabPack(self.slab(i, exchange) for i in range(len(self.shapes)))

    def rows(self, samples: Samples, rank: int) -> Tensor:
        return torch.cat([x.flatten(0, len(self.shapes[0]) - 1) for x in self.cut(samples, rank)])[None]

    def joined(self, rows: list[Tensor]) -> Samples:
        slabs: list[list[Tensor]] = [[] for _ in self.shapes]
        for rank, x in enumerate(rows):
            shapes = [
                (*shape[: self.axis], sizes[rank], *shape[self.axis + 1 :])
                for shape, sizes in zip(self.shapes, self.sizes, strict=True)
            ]
            for i, tokens in enumerate(x[0].split([math.prod(shape) for shape in shapes])):
                slabs[i].append(tokens.unflatten(0, shapes[i]))
        return [torch.cat(each, self.axis) for each in slabs]


@dataclass(frozen=True)
class AllBoxes(Arrangement):
    """All boxes of a grid, in an order of their own in each sample."""

    box: tuple[int, ...] = ()

    def corners(self, sample: int) -> list[tuple[int, ...]]:
        steps = [range(0, n, b) for n, b in zip(self.shapes[0], self.box, strict=True)]
        corners = list(product(*steps))
        return corners[sample:] + corners[:sample]

    def layout(self, exchange: Threads) -> Layout:
        corners = [corner for i in range(len(self.shapes)) for corner in self.corners(i)]
        offset = tuple(torch.tensor(first) for first in zip(*corners, strict=True))
        return Boxes(self.box, offset, len(self.corners(0)))

    def place(self, corner: Sequence[int]) -> tuple[slice, ...]:
        return tuple(slice(a, a + b) for a, b in zip(corner, self.box, strict=True))

    def rows(self, samples: Samples, rank: int) -> Tensor:
        boxes = [x[self.place(corner)] for i, x in enumerate(samples) for corner in self.corners(i)]
        return torch.stack(boxes).flatten(1, len(self.box))

    def joined(self, rows: list[Tensor]) -> Samples:
        boxes = rows[0].unflatten(0, (len(self.shapes), -1)).unflatten(2, self.box)
        samples = []
        for i, shape in enumerate(self.shapes):
            sample = boxes.new_empty(*shape, *boxes.shape[2 + len(self.box) :])
            for box, corner in zip(boxes[i], self.corners(i), strict=True):
                sample[self.place(corner)] = box
            samples.append(sample)
        return samples


def _slabs(shape: tuple[int, ...], axis: int, sizes: tuple[int, ...]) -> Slabs:
    name = f"slabs of {shape}, axis {axis}, {sizes}"
    return Slabs(name, (shape, shape), len(sizes), axis, (sizes, sizes))


GRIDS = [Arrangement(f"grid {shape}", (shape, shape)) for shape in ((7,), (4, 3), (3, 1, 5), (2, 3, 2, 2))]
PACKS = [Pack("pack, 1 axis", ((7,), (1,), (0,), (20,))), Pack("pack, 3 axes", ((3, 4, 2), (1, 2, 5), (4, 1, 1)))]
SLABS = [
    _slabs((9,), 0, (2, 1, 6)),
    _slabs((5, 4), 0, (3, 2)),
    _slabs((4, 5), 1, (1, 4)),
    _slabs((4, 3, 5), 0, (1, 1, 2)),
    _slabs((2, 3, 5), 2, (3, 2)),
    _slabs((2, 5, 3), 1, (3, 2)),
]
PACKS_OF_SLABS = [
    PackOfSlabs("pack of slabs, axis 0", ((5, 3), (4, 2)), 2, 0, ((3, 2), (1, 3))),
    PackOfSlabs("pack of slabs, axis 1", ((2, 5, 2), (3, 4, 1)), 2, 1, ((1, 4), (2, 2))),
]

BOXES = [
    AllBoxes("boxes, 1 axis", ((12,), (12,)), box=(3,)),
    AllBoxes("boxes, 2 axes", ((4, 6), (4, 6)), box=(2, 3)),
    AllBoxes("boxes larger than a State", ((8, 12), (8, 12)), box=(4, 6)),
]
