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
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ndlightnet_kernels.launch import Launch, remembered
from ndlightnet_kernels.local_boxes import WARPS, Box, box_rows, by_axes, within
from ndlightnet_kernels.phases import MOST_AXES
from ndlightnet_kernels.tiles import cdiv, dense_empty, flags, form, power_of_2, scratch

Offsets = tuple[tuple[int, ...], ...]
# Taps that differ along the first axis only: their common displacement along the other axes, and
# (offset along the first axis, index of the tap) of each
Groups = tuple[tuple[tuple[int, ...], tuple[tuple[int, int], ...]], ...]

MOST_TAPS = 128
AT_ONCE = 9  # taps whose sums a program of the weights' gradient holds in registers
BYTES = 128  # of a token that a program reads: a line of the cache
# Programs of that gradient by the number of axes: constant, for the same bits on every card
PROGRAMS = (1056, 264, 264, 264)
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
def _shifted(
    cells, shape, steps, inside, GROUPS: tl.constexpr, g: tl.constexpr, AXES: tl.constexpr
):
    """Return by how many tokens a group's offset displaces the rows, and which are then inside the
    grid along the axes after the first."""
    shift = tl.full((), 0, tl.int64)
    for a in tl.static_range(1, AXES):
        if _displacement(GROUPS, g, a) != 0:
            inside = inside & within(cells[a] - _displacement(GROUPS, g, a), shape[a])
            shift -= steps[a] * _displacement(GROUPS, g, a)
    return shift, inside


