"""Local mixing: a depthwise convolution whose taps are any offsets on a grid of any number of axes.

    u_t = sum over i of w_i x_(t - o_i)

The work is to move x once; neighbours come from the caches. A program computes a box of tokens for
a few channels: every thread holds a patch of successive cells for each of its rows, so that a
loaded tile of x serves all taps between it and the patch, and the box is close to a cube, which has
few neighbours outside. Along the last axis the tokens of a patch lie at distances that are compiled
in: their addresses cost nothing. Gradients are the same sums: of dx with the offsets negated, and
of w_i from the same tiles, du_(t + o_i) x_t, summed by each program over many boxes in registers,
then over the programs in a fixed order.
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
from ndlightnet_kernels.local_boxes import Box, Plan, box_place, box_rows, next_place, plan
from ndlightnet_kernels.local_lines import (
    Offsets,
    cell_count,
    cell_of,
    line_at,
    line_count,
    line_rows,
    lines,
    tap_of,
    tile_at,
    tile_count,
    tile_rows,
)
from ndlightnet_kernels.phases import MOST_AXES
from ndlightnet_kernels.sums import sum_rows
from ndlightnet_kernels.tiles import cdiv, dense_empty, flags, form, power_of_2, scratch

MOST_TAPS = 128
INTS = ["boxes", "each", "length", "n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7"]


@triton.jit
def _zeros(count: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    out = ()
    for _ in tl.static_range(count):
        out = out + (tl.zeros((ROWS, BLOCK), tl.float32),)
    return out


@triton.jit
def _pointers(x, shift, at, STRIDE: tl.constexpr, N: tl.constexpr):
    """Return pointers to the numbers, or with N = 2 to the pairs, of the rows displaced by `shift` tokens."""
    if N == 2:
        return (x + shift * STRIDE).to(tl.pointer_type(tl.int32), bitcast=True) + at
    else:
        return x + shift * STRIDE + at


@triton.jit
def _tile(pointers, mask, token, P, in_row, in_dim, STRIDE, N, MASKED):
    """Load the tile P tokens after a line's pointers, 0 where not `in_row` and for padding, as a tuple: with N = 2
    (bfloat16) of the even and the odd channels, which takes one instruction for each number, else of all."""
    if MASKED:
        in_row = in_row & (tl.load(mask + token + P, mask=in_row, other=0) != 0)
    valid = in_row[:, None] & in_dim[None, :]
    if N == 2:
        word = tl.load(pointers + P * (STRIDE // 2), mask=valid, other=0)
        odd = (word & -0x10000).to(tl.float32, bitcast=True)
        return (word << 16).to(tl.float32, bitcast=True), odd
    else:
        return (tl.load(pointers + P * STRIDE, mask=valid, other=0.0).to(tl.float32),)


@triton.jit
def _weights(row, col, in_dim, N: tl.constexpr):
    """Load a tap's float32 weights as a tuple: N = 2: of the even and the odd channels."""
    if N == 2:  # as pairs: vectors of numbers that lie side by side
        pairs = row.to(tl.pointer_type(tl.int64), bitcast=True)
        pair = tl.load(pairs + col, mask=in_dim, other=0)
        odd = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        return pair.to(tl.int32).to(tl.float32, bitcast=True), odd
    else:
        return (tl.load(row + col, mask=in_dim, other=0.0),)


