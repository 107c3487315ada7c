"""What a patch of cells reads in local mixing: lines of tokens along the last axis."""

# mypy: disable-error-code="assignment"
from __future__ import annotations

from itertools import product

import triton
import triton.language as tl

Offsets = tuple[tuple[int, ...], ...]
# Tiles of a line: their displacement along the last axis from the patch's first cell, and for which
# cells of the patch they count: ((cell, index of the tap), ...)
Tiles = tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
# Lines with their displacement along the axes before the last
Lines = tuple[tuple[tuple[int, ...], Tiles], ...]


def lines(offsets: Offsets, patch: tuple[int, ...], sign: int = 1) -> Lines:
    """Return the lines that taps with these offsets, times `sign`, read for a patch."""
    found: dict[tuple[int, ...], dict[int, list[tuple[int, int]]]] = {}
    for m, cell in enumerate(product(*(range(size) for size in patch))):
        for tap, offset in enumerate(offsets):
            *line, last = (c - sign * o for c, o in zip(cell, offset, strict=True))
            found.setdefault(tuple(line), {}).setdefault(last, []).append((m, tap))
    return tuple(
        (line, tuple((p, tuple(uses)) for p, uses in sorted(tiles.items())))
        for line, tiles in sorted(found.items())
    )


@triton.constexpr_function
def line_count(lines):
    return len(lines)


@triton.constexpr_function
def line_at(lines, g):
    return lines[g][0]


@triton.constexpr_function
def tile_count(lines, g):
    return len(lines[g][1])


@triton.constexpr_function
def tile_at(lines, g, t):
    return lines[g][1][t][0]


@triton.constexpr_function
def use_count(lines, g, t):
    return len(lines[g][1][t][1])


@triton.constexpr_function
def use_cell(lines, g, t, i):
    return lines[g][1][t][1][i][0]


@triton.constexpr_function
def use_tap(lines, g, t, i):
    return lines[g][1][t][1][i][1]


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