@triton.jit
def _tile(
    x, mask, token, at, shift, here, here_col, STRIDE: tl.constexpr, PAIRS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Load a tile `shift` tokens after the rows at `at`, 0 where not `here` and for padding, as a
    tuple: with PAIRS (bfloat16) of the even and the odd channels, which takes one instruction for
    each number, else of all."""
    if MASKED:
        here = here & (tl.load(mask + token + shift, mask=here, other=0) != 0)
    where = here[:, None] & here_col[None, :]
    if PAIRS:
        words = (x + shift * STRIDE).to(tl.pointer_type(tl.int32), bitcast=True)
        word = tl.load(words + at, mask=where, other=0)
        odd = (word & -0x10000).to(tl.float32, bitcast=True)
        return (word << 16).to(tl.float32, bitcast=True), odd
    else:
        return (tl.load(x + shift * STRIDE + at, mask=where, other=0.0).to(tl.float32),)


@triton.jit
def _weights(row, col, here_col, N: tl.constexpr):
    """Load a tap's float32 weights as a tuple: N = 2: of the even and the odd channels."""
    if N == 2:  # as pairs: vectors of numbers that lie side by side
        pairs = row.to(tl.pointer_type(tl.int64), bitcast=True)
        pair = tl.load(pairs + col, mask=here_col, other=0)
        odd = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        return pair.to(tl.int32).to(tl.float32, bitcast=True), odd
    else:
        return (tl.load(row + col, mask=here_col, other=0.0),)


@triton.jit
def _add_tap(
    acc, m: tl.constexpr, tile, weight, col, here_col, TAP: tl.constexpr, DIM: tl.constexpr
):
    """Add a tap's product to the sums of frame m; nothing if TAP is -1."""
    if TAP >= 0:
        N: tl.constexpr = len(tile)
        weights = _weights(weight + TAP * DIM, col, here_col, N)
        for h in tl.static_range(len(tile)):
            acc = _replaced(acc, m * N + h, acc[m * N + h] + weights[h][None, :] * tile[h])
    return acc


@triton.jit
def _add_product(sums, tile, own, m: tl.constexpr, TAP: tl.constexpr):
    """Add the products of a tile and frame m of `own` to a tap's sums; nothing if TAP is -1."""
    if TAP >= 0:
        N: tl.constexpr = len(tile)
        for h in tl.static_range(len(tile)):
            value = sums[TAP * N + h] + tile[h] * own[m * N + h]
            sums = _replaced(sums, TAP * N + h, value)
    return sums


@triton.jit
def _store(
    out, acc, mask, token, offset, step, cell, size, inside, here_col, DIM: tl.constexpr,
    FRAMES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Store the sums of a row's frames; 0 for padding if there is a mask."""
    for m in tl.static_range(FRAMES):
        here = inside & (cell + m < size)
        if len(acc) == FRAMES:
            value = acc[m]
        else:
            pair = tl.join(acc[2 * m], acc[2 * m + 1])
            value = tl.reshape(pair, (pair.shape[0], 2 * pair.shape[1]))
        if MASKED:
            real = tl.load(mask + token + m * step, mask=here, other=0) != 0
            value = tl.where(real[:, None], value, 0.0)
        where = here[:, None] & here_col[None, :]
        tl.store(out + m * step * DIM + offset, value.to(out.dtype.element_ty), where)


@triton.jit
def _columns(DIM: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr):
    """Return the program's columns in units of N channels, and which exist."""
    col = tl.program_id(0) % ((DIM + BLOCK - 1) // BLOCK) * (BLOCK // N) + tl.arange(0, BLOCK // N)
    return col, col < DIM // N


@triton.jit(do_not_specialize=INTS)
def _mix(
    x, weight, mask, table, out, boxes, length, n0, n1, n2, n3, n4, n5, n6, n7,
    DIM: tl.constexpr, STRIDE: tl.constexpr, AXES: tl.constexpr, BOX: tl.constexpr,
    FRAMES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
    GROUPS: tl.constexpr,
    MASK_IN: tl.constexpr, MASK_OUT: tl.constexpr,
):  # fmt: skip
    """Compute u of one box. MASK_IN: padding is not read; MASK_OUT: its result is 0."""
    col, here_col = _columns(DIM, BLOCK, N)
    every, here_every = _columns(DIM, BLOCK, 1)
    sizes = (n0, n1, n2, n3, n4, n5, n6, n7)
    box = tl.program_id(0) // ((DIM + BLOCK - 1) // BLOCK)
    token, cells, shape, steps, inside = box_rows(
        box, table, sizes, length, AXES, BOX, FRAMES, ROWS
    )
    at = token[:, None] * (STRIDE // N) + col[None, :]
    acc = _zeros(FRAMES * N, ROWS, BLOCK // N)
    for g in tl.static_range(_groups(GROUPS)):
        shift, ok = _shifted(cells, shape, steps, inside, GROUPS, g, AXES)
        for p in tl.static_range(_lowest(GROUPS, g), _highest(GROUPS, g, FRAMES)):
            here = ok & within(cells[0] + p, shape[0])
            to = shift + p * steps[0]
            tile = _tile(x, mask, token, at, to, here, here_col, STRIDE, N == 2, MASK_IN)
            for m in tl.static_range(FRAMES):
                acc = _add_tap(acc, m, tile, weight, col, here_col, _tap(GROUPS, g, m - p), DIM)
    offset = token[:, None] * DIM + every[None, :]
    _store(
        out, acc, mask, token, offset, steps[0], cells[0], shape[0], inside, here_every, DIM,
        FRAMES, MASK_OUT,
    )  # fmt: skip


@triton.jit(do_not_specialize=INTS)
def _backward(
    du, x, weight, mask, table, dx, partial, boxes, length, n0, n1, n2, n3, n4, n5, n6, n7,
    DIM: tl.constexpr, STRIDE: tl.constexpr, AXES: tl.constexpr, BOX: tl.constexpr,
    FRAMES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
    GROUPS: tl.constexpr,
    TAPS: tl.constexpr, MASKED: tl.constexpr, DX: tl.constexpr,
):  # fmt: skip
    """Sum du_(t + o) x_t over many boxes for a set of taps, into partial (programs of a block of
    channels, TAPS, DIM). GROUPS: of these taps, with their offsets negated. DX: also compute dx,
    where the set is all taps."""
    blocks: tl.constexpr = (DIM + BLOCK - 1) // BLOCK
    slot, slots = tl.program_id(0) // blocks, tl.num_programs(0) // blocks
    col, here_col = _columns(DIM, BLOCK, N)
    every, here_every = _columns(DIM, BLOCK, 1)
    sizes = (n0, n1, n2, n3, n4, n5, n6, n7)
    sums = _zeros(TAPS * N, ROWS, BLOCK // N)
    for box in range(slot, boxes, slots):
        token, cells, shape, steps, inside = box_rows(
            box, table, sizes, length, AXES, BOX, FRAMES, ROWS
        )
        at = token[:, None] * (DIM // N) + col[None, :]
        mine = token[:, None] * (STRIDE // N) + col[None, :]
        own = ()
        for m in tl.static_range(FRAMES):
            here, to = inside & (cells[0] + m < shape[0]), m * steps[0]
            own = own + _tile(x, mask, token, mine, to, here, here_col, STRIDE, N == 2, MASKED)
        acc = _zeros(FRAMES * N, ROWS, BLOCK // N)
        for g in tl.static_range(_groups(GROUPS)):
            shift, ok = _shifted(cells, shape, steps, inside, GROUPS, g, AXES)
            for p in tl.static_range(_lowest(GROUPS, g), _highest(GROUPS, g, FRAMES)):
                here = ok & within(cells[0] + p, shape[0])
                to = shift + p * steps[0]
                tile = _tile(du, mask, token, at, to, here, here_col, DIM, N == 2, False)
                for m in tl.static_range(FRAMES):
                    sums = _add_product(sums, tile, own, m, _tap(GROUPS, g, m - p))
                    if DX:
                        acc = _add_tap(
                            acc, m, tile, weight, col, here_col, _tap(GROUPS, g, m - p), DIM
                        )
        if DX:
            offset = token[:, None] * DIM + every[None, :]
            _store(
                dx, acc, mask, token, offset, steps[0], cells[0], shape[0], inside, here_every,
                DIM, FRAMES, MASKED,
            )  # fmt: skip
    for k in tl.static_range(TAPS):
        for h in tl.static_range(N):
            to = partial + (slot * TAPS + k) * DIM + N * col + h
            tl.store(to, tl.sum(sums[k * N + h], 0), mask=here_col)


def supported(taps: int) -> str:
    """Return why there is no kernel; empty if there is one."""
    return "" if taps <= MOST_TAPS else f"{taps} taps: expected {MOST_TAPS} or fewer"


def _grouped(offsets: Sequence[tuple[int, ...]], sign: int) -> Groups:
    found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for tap, offset in enumerate(offsets):
        first, *rest = (sign * o for o in offset)
        found.setdefault(tuple(rest), []).append((first, tap))
    return tuple((rest, tuple(members)) for rest, members in found.items())


PAIR, WEIGHTS = 4, 8  # bytes of two bfloat16 and of two float32, which are read as one number


def _dense(x: Tensor, unit: int) -> Tensor:
    """Return x in one piece, at an address that is a multiple of `unit` bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % unit == 0 else x.clone()


def _rows(x: Tensor) -> Tensor:
    """Return x with tokens at one distance and dense channels, copied only if necessary: such as
    the values in a joint projection."""
    even = x.data_ptr() % PAIR == 0
    regular = x.stride(2) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    return x if regular and even else _dense(x, PAIR)


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
    pairs = x.dtype == torch.bfloat16 and dim % 2 == x.stride(1) % 2 == 0 and x.is_cuda
    return {
        "boxes": count, "length": x.shape[1], **{f"n{a}": n for a, n in enumerate(sizes)},
        "DIM": dim, "STRIDE": x.stride(1), "AXES": len(shape), "BOX": of.rows, "FRAMES": of.frames,
        "ROWS": torch.Size(of.rows).numel(), "BLOCK": block,
        "N": 2 if pairs else 1,
    }  # fmt: skip


def _launch(
    x: Tensor, mask: bool, shape: Sequence[int], boxes: Tensor | None, of: Box, offsets: Offsets,
    transposed: bool,
) -> Launch:  # fmt: skip
    how = _arguments(x, shape, boxes, of)
    groups = _grouped(offsets, -1 if transposed else 1)
    programs = how["boxes"] * cdiv(how["DIM"], how["BLOCK"])
    return Launch(
        _mix, (programs,), **how, GROUPS=groups, MASK_IN=mask and not transposed,
        MASK_OUT=mask and transposed, num_warps=WARPS,
    )  # fmt: skip


def mix(
    x: Tensor, weight: Tensor, mask: Tensor | None, shape: Sequence[int], boxes: Tensor | None,
    rows: Sequence[int], offsets: Offsets, transposed: bool = False,
) -> Tensor:  # fmt: skip
    """Return u (batch, length, dim). shape: the grid; of a pack any one of as many axes, with
    `boxes`, the table of its boxes. rows: the box, (frames, *rows). transposed: with the offsets
    negated and 0 for padding, as in the gradient of x."""
    x, weight, of = _rows(x), _dense(weight, WEIGHTS), Box(rows[0], tuple(rows[1:]))
    key = (*form(x), tuple(shape), boxes is not None and boxes.shape, of, offsets)
    launch = remembered(
        ("local_mixing", *key, mask is not None, transposed),
        lambda: _launch(x, mask is not None, shape, boxes, of, offsets, transposed),
    )
    out = dense_empty(x)
    launch(x, weight, flags(mask), boxes, out)
    return out


def _backward_launches(
    x: Tensor, mask: bool, shape: Sequence[int], boxes: Tensor | None, of: Box, offsets: Offsets
) -> list[tuple[Launch, int, int]]:
    """Return a launch for each set of taps, with their number and that of its partial sums."""
    how = _arguments(x, shape, boxes, of)
    blocks = cdiv(how["DIM"], how["BLOCK"])
    parts = max(1, min(how["boxes"], by_axes(PROGRAMS, len(shape)) // blocks))
    sets = cdiv(len(offsets), AT_ONCE)
    each = cdiv(len(offsets), sets)
    found = []
    for first in range(0, len(offsets), each):
        some = offsets[first : first + each]
        launch = Launch(
            _backward, (parts * blocks,), **how, GROUPS=_grouped(some, -1), TAPS=len(some),
            MASKED=mask, DX=sets == 1, num_warps=WARPS,
        )  # fmt: skip
        found.append((launch, len(some), parts))
    return found


def backward(
    du: Tensor, x: Tensor, weight: Tensor, mask: Tensor | None, shape: Sequence[int],
    boxes: Tensor | None, rows: Sequence[int], offsets: Offsets,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """Return the gradients of x and of weight (float32). Without dx if there are more taps than
    one pass takes: `mix` transposed computes it."""
    du, x, weight = _dense(du, PAIR), _rows(x), _dense(weight, WEIGHTS)
    of = Box(rows[0], tuple(rows[1:]))
    key = (*form(x), tuple(shape), boxes is not None and boxes.shape, of, offsets)
    launches = remembered(
        ("local_mixing_backward", *key, mask is not None),
        lambda: _backward_launches(x, mask is not None, shape, boxes, of, offsets),
    )
    dx = dense_empty(x) if len(launches) == 1 else None
    sums = []
    for launch, taps, parts in launches:
        partial = scratch(x, parts, taps, x.shape[-1])
        launch(du, x, weight, flags(mask), boxes, dx, partial)
        sums.append(partial.sum(0))
    return dx, sums[0] if len(sums) == 1 else torch.cat(sums)
