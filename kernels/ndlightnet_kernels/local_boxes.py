"""Boxes of cells: what one program of local mixing computes, on grids and in packs."""

# mypy: disable-error-code="assignment"
# (a jit function builds its tuples of tensors step by step)
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ndlightnet_kernels.tiles import power_of_2


class Plan(NamedTuple):
    """How programs compute their boxes. patch: the cells of a row along the last axes; a thread holds them all. rows,
    warps: of a program. bytes: of a token that it reads: whole sectors of 32. registers: of a thread at most, 0 for as
    many as the compiler takes. boxes: of a program of the forward kernel, successive ones. Of the backward kernel,
    taps: whose sums it holds in registers; programs: a constant, for the same bits on every card."""

    patch: tuple[int, ...]
    rows: int
    warps: int
    bytes: int
    registers: int = 0
    boxes: int = 1
    taps: int = 0
    programs: int = 0


# Forward and backward, by the number of axes (the last one holds for more). Measured on an H200 with radius 1
PLANS = (
    (Plan((4,), 16, 4, 128), Plan((4,), 16, 4, 128, taps=9, programs=1056)),
    (Plan((4,), 16, 4, 128, 128, 2), Plan((4,), 16, 4, 64, 128, taps=9, programs=528)),
    (Plan((8,), 8, 4, 128, 128, 2), Plan((2, 4), 8, 8, 128, 128, taps=9, programs=264)),
    (Plan((2, 4), 8, 8, 128, 80, 4), Plan((2, 4), 8, 8, 128, 128, taps=9, programs=264)),
)
FEW = (9, 5, 7, 9)  # taps, at most, for which they are the faster ones; measured for 5, 7 on one axis, 5, 9 on two
AT_ONCE = 27  # taps whose sums fit into registers
# For more taps, with any number of axes: up to those of a box of 3 axes, measured there; beyond
# that by the registers and the time that the compiler takes
MANY = Plan((2, 2, 4), 8, 8, 128, 128, 2), Plan((2, 4), 8, 4, 64, taps=AT_ONCE, programs=264)
MOST = Plan((4,), 16, 8, 64, 128, 2), Plan((4,), 8, 4, 64, taps=AT_ONCE, programs=264)


def plan(axes: int, taps: int, backward: bool = False) -> Plan:
    known = min(axes, len(PLANS)) - 1
    return (PLANS[known] if taps <= FEW[known] else MANY if taps <= AT_ONCE else MOST)[int(backward)]


@triton.constexpr_function
def _extent(box, patch, axis):
    return box[axis] * patch[axis]


@triton.jit
def box_place(box, sizes, AXES: tl.constexpr, BOX: tl.constexpr, PATCH: tl.constexpr):
    """Return a box's sample and its place among the boxes along each axis, the last one fastest."""
    left, place = box.to(tl.uint32), ()  # unsigned divisions take half the instructions
    for a in tl.static_range(AXES - 1, -1, -1):
        count = tl.cdiv(sizes[a], _extent(BOX, PATCH, a)).to(tl.uint32)
        place = ((left % count).to(tl.int32),) + place
        left = left // count
    return (left.to(tl.int32),) + place


@triton.jit
def next_place(place, sizes, AXES: tl.constexpr, BOX: tl.constexpr, PATCH: tl.constexpr):
    """Return the next box's place, without divisions."""
    out, carry = (), 1
    for a in tl.static_range(AXES - 1, -1, -1):
        along = place[a + 1] + carry
        end = along == tl.cdiv(sizes[a], _extent(BOX, PATCH, a))
        out = (tl.where(end, 0, along),) + out
        carry = end.to(tl.int32)
    return (place[0] + carry,) + out


@triton.jit
def box_rows(box, place, table, sizes, length, AXES, BOX, PATCH, ROWS):
    """Return for the rows of a box the token of their patch's first cell, its coordinates, the sizes of the sample's
    grid and the tokens from cell to cell along each axis. place: of the box among those of grids. table: of a pack,
    (boxes, 1 + 2 AXES): the sample's first token, its sizes, the box's first cell."""
    starts, shape = (), ()
    if table is None:
        for a in tl.static_range(AXES):
            starts = starts + (place[a + 1] * _extent(BOX, PATCH, a),)
            shape = shape + (sizes[a],)
        token = place[0].to(tl.int64) * length
    else:
        record = table + box * (1 + 2 * AXES)
        token = tl.load(record)
        for a in tl.static_range(AXES):
            shape = shape + (tl.load(record + 1 + a).to(tl.int32),)
            starts = starts + (tl.load(record + 1 + AXES + a).to(tl.int32),)
    row = tl.arange(0, ROWS)
    token = token + tl.zeros((ROWS,), tl.int64)
    step = tl.full((), 1, tl.int64)
    cells, steps = (), ()
    for a in tl.static_range(AXES - 1, -1, -1):
        cell = starts[a] + row % BOX[a] * PATCH[a]
        row = row // BOX[a]
        token += cell * step
        cells, steps = (cell,) + cells, (step,) + steps
        step = step * shape[a]
    return token, cells, shape, steps


class Box(NamedTuple):
    """What a program computes: the patch of each row and how many rows lie along each axis (powers of two)."""

    patch: tuple[int, ...]
    rows: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Box:
        """Return the box from its numbers in one sequence."""
        axes = len(sizes) // 2
        return cls(tuple(sizes[:axes]), tuple(sizes[axes:]))

    @property
    def extents(self) -> tuple[int, ...]:
        return tuple(p * r for p, r in zip(self.patch, self.rows, strict=True))


def box(shape: Sequence[int], taps: int, backward: bool = False) -> Box:
    """Return the box for grids up to this shape: nearly a cube, no longer than the grid along any axis."""
    chosen = plan(len(shape), taps, backward)
    usual = (*[1] * len(shape), *chosen.patch)[-len(shape) :]
    patch = [min(p, power_of_2(size)) for p, size in zip(usual, shape, strict=True)]
    count, rows = chosen.rows, [1] * len(shape)
    while count > 1:
        extents = [p * r for p, r in zip(patch, rows, strict=True)]
        short = [a for a, size in enumerate(shape) if extents[a] < size]
        # the shortest extent, of equal ones the last axis
        axis = min(short, key=lambda a: (extents[a], -a)) if short else len(shape) - 1
        rows[axis] *= 2
        count //= 2
    return Box(tuple(patch), tuple(rows))


def table(shapes: Sequence[Sequence[int]], firsts: Sequence[int], of: Box) -> Tensor:
    """Return the boxes of a pack's samples, (boxes, 1 + 2 axes) int64; see `box_rows`."""
    tables = []
    for shape, first in zip(shapes, firsts, strict=True):
        starts = [torch.arange(0, n, extent) for n, extent in zip(shape, of.extents, strict=True)]
        grid = torch.cartesian_prod(*starts).reshape(-1, len(shape))
        fixed = torch.tensor([first, *shape]).expand(len(grid), -1)
        tables.append(torch.cat([fixed, grid], 1))
    return torch.cat(tables)