@triton.jit
def _add_taps(acc, tile, weight, col, in_dim, LINES: tl.constexpr, g: tl.constexpr, t: tl.constexpr, DIM: tl.constexpr):
    """Add the products of a tile and the weights of its taps to the sums of their cells."""
    N: tl.constexpr = len(tile)
    out = ()
    for cell in tl.static_range(len(acc) // N):
        if tap_of(LINES, g, t, cell) >= 0:
            weights = _weights(weight + tap_of(LINES, g, t, cell) * DIM, col, in_dim, N)
            for h in tl.static_range(N):
                out = out + (acc[cell * N + h] + weights[h][None, :] * tile[h],)
        else:
            for h in tl.static_range(N):
                out = out + (acc[cell * N + h],)
    return out


@triton.jit
def _add_products(sums, tile, centre, LINES: tl.constexpr, g: tl.constexpr, t: tl.constexpr):
    """Add the products of a tile and the cells that read it to the sums of their taps."""
    N: tl.constexpr = len(tile)
    out = ()
    for tap in tl.static_range(len(sums) // N):
        if cell_of(LINES, g, t, tap) >= 0:
            for h in tl.static_range(N):
                mine = centre[cell_of(LINES, g, t, tap) * N + h]
                out = out + (sums[tap * N + h] + tile[h] * mine,)
        else:
            for h in tl.static_range(N):
                out = out + (sums[tap * N + h],)
    return out


@triton.jit
def _store(out, acc, mask, token, col, cells, shape, steps, in_dim, TO, AXES, WHOLE, OWN, MASKED):
    """Store the sums of the patches' cells; 0 for padding if there is a mask."""
    N: tl.constexpr = len(acc) // (line_count(OWN) * tile_count(OWN, 0))
    for g in tl.static_range(line_count(OWN)):
        shift, line = line_rows(cells, shape, steps, line_at(OWN, g), AXES)
        at = out + shift * TO + (token[:, None] * TO + col[None, :])
        for p in tl.static_range(tile_count(OWN, g)):
            in_row = tile_rows(line, cells[AXES - 1], shape[AXES - 1], p, WHOLE)
            if N == 1:
                value = acc[cell_of(OWN, g, p, 0)]
            else:
                pair = tl.join(acc[2 * cell_of(OWN, g, p, 0)], acc[2 * cell_of(OWN, g, p, 0) + 1])
                value = tl.reshape(pair, (pair.shape[0], 2 * pair.shape[1]))
            if MASKED:
                real = tl.load(mask + token + shift + p, mask=in_row, other=0) != 0
                value = tl.where(real[:, None], value, 0.0)
            valid = in_row[:, None] & in_dim[None, :]
            tl.store(at + p * TO, value.to(out.dtype.element_ty), valid)


@triton.jit
def _columns(DIM: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr):
    """Return the program's columns in units of N channels, and which exist."""
    col = tl.program_id(0) % ((DIM + BLOCK - 1) // BLOCK) * (BLOCK // N) + tl.arange(0, BLOCK // N)
    return col, col < (DIM // N if DIM % BLOCK else 1 << 30)


@triton.jit(do_not_specialize=INTS)
def _mix(
    x,
    weight,
    mask,
    table,
    out,
    boxes,
    each,
    length,
    n0,
    n1,
    n2,
    n3,
    n4,
    n5,
    n6,
    n7,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    TO: tl.constexpr,
    AXES: tl.constexpr,
    BOX: tl.constexpr,
    PATCH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
    WHOLE: tl.constexpr,
    OWN: tl.constexpr,
    LINES: tl.constexpr,
    MASK_IN: tl.constexpr,
    MASK_OUT: tl.constexpr,
):
    """Compute u of `each` successive boxes. STRIDE, TO: from token to token of x and of u. WHOLE: how many cells of a
    patch's line are inside the grid if the first one is. MASK_IN: padding is not read; MASK_OUT: its result is 0."""
    col, in_dim = _columns(DIM, BLOCK, N)
    every, here_every = _columns(DIM, BLOCK, 1)
    sizes = (n0, n1, n2, n3, n4, n5, n6, n7)
    first = tl.program_id(0) // ((DIM + BLOCK - 1) // BLOCK) * each
    place = box_place(first, sizes, AXES, BOX, PATCH)
    for box in range(first, tl.minimum(first + each, boxes)):
        token, cells, shape, steps = box_rows(box, place, table, sizes, length, AXES, BOX, PATCH, ROWS)
        at = token[:, None] * (STRIDE // N) + col[None, :]
        acc = _zeros(cell_count(PATCH) * N, ROWS, BLOCK // N)
        for g in tl.static_range(line_count(LINES)):
            shift, line = line_rows(cells, shape, steps, line_at(LINES, g), AXES)
            here_x, in_range = _pointers(x, shift, at, STRIDE, N), token + shift
            for t in tl.static_range(tile_count(LINES, g)):
                in_row = tile_rows(line, cells[AXES - 1], shape[AXES - 1], tile_at(LINES, g, t), WHOLE)
                tile = _tile(here_x, mask, in_range, tile_at(LINES, g, t), in_row, in_dim, STRIDE, N, MASK_IN)
                acc = _add_taps(acc, tile, weight, col, in_dim, LINES, g, t, DIM)
        _store(out, acc, mask, token, every, cells, shape, steps, here_every, TO, AXES, WHOLE, OWN, MASK_OUT)
        place = next_place(place, sizes, AXES, BOX, PATCH)


@triton.jit(do_not_specialize=INTS)
def _backward(
    du,
    x,
    weight,
    mask,
    table,
    dx,
    partial,
    boxes,
    each,
    length,
    n0,
    n1,
    n2,
    n3,
    n4,
    n5,
    n6,
    n7,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    TO: tl.constexpr,
    AXES: tl.constexpr,
    BOX: tl.constexpr,
    PATCH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
    WHOLE: tl.constexpr,
    OWN: tl.constexpr,
    LINES: tl.constexpr,
    TAPS: tl.constexpr,
    MASKED: tl.constexpr,
    DX: tl.constexpr,
):
    """Sum du_(t + o) x_t over `each` successive boxes for a set of taps, into partial (programs of a block of channels,
    TAPS, DIM). LINES: of these taps, with their offsets negated. DX: also compute dx, where the set is all taps."""
    blocks: tl.constexpr = (DIM + BLOCK - 1) // BLOCK
    slot = tl.program_id(0) // blocks
    col, in_dim = _columns(DIM, BLOCK, N)
    every, here_every = _columns(DIM, BLOCK, 1)
    sizes = (n0, n1, n2, n3, n4, n5, n6, n7)
    sums = _zeros(TAPS * N, ROWS, BLOCK // N)
    place = box_place(slot * each, sizes, AXES, BOX, PATCH)
    for box in range(slot * each, tl.minimum(slot * each + each, boxes)):
        token, cells, shape, steps = box_rows(box, place, table, sizes, length, AXES, BOX, PATCH, ROWS)
        at = token[:, None] * (DIM // N) + col[None, :]
        mine = token[:, None] * (STRIDE // N) + col[None, :]
        centre = ()
        for g in tl.static_range(line_count(OWN)):
            shift, line = line_rows(cells, shape, steps, line_at(OWN, g), AXES)
            here_x, in_range = _pointers(x, shift, mine, STRIDE, N), token + shift
            for p in tl.static_range(tile_count(OWN, g)):
                in_row = tile_rows(line, cells[AXES - 1], shape[AXES - 1], p, WHOLE)
                centre = centre + _tile(here_x, mask, in_range, p, in_row, in_dim, STRIDE, N, MASKED)
        acc = _zeros(cell_count(PATCH) * N, ROWS, BLOCK // N)
        for g in tl.static_range(line_count(LINES)):
            shift, line = line_rows(cells, shape, steps, line_at(LINES, g), AXES)
            here_du = _pointers(du, shift, at, DIM, N)
            for t in tl.static_range(tile_count(LINES, g)):
                in_row = tile_rows(line, cells[AXES - 1], shape[AXES - 1], tile_at(LINES, g, t), WHOLE)
                tile = _tile(here_du, mask, token, tile_at(LINES, g, t), in_row, in_dim, DIM, N, False)
                sums = _add_products(sums, tile, centre, LINES, g, t)
                if DX:
                    acc = _add_taps(acc, tile, weight, col, in_dim, LINES, g, t, DIM)
        if DX:
            _store(dx, acc, mask, token, every, cells, shape, steps, here_every, TO, AXES, WHOLE, OWN, MASKED)
        place = next_place(place, sizes, AXES, BOX, PATCH)
    for k in tl.static_range(TAPS):
        for h in tl.static_range(N):
            to = partial + (slot * TAPS + k) * DIM + N * col + h
            tl.store(to, tl.sum(sums[k * N + h], 0), mask=in_dim)


def supported(taps: int) -> str:
    """Return why there is no kernel; empty if there is one."""
    return "" if taps <= MOST_TAPS else f"{taps} taps: expected {MOST_TAPS} or fewer"


PAIR, WEIGHTS = 4, 8  # bytes of two bfloat16 and of two float32, which are read as one number


def _dense(x: Tensor, unit: int) -> Tensor:
    """Return x in one piece, at an address that is a multiple of `unit` bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % unit == 0 else x.clone()


def _rows(x: Tensor) -> Tensor:
    """Return x with tokens at one distance and dense channels, copied only if necessary: such as
    the values in a joint projection."""
    even = x.data_ptr() % PAIR == 0
    regular = x.stride(2) == 1 and (1 in x.shape[:2] or x.stride(0) == x.shape[1] * x.stride(1))
    return x if regular and even else _dense(x, PAIR)


def _stride(x: Tensor) -> int:
    """Return the distance from token to token; the stride of an axis of size 1 may be any."""
    return x.stride(1 if x.shape[1] > 1 else 0)


def _arguments(x: Tensor, shape: Sequence[int], boxes: Tensor | None, of: Box, chosen: Plan) -> dict[str, Any]:
    """Return the arguments that both kernels share."""
    dim, sizes = x.shape[-1], [int(n) for n in shape]
    count = 0 if boxes is None else boxes.shape[0]
    if boxes is None:
        count = x.shape[0]
        for size, extent in zip(sizes, of.extents, strict=True):
            count *= cdiv(size, extent)
    block = min(power_of_2(dim), chosen.bytes // x.element_size())
    pairs = x.dtype == torch.bfloat16 and dim % 2 == _stride(x) % 2 == 0
    return {
        "boxes": count,
        "length": x.shape[1],
        **{f"n{a}": n for a, n in enumerate(sizes)},
        **{f"n{a}": None for a in range(len(sizes), MOST_AXES)},
        "DIM": dim,
        "STRIDE": _stride(x),
        "AXES": len(shape),
        "BOX": of.rows,
        "PATCH": of.patch,
        "ROWS": torch.Size(of.rows).numel(),
        "BLOCK": block,
        "N": 2 if pairs else 1,
        "WHOLE": of.patch[-1] if boxes is None and sizes[-1] % of.patch[-1] == 0 else 1,
        "OWN": lines(((0,) * len(shape),), of.patch),
        "num_warps": chosen.warps,
        "maxnreg": chosen.registers or None,
    }


def _launch(
    x: Tensor,
    out: Tensor,
    mask: bool,
    shape: Sequence[int],
    boxes: Tensor | None,
    of: Box,
    offsets: Offsets,
    transposed: bool,
) -> Launch:
    chosen = plan(len(shape), len(offsets))
    common = _arguments(x, shape, boxes, of, chosen)
    programs = cdiv(common["boxes"], chosen.boxes) * cdiv(common["DIM"], common["BLOCK"])
    read = lines(offsets, of.patch, -1 if transposed else 1)
    masks = {"MASK_IN": mask and not transposed, "MASK_OUT": mask and transposed}
    return Launch(_mix, (programs,), **common, TO=_stride(out), each=chosen.boxes, LINES=read, **masks)


def mix(
    x: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    shape: Sequence[int],
    boxes: Tensor | None,
    box: Sequence[int],
    offsets: Offsets,
    transposed: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return u (batch, length, dim). shape: the grid; of a pack any one of as many axes, with
    `boxes`, the table of its boxes. box: its patch and its rows along all axes. transposed: with
    the offsets negated and 0 for padding, as in the gradient of x. out: where u is written, as rows at one distance."""
    x, weight, of = _rows(x), _dense(weight, WEIGHTS), Box.of(box)
    out = dense_empty(x) if out is None else out
    key = (*form(x, out), tuple(shape), boxes is not None and boxes.shape, of, offsets)
    launch = remembered(
        ("local_mixing", *key, mask is not None, transposed),
        lambda: _launch(x, out, mask is not None, shape, boxes, of, offsets, transposed),
    )
    launch(x, weight, flags(mask), boxes, out)
    return out


def _backward_launches(
    x: Tensor, dx: Tensor, mask: bool, shape: Sequence[int], boxes: Tensor | None, of: Box, offsets: Offsets
) -> list[tuple[Launch, int, int]]:
    """Return a launch for each set of taps, with their number and that of its partial sums."""
    chosen = plan(len(shape), len(offsets), backward=True)
    common = _arguments(x, shape, boxes, of, chosen)
    blocks = cdiv(common["DIM"], common["BLOCK"])
    count = max(1, cdiv(common["boxes"], max(1, chosen.programs // blocks)))
    slots = max(1, cdiv(common["boxes"], count))
    sets = cdiv(len(offsets), chosen.taps)
    each = cdiv(len(offsets), sets)
    launches = []
    for first in range(0, len(offsets), each):
        some = offsets[first : first + each]
        taps = {"LINES": lines(some, of.patch, -1), "TAPS": len(some), "MASKED": mask, "DX": sets == 1}
        launch = Launch(_backward, (slots * blocks,), **common, TO=_stride(dx), each=count, **taps)
        launches.append((launch, len(some), slots))
    return launches


def backward(
    du: Tensor,
    x: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    shape: Sequence[int],
    boxes: Tensor | None,
    box: Sequence[int],
    offsets: Offsets,
    dx: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Return the gradients of x and of weight (float32). Without that of x if there are more taps than
    one pass takes: `mix` transposed computes it. dx: where it is written, as rows at one distance."""
    du, x, weight, of = _dense(du, PAIR), _rows(x), _dense(weight, WEIGHTS), Box.of(box)
    dx = dense_empty(x) if dx is None else dx
    key = (*form(x, dx), tuple(shape), boxes is not None and boxes.shape, of, offsets)
    launches = remembered(
        ("local_mixing_backward", *key, mask is not None),
        lambda: _backward_launches(x, dx, mask is not None, shape, boxes, of, offsets),
    )
    sums = []
    for launch, taps, slots in launches:
        partial = scratch(x, slots, taps, x.shape[-1])
        launch(du, x, weight, flags(mask), boxes, dx, partial)
        sums.append(sum_rows(partial.view(1, 1, slots, -1)).view(taps, -1))
    return (dx, sums[0]) if len(sums) == 1 else (None, torch.cat(sums))
