"""MD-LRPE angles on any number of axes: two small tables, found from a token's flat index.

The grid is cut at one axis: a token's flat index gives a row of the first table (the axes up to
there) and one of the second (the axes after it), each with about the square root of the number of
tokens. A row holds (cos, sin) of coordinate x theta for the slots of its axes and zero bits for the
others, so two rows are joined by OR. Where an axis is too long for one table it is written in two
digits; then each table holds the identity for other slots, and the two rotations are multiplied.
16-bit inputs: cos and sin as two float16 in one int32. float32 inputs: two planes of float32 bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_AXES = 8
NUMBERS = 14  # in `meta`
SMALL = 512  # rows of a table that always fit in the cache near a multiprocessor


def _fits(rows: int, length: int, small: int) -> bool:
    return rows <= small or rows**2 <= length


class Cut(NamedTuple):
    """Where the grid is cut: at `axis`, whose coordinate is high * digit + low."""

    axis: int
    digit: int
    highs: int
    inner: int  # tokens in the axes after it
    first: int  # rows of the first table
    second: int

    @staticmethod
    def of(shape: list[int]) -> Cut:
        length = math.prod(shape)
        # products in place of roots: under torch.compile sizes may be symbols
        axis = next(a for a in range(len(shape)) if _fits(math.prod(shape[a + 1 :]), length, SMALL))
        inner, digit = math.prod(shape[axis + 1 :]), 1
        if not _fits(length // (8 * inner), length, SMALL):
            digit = max(1, SMALL // inner)
            while (digit * inner) ** 2 < length:
                digit *= 2
        highs = -(-shape[axis] // digit)
        return Cut(axis, digit, highs, inner, math.prod(shape[:axis]) * highs, digit * inner)


@triton.jit
def _pick(a: tl.constexpr, n0, n1, n2, n3, n4, n5, n6, n7):
    low = n0 if a == 0 else n1 if a == 1 else n2 if a == 2 else n3
    high = n4 if a == 4 else n5 if a == 5 else n6 if a == 6 else n7
    return low if a < 4 else high


@triton.jit
def _group(slot, a: tl.constexpr, AXES: tl.constexpr, SLOTS: tl.constexpr):
    """Whether a slot turns along axis `a`: consecutive groups that differ by one at most."""
    first = a * (SLOTS // AXES) + min(a, SLOTS % AXES)
    return (slot >= first) & (slot < first + SLOTS // AXES + (1 if a < SLOTS % AXES else 0))


@triton.jit
def _store_divisor(meta, at: tl.constexpr, divisor):
    """Division by it becomes a product and a shift, exact below 2^31."""
    bits = divisor * 0  # ceil(log2(divisor))
    for bit in tl.static_range(31):
        bits += ((divisor - 1) >> bit > 0).to(tl.int32)
    one = divisor.to(tl.int64) * 0 + 1
    tl.store(meta + at, divisor)
    tl.store(meta + at + 1, (one << (31 + bits)) // divisor + 1)
    tl.store(meta + at + 2, tl.maximum(bits, 1) - 1)


@triton.jit
def _divisor(meta, at: tl.constexpr):
    return (
        tl.load(meta + at).to(tl.int32), tl.load(meta + at + 1).to(tl.uint32),
        tl.load(meta + at + 2).to(tl.uint32),
    )  # fmt: skip


@triton.jit
def _divide(t, by):
    """Quotient and remainder of int32 t by a divisor of `meta`."""
    divisor, magic, shift = by
    quotient = (tl.umulhi(t.to(tl.uint32), magic) >> shift).to(tl.int32)
    quotient = tl.where(divisor == 1, t, quotient)
    return quotient, t - quotient * divisor


SIZES = ["n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7"]


@triton.jit(
    do_not_specialize=[
        *SIZES,
        "prefix",
        "axis",
        "digit",
        "highs",
        "inner",
        "first",
        "rows",
        "until",
        "since",
    ]
)
def _build(
    theta, start, table, stride, meta, n0, n1, n2, n3, n4, n5, n6, n7,
    prefix, axis, digit, highs, inner, first, rows, until, since,
    AXES: tl.constexpr, SLOTS: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr,
    WIDE: tl.constexpr, PRODUCT: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    slot = tl.arange(0, BS)
    upper = row < first
    after = tl.where(upper, 0, row - first)
    low, rest = after // inner, after % inner
    out = tl.where(upper, row, 0) // highs
    place = tl.zeros((BR, BS), tl.int32)
    here = tl.zeros((BR, BS), tl.int1)
    for a in tl.static_range(AXES - 1, -1, -1):
        size = _pick(a, n0, n1, n2, n3, n4, n5, n6, n7)
        begin = tl.load(start + a).to(tl.int32) if START else 0
        turns = tl.where(upper, a <= axis, (a > axis) | (PRODUCT & (a == axis)))
        c = tl.where(upper, out % size, rest % size) + begin
        at_cut = tl.where(upper, row % highs * digit + begin, low)
        c = tl.where(a == axis, at_cut, c)
        out = tl.where(a < axis, out // size, out)
        rest = tl.where(a > axis, rest // size, rest)
        take = turns[:, None] & _group(slot, a, AXES, SLOTS)[None, :]
        place = tl.where(take, c[:, None], place)
        here = here | take
    if (tl.program_id(0) == 0) & (head == 0):
        tl.store(meta, prefix)
        tl.store(meta + 1, first)
        tl.store(meta + 2, highs)
        tl.store(meta + 12, until)
        tl.store(meta + 13, since)
        _store_divisor(meta, 3, inner)
        _store_divisor(meta, 6, digit)
        size = n0
        for a in tl.static_range(AXES):
            size = tl.where(a == axis, _pick(a, n0, n1, n2, n3, n4, n5, n6, n7), size)
        _store_divisor(meta, 9, size)
    inside = slot < SLOTS
    keep = (row < rows)[:, None] & inside[None, :]
    tile = row[:, None] * SLOTS + slot[None, :]
    if head == 0:
        tl.store(stride + tile, place.to(tl.float32), keep)
    here = here | PRODUCT
    # float64: a float32 angle is off by 6e-8 of itself
    frequency = tl.load(theta + head * SLOTS + slot, mask=inside, other=0.0).to(tl.float64)
    angle = place.to(tl.float64) * frequency[None, :]
    cos, sin = tl.cos(angle).to(tl.float32), tl.sin(angle).to(tl.float32)
    if WIDE:
        to = table + head * 2 * rows * SLOTS + tile
        tl.store(to, tl.where(here, cos.to(tl.int32, bitcast=True), 0), keep)
        tl.store(to + rows * SLOTS, tl.where(here, sin.to(tl.int32, bitcast=True), 0), keep)
    else:
        low16 = cos.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high16 = sin.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16
        tl.store(table + head * rows * SLOTS + tile, tl.where(here, low16 | high16, 0), keep)


def build(
    theta: Tensor, shape: list[int], prefix: int, start: Tensor | None, wide: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Tables of a grid: rotations (heads or 1, 1 or 2, rows, slots) int32, how many thetas a slot
    turns (rows, slots) float32, and numbers that find a row.

    theta (heads or 1, slots) float32; start (axes,) int64 or None.
    """
    theta = theta.float().contiguous()
    heads, slots = theta.shape
    cut = Cut.of(shape)
    rows = cut.first + cut.second
    table = torch.empty(
        heads, 2 if wide else 1, rows, slots, dtype=torch.int32, device=theta.device
    )
    stride = torch.empty(rows, slots, dtype=torch.float32, device=theta.device)
    meta = torch.empty(NUMBERS, dtype=torch.int64, device=theta.device)
    sizes = list(shape) + [1] * (MOST_AXES - len(shape))
    # slots, in vectors of 4, that the first table turns, and those that the second does
    each, more = divmod(slots, len(shape))
    edge = (cut.axis + 1) * each + min(cut.axis + 1, more)
    until, since = triton.cdiv(edge, 4), edge // 4
    if cut.digit > 1:
        until, since = triton.cdiv(slots, 4), 0
    block = 4
    _build[(triton.cdiv(rows, block), heads)](
        theta, start, table, stride, meta, *sizes, prefix, cut.axis, cut.digit, cut.highs,
        cut.inner, cut.first, rows, until, since, AXES=len(shape), SLOTS=slots,
        BS=triton.next_power_of_2(slots), BR=block, WIDE=wide, PRODUCT=cut.digit > 1,
        START=start is not None,
    )  # fmt: skip
    return table, stride, meta


