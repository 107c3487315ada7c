"""Local mixing: a depthwise convolution whose taps are any offsets on a grid of any number of axes.

    u_t = sum over i of w_i x_(t - o_i)

The work is to move x once; neighbours come from the caches. A program computes a box of tokens for
a few channels: every thread holds `FRAMES` successive frames of its cells, so that a loaded tile of
x serves all taps that differ along the first axis only, and the box is close to a cube, which has
few neighbours outside. Gradients are the same sums: of dx with the offsets negated, and of w_i from
the same tiles, du_(t + o_i) x_t, summed by each program over many boxes in registers, then over the
programs in a fixed order.
"""

# mypy: disable-error-code="assignment, var-annotated"
# (a jit function builds its tuples of tensors step by step)
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ndlightnet_kernels.launch import Launch, remembered
from ndlightnet_kernels.tiles import cdiv, flags, power_of_2, scratch

Offsets = tuple[tuple[int, ...], ...]
# Taps that differ along the first axis only: their common displacement along the other axes, and
# (offset along the first axis, index of the tap) of each
Groups = tuple[tuple[tuple[int, ...], tuple[tuple[int, int], ...]], ...]

MOST_AXES, MOST_TAPS = 8, 128
AT_ONCE = 9  # taps whose sums a program of the weights' gradient holds in registers
PROGRAMS = 1056  # of that gradient: a constant, so that it has the same bits on every card
BYTES = 128  # of a token that a program reads: a line of the cache
# Frames of a program, its rows of cells, warps
FORWARD, BACKWARD = (4, 32, 4), (2, 16, 4)
INTS = ["boxes", "length", "n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7"]


@triton.constexpr_function
def _groups(groups):
    return len(groups)


@triton.constexpr_function
def _displacement(groups, g, axis):
    """Return the offset of a group's taps along an axis after the first."""
    return groups[g][0][axis - 1]


@triton.constexpr_function
def _lowest(groups, g):
    """Return the first frame that a group reads, relative to the program's first frame."""
    return -max(o for o, _ in groups[g][1])


@triton.constexpr_function
def _highest(groups, g, frames):
    return frames - min(o for o, _ in groups[g][1])


@triton.constexpr_function
def _tap(groups, g, offset):
    """Return the index of a group's tap with this offset along the first axis, or -1."""
    return next((tap for o, tap in groups[g][1] if o == offset), -1)


@triton.constexpr_function
def _extent(box, axis, frames):
    return box[axis] * (frames if axis == 0 else 1)


@triton.jit
def _replaced(values, index: tl.constexpr, value):
    """Return a tuple with one entry replaced."""
    out = ()
    for i in tl.static_range(len(values)):
        out = out + ((value if i == index else values[i]),)
    return out


