"""What a patch of cells reads in local mixing: lines of tokens along the last axis."""

# mypy: disable-error-code="assignment"
from __future__ import annotations

from hashlib import sha256
from itertools import product
from typing import NamedTuple

import triton
import triton.language as tl

Offsets = tuple[tuple[int, ...], ...]


class Tile(NamedTuple):
    """A token of each row's line. at: its place along the last axis from the patch's first cell; taps: by which tap
    each cell of the patch reads it, -1 if by none; cells: which cell reads it by each tap, -1 if none."""

    at: int
    taps: tuple[int, ...]
    cells: tuple[int, ...]


class Lines:
    """Lines of tiles, with the displacement of each along the axes before the last. One value for Triton, with a short
    name: a tuple it would walk through and print at each use, which takes minutes for many taps."""

    def __init__(self, entries: tuple[tuple[tuple[int, ...], tuple[Tile, ...]], ...]) -> None:
        self.entries = entries
        self._name = f"Lines_{sha256(repr(entries).encode()).hexdigest()[:32]}"

    def __repr__(self) -> str:
        return self._name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lines) and self.entries == other.entries

    def __hash__(self) -> int:
        return hash(self._name)


def lines(offsets: Offsets, patch: tuple[int, ...], sign: int = 1) -> Lines:
    """Return the lines that taps with these offsets, times `sign`, read for a patch."""
    read: dict[tuple[int, ...], dict[int, list[tuple[int, int]]]] = {}
    for cell, place in enumerate(product(*(range(size) for size in patch))):
        for tap, offset in enumerate(offsets):
            *line, last = (c - sign * o for c, o in zip(place, offset, strict=True))
            read.setdefault(tuple(line), {}).setdefault(last, []).append((cell, tap))

    def tile(at: int, uses: list[tuple[int, int]]) -> Tile:
        tap_of, cell_of = dict(uses), {tap: cell for cell, tap in uses}
        cells = range(cell_count(patch))
        return Tile(
            at,
            tuple(tap_of.get(cell, -1) for cell in cells),
            tuple(cell_of.get(tap, -1) for tap in range(len(offsets))),
        )

    return Lines(
        tuple(
            (line, tuple(tile(at, uses) for at, uses in sorted(tiles.items()))) for line, tiles in sorted(read.items())
        )
    )


@triton.constexpr_function
def line_count(lines):
    return len(lines.entries)


@triton.constexpr_function
def line_at(lines, g):
    return lines.entries[g][0]


@triton.constexpr_function
def tile_count(lines, g):
    return len(lines.entries[g][1])


@triton.constexpr_function
def tile_at(lines, g, t):
    return lines.entries[g][1][t].at


@triton.constexpr_function
def tap_of(lines, g, t, cell):
    return lines.entries[g][1][t].taps[cell]


@triton.constexpr_function
def cell_of(lines, g, t, tap):
    return lines.entries[g][1][t].cells[tap]


@triton.constexpr_function
def cell_count(patch):
    count = 1
    for size in patch:
        count *= size
    return count


@triton.jit
def within(cell, size):
    """Return whether 0 <= cell < size, in one comparison."""
    return cell.to(tl.uint32, bitcast=True) < size.to(tl.uint32, bitcast=True)


@triton.jit
def line_rows(cells, shape, steps, LINE: tl.constexpr, AXES: tl.constexpr):
    """Return by how many tokens a line is displaced from the rows, and for which rows their first
    cell along the last axis and the line along the others are inside the grid."""
    shift, inside = tl.full((), 0, tl.int64), within(cells[AXES - 1], shape[AXES - 1])
    for a in tl.static_range(AXES - 1):
        inside = inside & within(cells[a] + LINE[a], shape[a])
        shift += steps[a] * LINE[a]
    return shift, inside


@triton.jit
def tile_rows(line, cell, size, AT: tl.constexpr, WHOLE: tl.constexpr):
    """Return for which rows a tile of a line is inside the grid. WHOLE: how many cells of a patch's
    line are inside if the first one is."""
    if AT >= 0 and AT < WHOLE:
        return line
    else:
        return line & within(cell + AT, size)