@triton.jit
def numbers(meta, KIND: tl.constexpr, PRODUCT: tl.constexpr):
    """What finds a token's rows, loaded once: a loop over tokens would load it again each time."""
    none = (0, 0, 0)
    if KIND == 0:
        return 0, 0, 0, none, none, none, 0, 0
    else:
        prefix, first = tl.load(meta).to(tl.int32), tl.load(meta + 1).to(tl.int32)
        inner = _divisor(meta, 3)
        until, since = tl.load(meta + 12).to(tl.int32), tl.load(meta + 13).to(tl.int32)
        if PRODUCT:
            highs = tl.load(meta + 2).to(tl.int32)
            return prefix, first, highs, inner, _divisor(meta, 6), _divisor(meta, 9), until, since
        else:
            return prefix, first, 0, inner, none, none, until, since


@triton.jit
def _rows(numbers, t, PRODUCT: tl.constexpr):
    """Rows of both tables for tokens t."""
    prefix, first, highs, inner, digit, size = (
        numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5],
    )  # fmt: skip
    upper, lower = _divide(tl.maximum(t.to(tl.int32) - prefix, 0), inner)
    if PRODUCT:
        out, c = _divide(upper, size)
        high, low = _divide(c, digit)
        upper = out * highs + high
        lower += low * inner[0]
    return upper, lower + first


