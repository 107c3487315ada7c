"""Lines of tokens along the axes of a grid, or of samples end to end, and their tiles.

A line longer than the longest tile is several tiles, which count as lines of their own: tile j of
line i = o inner + p is number (o tiles + j) inner + p, so that neighbours stay neighbours in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ndlightnet_kernels.tiles import cdiv, power_of_2

INTS = ["lines", "n", "inner", "outer", "tiles"]  # the sizes of `Lines`, in this order


@triton.jit
def tokens(table, tile, r, shape, INT, CUT: tl.constexpr):
    """Return tokens r of tiles, and which exist. table: see `Lines`; None: all lines are alike.
    CUT: tokens of a tile; 0: a line is one tile."""
    lines, n, inner, outer, tiles = shape
    line = tile
    if CUT > 0:
        line = tile // (inner * tiles) * inner + tile % inner
        r += tile // inner % tiles * CUT
    ok = line < lines
    if table is None:
        first, step, count = (line // inner).to(INT) * outer + line % inner, tl.cast(inner, INT), n
    else:
        first = tl.load(table + line * 3, mask=ok, other=0).to(INT)
        step = tl.load(table + line * 3 + 1, mask=ok, other=0).to(INT)
        count = tl.load(table + line * 3 + 2, mask=ok, other=0)
    return first + r * step, (r < count) & ok


@triton.jit
def valid(mask, at, ok, MASK: tl.constexpr):
    """Return `ok` without the tokens that are padding."""
    if MASK:
        ok = ok & (tl.load(mask + at, mask=ok, other=0) != 0)
    return ok


class Lines(NamedTuple):
    """Lines along an axis: the blocks of 16 tokens in a tile (a power of two, so that few kernels serve all lengths),
    the lines' number, and their tokens. Token r < n of line i is start + i // inner * outer + i % inner + r * inner; or
    table (lines, 3) int32 has first token, step and length of each line. tiles: of a line."""

    axis: int
    blocks: int
    lines: int
    n: int = 0
    inner: int = 1
    outer: int = 0
    tiles: int = 1
    start: int = 0
    table: Tensor | None = None

    @property
    def tile(self) -> int:
        """Return the number of tokens in a tile."""
        return 16 * self.blocks

    @property
    def sizes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in INTS}

    @property
    def cut(self) -> int:
        return self.tile if self.tiles > 1 else 0

    def tokens(self, *tensors: Tensor | None) -> list[Tensor | None]:
        """Return tensors of tokens (..., dim), and at the end their mask (...), from the lines' first token on."""
        if self.start == 0:
            return list(tensors)
        *tokens, mask = tensors
        later = [None if x is None else x.flatten(0, -2)[self.start :] for x in tokens]
        return [*later, None if mask is None else mask.flatten()[self.start :]]


Tables = Sequence[tuple[int, int, Tensor]]  # axis, longest line, table


def walk(x: Tensor, tables: Tables | None, longest: int) -> list[Lines]:
    """Return the lines of tokens (batch, *grid, dim), or of packed tokens (length, dim), in tiles of at most `longest`
    tokens."""

    def lines(axis: int, n: int, count: int, inner: int, table: Tensor | None) -> Lines:
        tile = min(longest, 16 * power_of_2(cdiv(n, 16)))
        return Lines(axis, tile // 16, count, n, inner, n * inner, cdiv(n, tile), 0, table)

    if tables is not None:
        return [lines(axis, most, len(table), 1, table) for axis, most, table in tables]
    shape = x.shape[:-1]
    return [lines(a, n, shape.numel() // n, shape[2 + a :].numel(), None) for a, n in enumerate(shape[1:])]


def parts(walk: list[Lines]) -> list[Lines]:
    """Return lines without their last tiles, and these as lines of their own, where what is left fits shorter tiles."""
    pieces = []
    for lines in walk:
        whole = (lines.tiles - 1) * lines.tile
        blocks = power_of_2(cdiv(lines.n - whole, 16))
        if lines.table is not None or whole == 0 or blocks == lines.blocks:
            pieces.append(lines)
            continue
        pieces.append(lines._replace(n=whole, tiles=lines.tiles - 1))
        pieces.append(lines._replace(n=lines.n - whole, blocks=blocks, tiles=1, start=whole * lines.inner))
    return pieces


def key(walk: list[Lines]) -> tuple[Any, ...]:
    """Return what launches depend on."""
    return tuple((*line[:-1], line.table is None) for line in walk)
