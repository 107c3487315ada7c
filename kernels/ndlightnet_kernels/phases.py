"""MD-LRPE angles on any number of axes, computed from a token's flat index, without tables.

A slot is rotated by theta times the coordinate of its axis. Angles are fractions of a full rotation
in fixed point: theta / (2 pi) in 32 bits (float32 inputs: 64). So a product with a coordinate drops
full rotations by itself, and its error is at most 2^-32 (2^-64) rotations times the coordinate.
Where the first cell may be far away (an offset of int64), its angle is a product in 64 bits, once
in a program, and the coordinates of other cells count from it.
"""

# mypy: disable-error-code="assignment"
# (a jit function builds its tuples of tensors step by step)
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

MOST_AXES = 8
# arguments of all kernels that take angles; n1, n2, ...: sizes of the axes after the first
SIZES = ["n1", "n2", "n3", "n4", "n5", "n6", "n7", "prefix", "each"]

RUN = tl.constexpr(16)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


# ANGLES, a constant of all kernels with angles, is (kind, number of axes, slots of theta, index of the first of them
# among all slots, number of all slots, whether phases have 64 bits, whether tokens may lie in front of the grid,
# whether the RUN tokens from any multiple of RUN on are neighbours on the last axis).
@triton.jit
def slot_frequencies(angles, shapes, sample, prefix, channel, ANGLES: tl.constexpr):
    """Compute, once in a program, what the angles at the slots of `channel` depend on: slots, frequencies (upper and
    lower half), sizes of the axes, their reciprocals, first coordinates, prefix, phase of the first cell, and its
    distance from the origin. angles: theta, offset, 1 where each sample has an offset, else 0, row of theta, and sizes
    of the axes after the first; shapes: grids of the samples, where they differ."""
    KIND: tl.constexpr = ANGLES[0]
    AXES: tl.constexpr = ANGLES[1]
    SLOTS: tl.constexpr = ANGLES[2]
    OFFSET: tl.constexpr = ANGLES[3]
    TOTAL: tl.constexpr = ANGLES[4]
    theta, offset, each, head, sizes = angles
    slot, high, low, phase, far = channel, channel, channel, channel * 0, channel * 0
    counts, reciprocals, offsets = (), (), ()
    if KIND != 0:
        slot = channel % SLOTS
        turns = tl.load(theta + head * SLOTS + slot).to(tl.float64) * 0.15915494309189535
        turns = (turns - tl.floor(turns)) * 4294967296.0
        upper = turns.to(tl.int64)
        low = ((turns - upper.to(tl.float64)) * 4294967296.0).to(tl.int64).to(tl.int32)
        high = upper.to(tl.int32)
        first, origin = upper * 0, upper * 0
        for a in tl.static_range(AXES):
            if offset is None:
                offsets += (tl.zeros((1,), tl.int32),)
            elif offset.dtype.element_ty == tl.int32:
                offsets += (tl.load(offset + sample * each * AXES + a),)
            else:
                at = offset + sample * each * (2 * AXES) + a
                begin, source = tl.load(at), tl.load(at + AXES)
                offsets += (begin,)
                mine = slot + OFFSET >= a * (TOTAL // AXES) + min(a, TOTAL % AXES)
                first, origin = tl.where(mine, begin, first), tl.where(mine, source, origin)
            if a > 0:
                if shapes is None:
                    count = sizes[a - 1]
                else:
                    count = tl.load(shapes + sample * AXES + a)
                counts += (count,)
                reciprocals += ((4294967295 // count.to(tl.int64)).to(tl.int32),)
        if offset is not None:
            if offset.dtype.element_ty == tl.int64:
                exact = (upper << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
                phase, far = ((first * exact) >> 32).to(tl.int32), (first - origin).to(tl.int32)
    return slot + OFFSET, high, low, counts, reciprocals, offsets, prefix, phase, far


@triton.jit
def _over(slots, tokens, ACROSS: tl.constexpr):
    """Expand both lists to tiles of tokens x slots; with ACROSS, of slots x tokens."""
    if ACROSS:
        return slots[:, None], tokens[None, :]
    else:
        return slots[None, :], tokens[:, None]


@triton.jit
def coordinates(freqs, t, ANGLES: tl.constexpr, ACROSS: tl.constexpr = False):
    """Return the coordinates of tokens t along the axis of each slot, (len(t), len(slot)) int32;
    with an offset of int64, counted from the first cell's. Tokens in front of the grid are at
    coordinate 0. Each axis has a consecutive group of slots; group sizes differ by at most one."""
    AXES: tl.constexpr = ANGLES[1]
    TOTAL: tl.constexpr = ANGLES[4]
    PREFIX: tl.constexpr = ANGLES[6]
    rest = t.to(tl.int32)
    if PREFIX:
        rest = tl.maximum(rest - freqs[6], 0)
    for a in tl.static_range(AXES - 1, -1, -1):
        c = rest
        if a > 0:
            # the quotient may be too small by one
            n, by = freqs[3][a - 1], freqs[4][a - 1]
            rest = tl.umulhi(c.to(tl.uint32), by.to(tl.uint32)).to(tl.int32)
            c -= rest * n
            rest = tl.where(c >= n, rest + 1, rest)
            c = tl.where(c >= n, c - n, c)
        begin = freqs[5][a]
        front = begin.to(tl.int32)
        if begin.dtype == tl.int32:  # near offset: one number is added here; a far one is a phase for each slot
            c += front
            front *= 0
        if PREFIX:
            c = tl.where(t >= freqs[6], c, -front)
        slot, at = _over(freqs[0], c, ACROSS)
        if a == AXES - 1:
            out = at + slot * 0
        else:
            after = (a + 1) * (TOTAL // AXES) + min(a + 1, TOTAL % AXES)
            mine = (slot - after) >> 31  # all bits or none: the card has few predicates
            out = (at & mine) | (out & ~mine)
    return out


@triton.jit
def cos_sin(freqs, at_axis, ANGLES: tl.constexpr, ACROSS: tl.constexpr = False):
    """Return cos and sin of the angles at `coordinates`, float32."""
    WIDE: tl.constexpr = ANGLES[5]
    high, _ = _over(freqs[1], freqs[1], ACROSS)
    begin, _ = _over(freqs[7], freqs[7], ACROSS)
    phase = at_axis * high + begin
    if WIDE:
        low, _ = _over(freqs[2], freqs[2], ACROSS)
        phase += tl.umulhi(at_axis.to(tl.uint32), low.to(tl.uint32)).to(tl.int32)
        phase -= tl.where(at_axis < 0, low, 0)
    return _cos_sin(phase, WIDE)


@triton.jit
def _cos_sin(phase, WIDE: tl.constexpr):
    angle = phase.to(tl.float32) * 1.4629180792671596e-09  # 2 pi / 2^32
    if WIDE or INTERPRETED:
        return tl.cos(angle), tl.sin(angle)
    else:  # within one rotation the card's own functions are off by 5e-7
        return libdevice.fast_cosf(angle), libdevice.fast_sinf(angle)


# A thread loads rows of a tile that are ROWS apart. Where the order of tokens does not matter, it gets neighbours.
# (With a sine and a cosine for every element, the units of special functions were busier than all else: 63 % of the
# time in a read of cosine.)
@triton.jit
def tile_tokens(first, BL: tl.constexpr, ROWS: tl.constexpr):
    """Return the tokens of a tile of BL tokens, row by row."""
    row = tl.arange(0, BL)
    return first + row % ROWS * (BL // ROWS) + row // ROWS


@triton.jit
def tile_cos_sin(freqs, first, BL: tl.constexpr, ROWS: tl.constexpr, ANGLES: tl.constexpr):
    """Return `cos_sin` of `tile_tokens`. Of neighbours on the last axis a thread computes the first, which is the same
    number for all its rows, and turns it from row to row: the others' coordinates and functions would take longer."""
    AXES: tl.constexpr = ANGLES[1]
    TOTAL: tl.constexpr = ANGLES[4]
    if ANGLES[7]:
        tl.static_assert(BL <= RUN * ROWS)
        row = tl.arange(0, BL)
        cos, sin = cos_sin(freqs, coordinates(freqs, first + row % ROWS * (BL // ROWS), ANGLES), ANGLES)
        on_last_axis = freqs[0] >= (AXES - 1) * (TOTAL // AXES) + min(AXES - 1, TOTAL % AXES)
        step_cos, step_sin = _cos_sin(tl.where(on_last_axis, freqs[1], 0)[None, :], False)
        turned_cos, turned_sin = cos, sin
        for i in tl.static_range(1, BL // ROWS):
            previous = turned_cos
            turned_cos = previous * step_cos - turned_sin * step_sin
            turned_sin = turned_sin * step_cos + previous * step_sin
            mine = (row // ROWS == i)[:, None]
            cos, sin = tl.where(mine, turned_cos, cos), tl.where(mine, turned_sin, sin)
        return cos, sin
    else:
        return cos_sin(freqs, coordinates(freqs, tile_tokens(first, BL, ROWS), ANGLES), ANGLES)


@triton.jit
def from_origin(freqs, at_axis):
    """Return `coordinates` from the origin, float32, for the gradient of theta; see Position."""
    return (at_axis + freqs[8][None, :]).to(tl.float32)


@triton.jit
def materialized(x):
    """Return x, a tile of floats that tiles of two layouts need. Triton would compute it twice
    rather than move it, which takes longer; it never does so with a sum, even of one element."""
    return x if INTERPRETED else tl.sum(x[:, :, None], 2)


@triton.jit
def pinned(x):
    """Return x, which several products need: computed once in the layout of its loads, then moved.
    (Triton would compute it for each product, from shared memory in an order with many bank
    conflicts.) Cheaper than `materialized`, but a tile with other uses may be computed twice."""
    if INTERPRETED:
        return x
    else:
        of: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, of)


@triton.jit
def cos_sin_once(freqs, t, ANGLES: tl.constexpr):
    """Return `cos_sin` for kernels that need it in tiles of two layouts; for 16-bit inputs to the precision of float16.

    Tokens lie along the lanes here: a thread has few of them and computes few coordinates.
    """
    if ANGLES[5] or INTERPRETED:
        return cos_sin(freqs, coordinates(freqs, t, ANGLES), ANGLES)
    else:
        cos, sin = cos_sin(freqs, coordinates(freqs, t, ANGLES, True), ANGLES, True)
        low = cos.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high = sin.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16
        both = materialized((low | high).to(tl.float32, bitcast=True))
        both = tl.trans(both.to(tl.int32, bitcast=True))
        cos = both.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return cos, (both >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