@triton.jit
def _zeros(count: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    out = ()
    for _ in tl.static_range(count):
        out = out + (tl.zeros((ROWS, BLOCK), tl.float32),)
    return out


@triton.jit
def _box(
    box, table, sizes, length, AXES: tl.constexpr, BOX: tl.constexpr, FRAMES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Return for the rows of a box their token in its first frame, their coordinates along all
    axes, the sizes of the sample's grid, and the tokens from cell to cell along each axis. table:
    of a pack, (boxes, 1 + 2 AXES): the sample's first token, its sizes, the box's first cell."""
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
    cells, steps = (), ()
    for a in tl.static_range(AXES - 1, -1, -1):
        cell = starts[a] + row % BOX[a] * (FRAMES if a == 0 else 1)
        row = row // BOX[a]
        token += cell * step
        cells, steps = (cell,) + cells, (step,) + steps
        step = step * shape[a]
    return token, cells, shape, steps


@triton.jit
def _shifted(token, cells, shape, steps, GROUPS: tl.constexpr, g: tl.constexpr, AXES: tl.constexpr):
    """Return the rows' tokens displaced by a group's offset, and which are inside the grid along
    the axes after the first."""
    ok = cells[0] < shape[0]
    for a in tl.static_range(1, AXES):
        ok = ok & (cells[a] < shape[a])
        if _displacement(GROUPS, g, a) != 0:
            source = cells[a] - _displacement(GROUPS, g, a)
            ok = ok & (source >= 0) & (source < shape[a])
            token = token - steps[a] * _displacement(GROUPS, g, a)
    return token, ok


@triton.jit
def _tile(x, mask, token, cell, size, step, ok, col, p, DIM: tl.constexpr, MASKED: tl.constexpr):
    """Load a tile of frame `p` after the rows' first one; 0 outside the grid and for padding."""
    here = ok & (cell + p >= 0) & (cell + p < size)
    at = token + p * step
    if MASKED:
        here = here & (tl.load(mask + at, mask=here, other=0) != 0)
    where = here[:, None] & (col < DIM)[None, :]
    return tl.load(x + at[:, None] * DIM + col[None, :], mask=where, other=0.0).to(tl.float32)


@triton.jit
def _store(out, acc, token, cell, size, step, ok, col, mask, DIM: tl.constexpr, M: tl.constexpr):
    """Store the sums of a row's frames; 0 for padding if there is a mask."""
    for m in tl.static_range(len(acc)):
        here, at, value = ok & (cell + m < size), token + m * step, acc[m]
        if M:
            real = tl.load(mask + at, mask=here, other=0) != 0
            value = tl.where(real[:, None], value, 0.0)
        where = here[:, None] & (col < DIM)[None, :]
        tl.store(out + at[:, None] * DIM + col[None, :], value.to(out.dtype.element_ty), where)


@triton.jit
def _add_tap(acc, m: tl.constexpr, tile, weight, col, TAP: tl.constexpr, DIM: tl.constexpr):
    """Add a tap's product to the sum of frame m; nothing if TAP is -1."""
    if TAP >= 0:
        w = tl.load(weight + TAP * DIM + col, mask=col < DIM, other=0.0)
        acc = _replaced(acc, m, acc[m] + w[None, :] * tile)
    return acc


@triton.jit
def _add_product(sums, tile, own, TAP: tl.constexpr, FIRST: tl.constexpr):
    """Add a product of tiles to a tap's sum; nothing if TAP is -1."""
    if TAP >= 0:
        sums = _replaced(sums, TAP - FIRST, sums[TAP - FIRST] + tile * own)
    return sums


@triton.jit(do_not_specialize=INTS)
def _mix(
    x, weight, mask, table, out, boxes, length, n0, n1, n2, n3, n4, n5, n6, n7,
    DIM: tl.constexpr, AXES: tl.constexpr, BOX: tl.constexpr, FRAMES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, MASK_IN: tl.constexpr,
    MASK_OUT: tl.constexpr,
):  # fmt: skip
    """Compute u of one box. MASK_IN: padding is not read; MASK_OUT: its result is 0."""
    blocks: tl.constexpr = (DIM + BLOCK - 1) // BLOCK
    col = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    sizes = (n0, n1, n2, n3, n4, n5, n6, n7)
    token, cells, shape, steps = _box(
        tl.program_id(0) // blocks, table, sizes, length, AXES, BOX, FRAMES, ROWS
    )
    acc = _zeros(FRAMES, ROWS, BLOCK)
    for g in tl.static_range(_groups(GROUPS)):
        at, ok = _shifted(token, cells, shape, steps, GROUPS, g, AXES)
        for p in tl.static_range(_lowest(GROUPS, g), _highest(GROUPS, g, FRAMES)):
            tile = _tile(x, mask, at, cells[0], shape[0], steps[0], ok, col, p, DIM, MASK_IN)
            for m in tl.static_range(FRAMES):
                acc = _add_tap(acc, m, tile, weight, col, _tap(GROUPS, g, m - p), DIM)
    ok = cells[0] < shape[0]
    for a in tl.static_range(1, AXES):
        ok = ok & (cells[a] < shape[a])
    _store(out, acc, token, cells[0], shape[0], steps[0], ok, col, mask, DIM, MASK_OUT)


@triton.jit(do_not_specialize=INTS)
def _backward(
    du, x, weight, mask, table, dx, partial, boxes, length, n0, n1, n2, n3, n4, n5, n6, n7,
    DIM: tl.constexpr, AXES: tl.constexpr, BOX: tl.constexpr, FRAMES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, FIRST: tl.constexpr,
    TAPS: tl.constexpr, MASKED: tl.constexpr, DX: tl.constexpr,
):  # fmt: skip
    """Sum du_(t + o) x_t over many boxes for TAPS taps from FIRST on, into partial (programs of a
    block of channels, TAPS, DIM). GROUPS: of these taps with their offsets negated. DX: also
    compute dx."""
    blocks: tl.constexpr = (DIM + BLOCK - 1) // BLOCK
    slot, slots = tl.program_id(0) // blocks, tl.num_programs(0) // blocks
    col = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    sizes = (n0, n1, n2, n3, n4, n5, n6, n7)
    sums = _zeros(TAPS, ROWS, BLOCK)
    for box in range(slot, boxes, slots):
        token, cells, shape, steps = _box(box, table, sizes, length, AXES, BOX, FRAMES, ROWS)
        inside = cells[0] < shape[0]
        for a in tl.static_range(1, AXES):
            inside = inside & (cells[a] < shape[a])
        own = ()
        for m in tl.static_range(FRAMES):
            tile = _tile(x, mask, token, cells[0], shape[0], steps[0], inside, col, m, DIM, MASKED)
            own = own + (tile,)
        acc = _zeros(FRAMES, ROWS, BLOCK)
        for g in tl.static_range(_groups(GROUPS)):
            at, ok = _shifted(token, cells, shape, steps, GROUPS, g, AXES)
            for p in tl.static_range(_lowest(GROUPS, g), _highest(GROUPS, g, FRAMES)):
                tile = _tile(du, mask, at, cells[0], shape[0], steps[0], ok, col, p, DIM, False)
                for m in tl.static_range(FRAMES):
                    sums = _add_product(sums, tile, own[m], _tap(GROUPS, g, m - p), FIRST)
                    if DX:
                        acc = _add_tap(acc, m, tile, weight, col, _tap(GROUPS, g, m - p), DIM)
        if DX:
            _store(dx, acc, token, cells[0], shape[0], steps[0], inside, col, mask, DIM, MASKED)
    for k in tl.static_range(TAPS):
        at = (slot * TAPS + k) * DIM + col
        tl.store(partial + at, tl.sum(sums[k], 0), mask=col < DIM)


def supported(taps: int) -> str:
    """Return why there is no kernel; empty if there is one."""
    return "" if taps <= MOST_TAPS else f"{taps} taps: expected {MOST_TAPS} or fewer"


class Box(NamedTuple):
    """What a program computes: `frames` successive frames of each row of cells, and how many rows
    lie along each axis (powers of two)."""

    frames: int
    rows: tuple[int, ...]

    @property
    def extents(self) -> tuple[int, ...]:
        return (self.frames * self.rows[0], *self.rows[1:])


def box(shape: Sequence[int], backward: bool = False) -> Box:
    """Return the box for grids up to this shape: nearly a cube, no longer than the grid along any
    axis."""
    frames, count, _ = BACKWARD if backward else FORWARD
    frames = min(frames, power_of_2(shape[0]))
    rows = [1] * len(shape)
    while count > 1:
        extents = [frames * rows[0], *rows[1:]]
        short = [a for a, size in enumerate(shape) if extents[a] < size]
        # the shortest extent, of equal ones the last axis
        axis = min(short, key=lambda a: (extents[a], -a)) if short else len(shape) - 1
        rows[axis] *= 2
        count //= 2
    return Box(frames, tuple(rows))


def table(shapes: Sequence[Sequence[int]], firsts: Sequence[int], of: Box) -> Tensor:
    """Return the boxes of a pack's samples, (boxes, 1 + 2 axes) int64; see `_box`."""
    parts = []
    for shape, first in zip(shapes, firsts, strict=True):
        starts = [torch.arange(0, n, extent) for n, extent in zip(shape, of.extents, strict=True)]
        grid = torch.cartesian_prod(*starts).reshape(-1, len(shape))
        fixed = torch.tensor([first, *shape]).expand(len(grid), -1)
        parts.append(torch.cat([fixed, grid], 1))
    return torch.cat(parts)


def _grouped(offsets: Offsets, sign: int, taps: range) -> Groups:
    found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for tap in taps:
        first, *rest = (sign * o for o in offsets[tap])
        found.setdefault(tuple(rest), []).append((first, tap))
    return tuple((rest, tuple(members)) for rest, members in found.items())


def _arguments(x: Tensor, shape: Sequence[int], boxes: Tensor | None, of: Box) -> dict[str, Any]:
    """Return the arguments that both kernels share."""
    dim, sizes = x.shape[-1], [int(n) for n in shape]
    count = 0 if boxes is None else boxes.shape[0]
    if boxes is None:
        count = x.shape[0]
        for size, extent in zip(sizes, of.extents, strict=True):
            count *= cdiv(size, extent)
    sizes += [None] * (MOST_AXES - len(sizes))  # type: ignore[list-item]
    block = min(power_of_2(dim), BYTES // x.element_size())
    return {
        "boxes": count, "length": x.shape[1], **{f"n{a}": n for a, n in enumerate(sizes)},
        "DIM": dim, "AXES": len(shape), "BOX": of.rows, "FRAMES": of.frames,
        "ROWS": torch.Size(of.rows).numel(), "BLOCK": block,
    }  # fmt: skip


def _launch(
    x: Tensor, mask: bool, shape: Sequence[int], boxes: Tensor | None, of: Box, offsets: Offsets,
    transposed: bool,
) -> Launch:  # fmt: skip
    how = _arguments(x, shape, boxes, of)
    groups = _grouped(offsets, -1 if transposed else 1, range(len(offsets)))
    programs = how["boxes"] * cdiv(how["DIM"], how["BLOCK"])
    return Launch(
        _mix, (programs,), **how, GROUPS=groups, MASK_IN=mask and not transposed,
        MASK_OUT=mask and transposed, num_warps=FORWARD[2],
    )  # fmt: skip


def mix(
    x: Tensor, weight: Tensor, mask: Tensor | None, shape: Sequence[int], boxes: Tensor | None,
    rows: Sequence[int], offsets: Offsets, transposed: bool = False,
) -> Tensor:  # fmt: skip
    """Return u (batch, length, dim). shape: the grid; of a pack any one of as many axes, with
    `boxes`, the table of its boxes. rows: the box, (frames, *rows). transposed: with the offsets
    negated and 0 for padding, as in the gradient of x."""
    x, of = x.contiguous(), Box(rows[0], tuple(rows[1:]))
    key = (x.device, x.dtype, x.shape, tuple(shape), boxes is not None and boxes.shape, of, offsets)
    launch = remembered(
        ("local_mixing", *key, mask is not None, transposed),
        lambda: _launch(x, mask is not None, shape, boxes, of, offsets, transposed),
    )
    out = torch.empty_like(x)
    launch(x, weight, flags(mask), boxes, out)
    return out


def _backward_launches(
    x: Tensor, mask: bool, shape: Sequence[int], boxes: Tensor | None, of: Box, offsets: Offsets
) -> list[tuple[Launch, int, int]]:
    """Return a launch for each set of taps, with its number of taps and its parts of sums."""
    how = _arguments(x, shape, boxes, of)
    blocks = cdiv(how["DIM"], how["BLOCK"])
    parts = max(1, min(how["boxes"], PROGRAMS // blocks))
    sets = cdiv(len(offsets), AT_ONCE)
    each = cdiv(len(offsets), sets)
    found = []
    for first in range(0, len(offsets), each):
        taps = range(first, min(first + each, len(offsets)))
        launch = Launch(
            _backward, (parts * blocks,), **how, GROUPS=_grouped(offsets, -1, taps), FIRST=first,
            TAPS=len(taps), MASKED=mask, DX=sets == 1, num_warps=BACKWARD[2],
        )  # fmt: skip
        found.append((launch, len(taps), parts))
    return found


def backward(
    du: Tensor, x: Tensor, weight: Tensor, mask: Tensor | None, shape: Sequence[int],
    boxes: Tensor | None, rows: Sequence[int], offsets: Offsets,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """Return the gradients of x and of weight (float32). Without dx if there are more taps than
    one pass takes: `mix` transposed computes it."""
    du, x, of = du.contiguous(), x.contiguous(), Box(rows[0], tuple(rows[1:]))
    key = (x.device, x.dtype, x.shape, tuple(shape), boxes is not None and boxes.shape, of, offsets)
    launches = remembered(
        ("local_mixing_backward", *key, mask is not None),
        lambda: _backward_launches(x, mask is not None, shape, boxes, of, offsets),
    )
    dx = torch.empty_like(x) if len(launches) == 1 else None
    sums = []
    for launch, taps, parts in launches:
        partial = scratch(x, parts, taps, x.shape[-1])
        launch(du, x, weight, flags(mask), boxes, dx, partial)
        sums.append(partial.sum(0))
    return dx, sums[0] if len(sums) == 1 else torch.cat(sums)
