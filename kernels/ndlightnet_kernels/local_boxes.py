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

# Rows of cells of a program and its warps; by the number of axes (the last one holds for more) its
# frames, forward and backward. Measured on an H200 with radius 1
ROWS, WARPS = 16, 4
FRAMES, BACK_FRAMES = (4, 8, 8, 4), (4, 4, 4, 2)


@triton.constexpr_function
def _extent(box, axis, frames):
    return box[axis] * (frames if axis == 0 else 1)


@triton.jit
def box_rows(
    box, table, sizes, length, AXES: tl.constexpr, BOX: tl.constexpr, FRAMES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Return for the rows of a box their token in its first frame, their coordinates along all
    axes, the sizes of the sample's grid, the tokens from cell to cell along each axis, and which
    rows are inside the grid along the axes after the first. table: of a pack, (boxes, 1 + 2 AXES):
    the sample's first token, its sizes, the box's first cell."""
    starts, shape = (), ()
    if table is None:
        left = box
        for a in tl.static_range(AXES - 1, -1, -1):
            count = tl.cdiv(sizes[a], _extent(BOX, a, FRAMES))
            starts = (left % count * _extent(BOX, a, FRAMES),) + starts
            shape = (sizes[a],) + shape
            left = left // count
        token = left.to(tl.int64) * length
    else:
        record = table + box * (1 + 2 * AXES)
        token = tl.load(record)
        for a in tl.static_range(AXES):
            shape = shape + (tl.load(record + 1 + a).to(tl.int32),)
            starts = starts + (tl.load(record + 1 + AXES + a).to(tl.int32),)
    row = tl.arange(0, ROWS)
    token = token + tl.zeros((ROWS,), tl.int64)
    step = tl.full((), 1, tl.int64)
    inside = row >= 0
    cells, steps = (), ()
    for a in tl.static_range(AXES - 1, -1, -1):
        cell = starts[a] + row % BOX[a] * (FRAMES if a == 0 else 1)
        row = row // BOX[a]
        token += cell * step
        cells, steps = (cell,) + cells, (step,) + steps
        step = step * shape[a]
        if a > 0:
            inside = inside & (cell < shape[a])
    return token, cells, shape, steps, inside


@triton.jit
def within(cell, size):
    """Return whether 0 <= cell < size, in one comparison."""
    return cell.to(tl.uint32, bitcast=True) < size.to(tl.uint32, bitcast=True)


class Box(NamedTuple):
    """What a program computes: `frames` successive frames of each row of cells, and how many rows
    lie along each axis (powers of two)."""

    frames: int
    rows: tuple[int, ...]

    @property
    def extents(self) -> tuple[int, ...]:
        return (self.frames * self.rows[0], *self.rows[1:])


def by_axes(values: Sequence[int], axes: int) -> int:
    return values[min(axes, len(values)) - 1]


def box(shape: Sequence[int], backward: bool = False) -> Box:
    """Return the box for grids up to this shape: nearly a cube, no longer than the grid along any
    axis."""
    usual = by_axes(BACK_FRAMES if backward else FRAMES, len(shape))
    frames, count, rows = min(usual, power_of_2(shape[0])), ROWS, [1] * len(shape)
    while count > 1:
        extents = [frames * rows[0], *rows[1:]]
        short = [a for a, size in enumerate(shape) if extents[a] < size]
        # the shortest extent, of equal ones the last axis
        axis = min(short, key=lambda a: (extents[a], -a)) if short else len(shape) - 1
        rows[axis] *= 2
        count //= 2
    return Box(frames, tuple(rows))


def table(shapes: Sequence[Sequence[int]], firsts: Sequence[int], of: Box) -> Tensor:
    """Return the boxes of a pack's samples, (boxes, 1 + 2 axes) int64; see `box_rows`."""
    parts = []
    for shape, first in zip(shapes, firsts, strict=True):
        starts = [torch.arange(0, n, extent) for n, extent in zip(shape, of.extents, strict=True)]
        grid = torch.cartesian_prod(*starts).reshape(-1, len(shape))
        fixed = torch.tensor([first, *shape]).expand(len(grid), -1)
        parts.append(torch.cat([fixed, grid], 1))
    return torch.cat(parts)