@triton.jit
def _rotation(table, row, slot, turns, rows, SLOTS: tl.constexpr, WIDE: tl.constexpr):
    at = table + row[:, None] * SLOTS + slot[None, :]
    bits = tl.load(at, mask=turns[None, :], other=0)
    return bits, tl.load(at + rows * SLOTS, mask=turns[None, :], other=0) if WIDE else bits


@triton.jit
def _unpack(bits, more, WIDE: tl.constexpr):
    if WIDE:
        return bits.to(tl.float32, bitcast=True), more.to(tl.float32, bitcast=True)
    else:
        cos = bits.to(tl.int16).to(tl.float16, bitcast=True)
        sin = (bits >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def rotations(
    table, found, t, slot, rows, head, SLOTS: tl.constexpr, WIDE: tl.constexpr,
    PRODUCT: tl.constexpr,
):  # fmt: skip
    """Table entries of tokens `t` (inside the sequence) at `slot`; `found` from `numbers`."""
    base = table + head * (2 if WIDE else 1) * rows * SLOTS
    bits = tl.zeros((t.shape[0], slot.shape[0]), tl.int32)
    more, bits2, more2 = bits, bits, bits
    if rows > 0:  # always; the branch keeps the pipeliner from copying tables to shared memory
        upper, lower = _rows(found, t, PRODUCT)
        # other slots are zero there: not read
        bits, more = _rotation(base, upper, slot, slot < found[6] * 4, rows, SLOTS, WIDE)
        bits2, more2 = _rotation(base, lower, slot, slot >= found[7] * 4, rows, SLOTS, WIDE)
    return bits, more, bits2, more2


@triton.jit
def unpack(entries, found, t, WIDE: tl.constexpr, PRODUCT: tl.constexpr, PREFIX: tl.constexpr):
    """cos and sin, float32, of what `rotations` loaded."""
    bits, more, bits2, more2 = entries
    if PRODUCT:
        cos, sin = _unpack(bits, more, WIDE)
        cos2, sin2 = _unpack(bits2, more2, WIDE)
        cos, sin = cos * cos2 - sin * sin2, sin * cos2 + cos * sin2
    else:
        cos, sin = _unpack(bits | bits2, more | more2, WIDE)
    if PREFIX:  # tokens in front of the grid have no position
        placed = (t >= found[0])[:, None]
        cos, sin = tl.where(placed, cos, 1.0), tl.where(placed, sin, 0.0)
    return cos, sin


@triton.jit
def angles(
    table, meta, t, slot, rows, head, SLOTS: tl.constexpr, WIDE: tl.constexpr,
    PRODUCT: tl.constexpr, PREFIX: tl.constexpr,
):  # fmt: skip
    """cos and sin (len(t), len(slot)) of tokens `t` (inside the sequence) at `slot`, float32."""
    found = numbers(meta, 1, PRODUCT)
    entries = rotations(table, found, t, slot, rows, head, SLOTS, WIDE, PRODUCT)
    return unpack(entries, found, t, WIDE, PRODUCT, PREFIX)


@triton.jit
def turned(
    stride, found, t, slot, SLOTS: tl.constexpr, PRODUCT: tl.constexpr, PREFIX: tl.constexpr
):  # fmt: skip
    """By how many thetas a slot has turned at token `t`: (len(t), len(slot)) float32; `found` from
    `numbers`."""
    upper, lower = _rows(found, t, PRODUCT)
    out = tl.load(stride + upper[:, None] * SLOTS + slot[None, :])
    out += tl.load(stride + lower[:, None] * SLOTS + slot[None, :])
    if PREFIX:
        out = tl.where((t >= found[0])[:, None], out, 0.0)
    return out


@triton.jit
def turns(
    stride, meta, t, slot, SLOTS: tl.constexpr, PRODUCT: tl.constexpr, PREFIX: tl.constexpr
):  # fmt: skip
    """`turned` without `numbers` at hand."""
    return turned(stride, numbers(meta, 1, PRODUCT), t, slot, SLOTS, PRODUCT, PREFIX)
