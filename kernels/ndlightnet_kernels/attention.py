"""Global attention: a source to its State, queries on a State, and the gradients of both.

Every tensor is read or written once. The length is split over the card; the parts are joined in a
fixed order, so results do not change from run to run. Letters: p = exp(k - top); rows of a memory:
dim, or 2 * dim with MD-LRPE (cos half, sin half); fa, fb: features of a query, see `turn`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ndlightnet_kernels import phases
from ndlightnet_kernels.phases import places, rotate, rotate_once, turning
from ndlightnet_kernels.tiles import (
    KINDS,
    Place,
    Plan,
    address,
    dot,
    operand,
    pad,
    prepare,
    processors,
    rows_added,
    silu,
    split,
    turn,
    turn_back,
    unweave,
    weave,
    weight,
)  # fmt: skip

SIZES = ["length", "span", "parts", "heads", "own", *phases.SIZES]
KV = ["skb", "skt", "skh", "svb", "svt", "svh"]


@triton.jit
def _seen(keep, b, t, end, length, MASKED: tl.constexpr):
    seen = t < end
    if MASKED:
        seen = seen & (tl.load(keep + b * length + t, mask=seen, other=0) != 0)
    return seen


@triton.jit
def _load_keys(k, b, h, t, kc, seen, skb, skt, skh, DIM: tl.constexpr, UNIT: tl.constexpr):
    here = seen[:, None] & (kc < DIM)[None, :]
    x = tl.load(address(k, b, h, t, kc, skb, skt, skh, UNIT), mask=here, other=float("-inf"))
    return x.to(tl.float32)


@triton.jit
def _load_values(v, b, h, t, vc, seen, svb, svt, svh, VDIM: tl.constexpr, UNIT: tl.constexpr):
    here = seen[:, None] & (vc < VDIM)[None, :]
    return tl.load(address(v, b, h, t, vc, svb, svt, svh, UNIT), mask=here, other=0.0)


@triton.jit
def _collect(
    k, v, keep, turns, mx, mx2, b, h, begin, end, length, kc, vc,
    skb, skt, skh, svb, svt, svh, WIDTH: tl.constexpr, VDIM: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, BL: tl.constexpr, KIND: tl.constexpr, AXES: tl.constexpr,
    SLOTS: tl.constexpr, TOTAL: tl.constexpr, WIDE: tl.constexpr, PREFIX: tl.constexpr,
    MASKED: tl.constexpr, UNIT: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sums of exp(k - mx) and memories y^T (p cos, p sin) of a part, and with rotary those of the
    pairs' second channels. Memories are held transposed: both sides of a product then lie in shared
    memory as they were read. Sums stay spread over the tile's rows until the end."""
    TALL: tl.constexpr = 1 if KIND == 0 else 2 * KIND
    spread = tl.zeros((ROWS, BK), tl.float32)
    spread2 = spread
    acc = tl.zeros((BV, TALL * BK), tl.float32)
    for first in tl.range(begin, end, BL, num_stages=STAGES):
        t = first + tl.arange(0, BL)
        seen = _seen(keep, b, t, end, length, MASKED)
        x = _load_keys(k, b, h, t, kc, seen, skb, skt, skh, WIDTH, UNIT)
        if KIND == 2:
            x2 = _load_keys(k + WIDTH, b, h, t, kc, seen, skb, skt, skh, WIDTH, UNIT)
        y = tl.trans(_load_values(v, b, h, t, vc, seen, svb, svt, svh, VDIM, UNIT))
        p = weight(x, mx[None, :])
        spread += tl.sum(tl.reshape(p, (BL // ROWS, ROWS, BK)), 0)
        if KIND != 0:
            place = places(turns, t, AXES, TOTAL, PREFIX)
            cos, sin = rotate(turns, place, WIDE)
            woven = weave((p * cos).to(OPERAND), (p * sin).to(OPERAND), SLOTS)
            if KIND == 2:
                p = weight(x2, mx2[None, :])
                spread2 += tl.sum(tl.reshape(p, (BL // ROWS, ROWS, BK)), 0)
                second = weave((p * cos).to(OPERAND), (p * sin).to(OPERAND), SLOTS)
                woven = weave(woven, second, SLOTS)
            acc = dot(y, woven, acc, OPERAND, PRECISION)
        else:
            acc = dot(y, p, acc, OPERAND, PRECISION)
    return tl.sum(spread, 0), tl.sum(spread2, 0), acc


@triton.jit
def _maximum(
    k, keep, b, h, begin, end, length, kc, skb, skt, skh, WIDTH: tl.constexpr, BL: tl.constexpr,
    MASKED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Largest logits of tokens [begin, end)."""
    mx = tl.full((kc.shape[0],), float("-inf"), tl.float32)
    for first in tl.range(begin, end, BL, num_stages=1):
        t = first + tl.arange(0, BL)
        seen = _seen(keep, b, t, end, length, MASKED)
        x = _load_keys(k, b, h, t, kc, seen, skb, skt, skh, WIDTH, UNIT)
        mx = tl.maximum(mx, tl.max(x, 0))
    return mx


@triton.jit(do_not_specialize=SIZES + KV)
def _summarize(
    k, v, keep, theta, start, top, total, memory,
    skb, skt, skh, svb, svt, svh, length, span, parts, heads, own,
    n1, n2, n3, n4, n5, n6, n7, prefix,
    DIM: tl.constexpr, VDIM: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BL: tl.constexpr,
    BLOCKS: tl.constexpr, KIND: tl.constexpr, SLOTS: tl.constexpr, OFFSET: tl.constexpr,
    TOTAL: tl.constexpr, WIDE: tl.constexpr,
    AXES: tl.constexpr, PREFIX: tl.constexpr, MASKED: tl.constexpr, UNIT: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr = 16,
):  # fmt: skip
    """State of one part of the length, for one block of key channels (rotary: of pairs).

    A tile's maxima cost more than its products. So exponents are first taken from the first tile's
    maximum. If a sum then shows that the part's logits range too far for that, the part is done
    again with its own maximum. Either way `top` is a reference that no exponent overflows.
    """
    bh, part = (tl.program_id(0) // BLOCKS).to(tl.int64), tl.program_id(1)
    b, h = bh // heads, bh % heads
    WIDTH: tl.constexpr = DIM // 2 if KIND == 2 else DIM
    kc, vc = tl.program_id(0) % BLOCKS * BK + tl.arange(0, BK), tl.arange(0, BV)
    inside = kc < WIDTH
    begin, end = part * span, min(part * span + span, length)
    sizes = (n1, n2, n3, n4, n5, n6, n7)
    turns = turning(theta, start, prefix, h * own, sizes, kc, KIND, AXES, SLOTS, OFFSET, TOTAL)
    once = min(begin + BL, end)
    mx = _maximum(k, keep, b, h, begin, once, length, kc, skb, skt, skh, WIDTH, BL, MASKED, UNIT)
    mx = tl.where(mx == float("-inf"), 0.0, mx)
    mx2 = mx
    if KIND == 2:
        mx2 = _maximum(
            k + WIDTH, keep, b, h, begin, once, length, kc, skb, skt, skh, WIDTH, BL, MASKED, UNIT
        )
        mx2 = tl.where(mx2 == float("-inf"), 0.0, mx2)
    sm, sm2, acc = _collect(
        k, v, keep, turns, mx, mx2, b, h, begin, end, length, kc, vc,
        skb, skt, skh, svb, svt, svh, WIDTH, VDIM, BK, BV, BL, KIND, AXES, SLOTS, TOTAL, WIDE,
        PREFIX, MASKED, UNIT, OPERAND, PRECISION, STAGES, ROWS,
    )  # fmt: skip
    good = (sm > 1e-25) & (sm < 1e25)
    if KIND == 2:
        good = good & (sm2 > 1e-25) & (sm2 < 1e25)
    if tl.min((good | (kc >= WIDTH)).to(tl.int32), 0) == 0:
        mx = _maximum(k, keep, b, h, begin, end, length, kc, skb, skt, skh, WIDTH, BL, MASKED, UNIT)
        mx2 = mx
        if KIND == 2:
            mx2 = _maximum(
                k + WIDTH, keep, b, h, begin, end, length, kc, skb, skt, skh, WIDTH, BL, MASKED,
                UNIT,
            )  # fmt: skip
        sm, sm2, acc = _collect(
            k, v, keep, turns, mx, mx2, b, h, begin, end, length, kc, vc,
            skb, skt, skh, svb, svt, svh, WIDTH, VDIM, BK, BV, BL, KIND, AXES, SLOTS, TOTAL,
            WIDE, PREFIX, MASKED, UNIT, OPERAND, PRECISION, 1, ROWS,
        )  # fmt: skip
    at = (bh * parts + part) * DIM + kc
    tl.store(top + at, mx, inside)
    tl.store(total + at, sm, inside)
    TALL: tl.constexpr = 1 if KIND == 0 else 2
    to = memory + ((bh * parts + part) * (TALL * DIM) + kc)[None, :] * VDIM + vc[:, None]
    here = (vc < VDIM)[:, None] & inside[None, :]
    if KIND == 0:
        tl.store(to, acc, here)
    elif KIND == 1:
        cos, sin = unweave(acc)
        tl.store(to, cos, here)
        tl.store(to + DIM * VDIM, sin, here)
    else:
        one, two = unweave(acc)
        cos, sin = unweave(one)
        tl.store(to, cos, here)
        tl.store(to + DIM * VDIM, sin, here)
        cos, sin = unweave(two)
        tl.store(to + WIDTH * VDIM, cos, here)
        tl.store(to + (DIM + WIDTH) * VDIM, sin, here)
        tl.store(top + at + WIDTH, mx2, inside)
        tl.store(total + at + WIDTH, sm2, inside)


@triton.jit(do_not_specialize=["parts"])
def _merge(
    top, total, memory, top_out, total_out, memory_out, parts,
    DIM: tl.constexpr, VDIM: tl.constexpr, BV: tl.constexpr, TALL: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Join the parts' States: one program for BC rows of the memory."""
    bh, vc = tl.program_id(0).to(tl.int64), tl.arange(0, BV)
    row = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = row < TALL * DIM
    here = inside[:, None] & (vc < VDIM)[None, :]
    at = bh * parts * DIM + row % DIM
    zero = tl.zeros((BC,), tl.int32)
    best = tl.full((BC,), float("-inf"), tl.float32)
    for first in range(0, parts, 8):
        for i in tl.static_range(8):
            s = zero + first + i
            one = tl.load(top + at + s * DIM, mask=inside & (s < parts), other=float("-inf"))
            best = tl.maximum(best, one)
    sm = tl.zeros((BC,), tl.float32)
    acc = tl.zeros((BC, BV), tl.float32)
    for first in range(0, parts, 8):
        for i in tl.static_range(8):  # eight loads on their way at once
            s = zero + first + i
            there = inside & (s < parts)
            w = weight(tl.load(top + at + s * DIM, mask=there, other=float("-inf")), best)
            sm += w * tl.load(total + at + s * DIM, mask=there, other=0.0)
            x = memory + ((bh * parts + s) * (TALL * DIM) + row)[:, None] * VDIM + vc[None, :]
            acc += w[:, None] * tl.load(x, mask=here & there[:, None], other=0.0)
    tl.store(top_out + bh * DIM + row, best, row < DIM)
    tl.store(total_out + bh * DIM + row, sm, row < DIM)
    tl.store(memory_out + (bh * (TALL * DIM) + row)[:, None] * VDIM + vc[None, :], acc, here)


@triton.jit
def _inverse(total, at, inside):
    s = tl.load(total + at, mask=inside, other=0.0)
    return tl.where(s > 0, 1 / tl.where(s > 0, s, 1.0), 0.0)


@triton.jit
def _read_memory(
    total, memory, bh, c, vc, DIM: tl.constexpr, VDIM: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Normalised memory tiles that the features (fa, fb) read, float32."""
    WIDTH: tl.constexpr = DIM // 2 if KIND == 2 else DIM
    inside = c < WIDTH
    here = inside[:, None] & (vc < VDIM)[None, :]
    inverse = _inverse(total, bh * DIM + c, inside)[:, None]
    TALL: tl.constexpr = 1 if KIND == 0 else 2
    at = memory + (bh * (TALL * DIM) + c)[:, None] * VDIM + vc[None, :]
    ma = tl.load(at, mask=here, other=0.0) * inverse
    mb = ma
    if KIND != 0:
        mb = tl.load(at + DIM * VDIM, mask=here, other=0.0) * inverse
    if KIND == 2:
        inverse = _inverse(total, bh * DIM + WIDTH + c, inside)[:, None]
        at += WIDTH * VDIM
        ma -= tl.load(at + DIM * VDIM, mask=here, other=0.0) * inverse
        mb += tl.load(at, mask=here, other=0.0) * inverse
    return ma, mb


@triton.jit
def _load_query(q, b, h, t, c, seen, sqb, sqt, sqh, WIDTH: tl.constexpr, KIND: tl.constexpr,
                UNIT: tl.constexpr):  # fmt: skip
    at = address(q, b, h, t, c, sqb, sqt, sqh, UNIT)
    here = seen[:, None] & (c < WIDTH)[None, :]
    x1 = tl.load(at, mask=here, other=0.0).to(tl.float32)
    x2 = x1
    if KIND == 2:
        x2 = tl.load(at + WIDTH, mask=here, other=0.0).to(tl.float32)
    return x1, x2


@triton.jit(
    do_not_specialize=["length", "span", "heads", "own", "sqb", "sqt", "sqh", *phases.SIZES]
)
def _read(
    q, total, memory, theta, start, out, sqb, sqt, sqh, length, span, heads, own,
    n1, n2, n3, n4, n5, n6, n7, prefix,
    DIM: tl.constexpr, VDIM: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BL: tl.constexpr,
    BLOCKS: tl.constexpr, KIND: tl.constexpr, SLOTS: tl.constexpr, OFFSET: tl.constexpr,
    TOTAL: tl.constexpr, WIDE: tl.constexpr,
    AXES: tl.constexpr, PREFIX: tl.constexpr, UNIT: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Output of a part of the queries, for one block of value channels."""
    bh, part = (tl.program_id(0) // BLOCKS).to(tl.int64), tl.program_id(1)
    b, h = bh // heads, bh % heads
    WIDTH: tl.constexpr = DIM // 2 if KIND == 2 else DIM
    c, vc = tl.arange(0, BK), tl.program_id(0) % BLOCKS * BV + tl.arange(0, BV)
    ma, mb = _read_memory(total, memory, bh, c, vc, DIM, VDIM, KIND)
    m = ma.to(OPERAND)
    if KIND != 0:
        m = tl.trans(weave(tl.trans(m), tl.trans(mb.to(OPERAND)), SLOTS))
    sizes = (n1, n2, n3, n4, n5, n6, n7)
    turns = turning(theta, start, prefix, h * own, sizes, c, KIND, AXES, SLOTS, OFFSET, TOTAL)
    for first in tl.range(part * span, min(part * span + span, length), BL, num_stages=STAGES):
        t = first + tl.arange(0, BL)
        seen = t < length
        x1, x2 = _load_query(q, b, h, t, c, seen, sqb, sqt, sqh, WIDTH, KIND, UNIT)
        x1, _ = silu(x1)
        y = tl.zeros((BL, BV), tl.float32)
        if KIND == 0:
            y = dot(x1, m, y, OPERAND, PRECISION)
        else:
            if KIND == 2:
                x2, _ = silu(x2)
            place = places(turns, t, AXES, TOTAL, PREFIX)
            cos, sin = rotate(turns, place, WIDE)
            fa, fb = turn(x1, x2, cos, sin, KIND)
            f = weave(fa.to(OPERAND), fb.to(OPERAND), SLOTS)
            y = dot(f, m, y, OPERAND, PRECISION)
        to = out + ((b * length + t) * heads + h)[:, None] * VDIM + vc[None, :]
        tl.store(to, y.to(out.dtype.element_ty), seen[:, None] & (vc < VDIM)[None, :])


@triton.jit(do_not_specialize=[*SIZES, "sqb", "sqt", "sqh", "sob", "sot", "soh"])
def _read_backward(
    q, dout, total, memory, theta, start, dq, pulls, dtheta,
    sqb, sqt, sqh, sob, sot, soh, length, span, parts, heads, own,
    n1, n2, n3, n4, n5, n6, n7, prefix,
    DIM: tl.constexpr, VDIM: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BL: tl.constexpr,
    BLOCKS: tl.constexpr, KIND: tl.constexpr, SLOTS: tl.constexpr, OFFSET: tl.constexpr,
    TOTAL: tl.constexpr, WIDE: tl.constexpr,
    AXES: tl.constexpr, PREFIX: tl.constexpr, LEARN: tl.constexpr, UNIT: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq, and a part's pull (fa, fb)^T dout on the normalised memory, for a block of features."""
    bh, part = (tl.program_id(0) // BLOCKS).to(tl.int64), tl.program_id(1)
    b, h = bh // heads, bh % heads
    WIDTH: tl.constexpr = DIM // 2 if KIND == 2 else DIM
    c, vc = tl.program_id(0) % BLOCKS * BK + tl.arange(0, BK), tl.arange(0, BV)
    ma, mb = _read_memory(total, memory, bh, c, vc, DIM, VDIM, KIND)
    m = tl.trans(ma.to(OPERAND))
    if KIND != 0:
        m = weave(m, tl.trans(mb.to(OPERAND)), SLOTS)
    TALL: tl.constexpr = 1 if KIND == 0 else 2
    pull = tl.zeros((BV, TALL * BK), tl.float32)
    sizes = (n1, n2, n3, n4, n5, n6, n7)
    turns = turning(theta, start, prefix, h * own, sizes, c, KIND, AXES, SLOTS, OFFSET, TOTAL)
    learnt = tl.zeros((BL // 16, 8, BK), tl.float32)
    for first in tl.range(part * span, min(part * span + span, length), BL, num_stages=STAGES):
        t = first + tl.arange(0, BL)
        seen = t < length
        x1, x2 = _load_query(q, b, h, t, c, seen, sqb, sqt, sqh, WIDTH, KIND, UNIT)
        do = _load_values(dout, b, h, t, vc, seen, sob, sot, soh, VDIM, UNIT)
        x1, slope1 = silu(x1)
        to = dq + ((b * length + t) * heads + h)[:, None] * DIM + c[None, :]
        here = seen[:, None] & (c < WIDTH)[None, :]
        df = dot(do, m, tl.zeros((BL, TALL * BK), tl.float32), OPERAND, PRECISION)
        if KIND == 0:
            pull = dot(tl.trans(do), x1, pull, OPERAND, PRECISION)
            tl.store(to, (df * slope1).to(dq.dtype.element_ty), here)
        else:
            slope2 = slope1
            if KIND == 2:
                x2, slope2 = silu(x2)
            if LEARN or KIND == 1:
                cos, sin = rotate_once(turns, t, AXES, TOTAL, WIDE, PREFIX)
            else:
                cos, sin = rotate(turns, places(turns, t, AXES, TOTAL, PREFIX), WIDE)
            fa, fb = turn(x1, x2, cos, sin, KIND)
            f = weave(fa.to(OPERAND), fb.to(OPERAND), SLOTS)
            pull = dot(tl.trans(do), f, pull, OPERAND, PRECISION)
            da, db = unweave(df)
            d1, d2 = turn_back(da, db, cos, sin, KIND)
            tl.store(to, (d1 * slope1).to(dq.dtype.element_ty), here)
            if KIND == 2:
                tl.store(to + WIDTH, (d2 * slope2).to(dq.dtype.element_ty), here)
            if LEARN:
                place = places(turns, t, AXES, TOTAL, PREFIX).to(tl.float32)
                learnt += rows_added(place * (fa * db - fb * da))
    if LEARN:
        at = dtheta + (bh * parts + part) * WIDTH + c
        tl.store(at, tl.sum(tl.sum(learnt, 0), 0), c < WIDTH)
    to = pulls + ((bh * parts + part) * (TALL * WIDTH) + c)[None, :] * VDIM + vc[:, None]
    here = (vc < VDIM)[:, None] & (c < WIDTH)[None, :]
    if KIND == 0:
        tl.store(to, pull, here)
    else:
        pull_a, pull_b = unweave(pull)
        tl.store(to, pull_a, here)
        tl.store(to + WIDTH * VDIM, pull_b, here)


@triton.jit
def _pull_one(
    total, memory, dtotal, dmemory, bh, j, inside, vc, dcos, dsin,
    DIM: tl.constexpr, VDIM: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    here = inside[:, None] & (vc < VDIM)[None, :]
    inverse = _inverse(total, bh * DIM + j, inside)
    at = (bh * (TALL * DIM) + j)[:, None] * VDIM + vc[None, :]
    own = dcos * tl.load(memory + at, mask=here, other=0.0)
    tl.store(dmemory + at, dcos * inverse[:, None], here)
    if TALL == 2:
        own += dsin * tl.load(memory + at + DIM * VDIM, mask=here, other=0.0)
        tl.store(dmemory + at + DIM * VDIM, dsin * inverse[:, None], here)
    tl.store(dtotal + bh * DIM + j, -tl.sum(own, 1) * inverse * inverse, inside)


@triton.jit(do_not_specialize=["parts"])
def _pull(
    pulls, total, memory, dtotal, dmemory, parts, DIM: tl.constexpr, VDIM: tl.constexpr,
    BV: tl.constexpr, KIND: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sum the parts' pulls and pass them through the normalisation: one program for BC features."""
    bh, vc = tl.program_id(0).to(tl.int64), tl.arange(0, BV)
    WIDTH: tl.constexpr = DIM // 2 if KIND == 2 else DIM
    TALL: tl.constexpr = 1 if KIND == 0 else 2
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < WIDTH
    here = inside[:, None] & (vc < VDIM)[None, :]
    zero = tl.zeros((BC,), tl.int32)
    ga = tl.zeros((BC, BV), tl.float32)
    gb = ga
    for first in range(0, parts, 8):
        for i in tl.static_range(8):  # eight loads on their way at once
            s = zero + first + i
            at = pulls + ((bh * parts + s) * (TALL * WIDTH) + c)[:, None] * VDIM + vc[None, :]
            there = here & (s < parts)[:, None]
            ga += tl.load(at, mask=there, other=0.0)
            if KIND != 0:
                gb += tl.load(at + WIDTH * VDIM, mask=there, other=0.0)
    _pull_one(total, memory, dtotal, dmemory, bh, c, inside, vc, ga, gb, DIM, VDIM, TALL)
    if KIND == 2:  # the pair's second channel reads the tiles swapped
        _pull_one(
            total, memory, dtotal, dmemory, bh, c + WIDTH, inside, vc, gb, -ga, DIM, VDIM, TALL
        )


@triton.jit
def _grad_tile(
    dmemory, bh, kc, inside, vc, DIM: tl.constexpr, VDIM: tl.constexpr, KIND: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """dmemory of some channels, transposed, woven from its cos and sin halves."""
    TALL: tl.constexpr = 1 if KIND == 0 else 2
    here = (vc < VDIM)[:, None] & inside[None, :]
    at = dmemory + (bh * (TALL * DIM) + kc)[None, :] * VDIM + vc[:, None]
    g = tl.load(at, mask=here, other=0.0).to(OPERAND)
    if KIND != 0:
        sin = tl.load(at + DIM * VDIM, mask=here, other=0.0).to(OPERAND)
        g = weave(g, sin, DIM // KIND)
    return g


@triton.jit
def _grads(
    top, dtotal, dmemory, bh, kc, vc, DIM: tl.constexpr, VDIM: tl.constexpr, KIND: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """What the gradients of channels `kc` need; with rotary also of the pairs' second channels."""
    WIDTH: tl.constexpr = DIM // 2 if KIND == 2 else DIM
    inside = kc < WIDTH
    g = _grad_tile(dmemory, bh, kc, inside, vc, DIM, VDIM, KIND, OPERAND)
    mx = tl.load(top + bh * DIM + kc, mask=inside, other=0.0)
    pull = tl.load(dtotal + bh * DIM + kc, mask=inside, other=0.0)
    mx2, pull2 = mx, pull
    if KIND == 2:
        g2 = _grad_tile(dmemory, bh, kc + WIDTH, inside, vc, DIM, VDIM, KIND, OPERAND)
        g = weave(g, g2, DIM // KIND)
        mx2 = tl.load(top + bh * DIM + WIDTH + kc, mask=inside, other=0.0)
        pull2 = tl.load(dtotal + bh * DIM + WIDTH + kc, mask=inside, other=0.0)
    return g, mx, pull, mx2, pull2


@triton.jit(do_not_specialize=[s for s in SIZES if s != "parts"] + KV)
def _summarize_backward(
    k, v, keep, theta, start, top, dtotal, dmemory, dk, dv, dtheta,
    skb, skt, skh, svb, svt, svh, length, span, heads, own,
    n1, n2, n3, n4, n5, n6, n7, prefix,
    DIM: tl.constexpr, VDIM: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BL: tl.constexpr,
    BLOCKS: tl.constexpr, KIND: tl.constexpr, SLOTS: tl.constexpr, OFFSET: tl.constexpr,
    TOTAL: tl.constexpr, WIDE: tl.constexpr,
    AXES: tl.constexpr, PREFIX: tl.constexpr, LEARN: tl.constexpr, MASKED: tl.constexpr,
    UNIT: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv of a part: dk = p (v . dmemory + dtotal), dv = p . dmemory."""
    bh, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = bh // heads, bh % heads
    WIDTH: tl.constexpr = DIM // 2 if KIND == 2 else DIM
    vc, kc = tl.arange(0, BV), tl.arange(0, BK)
    sizes = (n1, n2, n3, n4, n5, n6, n7)
    turns = turning(theta, start, prefix, h * own, sizes, kc, KIND, AXES, SLOTS, OFFSET, TOTAL)
    g, mx, pull, mx2, pull2 = _grads(top, dtotal, dmemory, bh, kc, vc, DIM, VDIM, KIND, OPERAND)
    TALL: tl.constexpr = 1 if KIND == 0 else 2 * KIND
    for first in tl.range(part * span, min(part * span + span, length), BL, num_stages=STAGES):
        t = first + tl.arange(0, BL)
        inside = t < length
        seen = _seen(keep, b, t, length, length, MASKED)
        dy = tl.zeros((BL, BV), tl.float32)
        for block in tl.static_range(BLOCKS):
            kc = block * BK + tl.arange(0, BK)
            x = _load_keys(k, b, h, t, kc, seen, skb, skt, skh, WIDTH, UNIT)
            x2 = x
            if KIND == 2:
                x2 = _load_keys(k + WIDTH, b, h, t, kc, seen, skb, skt, skh, WIDTH, UNIT)
            if block == 0:
                y = _load_values(v, b, h, t, vc, seen, svb, svt, svh, VDIM, UNIT)
            if BLOCKS > 1:  # a wide head: its tiles do not stay on chip
                g, mx, pull, mx2, pull2 = _grads(
                    top, dtotal, dmemory, bh, kc, vc, DIM, VDIM, KIND, OPERAND
                )
                turns = turning(
                    theta, start, prefix, h * own, sizes, kc, KIND, AXES, SLOTS, OFFSET, TOTAL
                )
            to = dk + ((b * length + t) * heads + h)[:, None] * DIM + kc[None, :]
            here = inside[:, None] & (kc < WIDTH)[None, :]
            dp = dot(y, g, tl.zeros((BL, TALL * BK), tl.float32), OPERAND, PRECISION)
            p = weight(x, mx[None, :])
            f = p.to(OPERAND)
            if KIND != 0:
                cos, sin = rotate_once(turns, t, AXES, TOTAL, WIDE, PREFIX)
                f = weave((p * cos).to(OPERAND), (p * sin).to(OPERAND), SLOTS)
                if KIND == 2:
                    p2 = weight(x2, mx2[None, :])
                    f2 = weave((p2 * cos).to(OPERAND), (p2 * sin).to(OPERAND), SLOTS)
                    f = weave(f, f2, SLOTS)
                    dp, dp2 = unweave(dp)
                    da, db = unweave(dp2)
                    dp2 = da * cos + db * sin
                    dp2 = p2 * (dp2 + pull2[None, :])
                    tl.store(to + WIDTH, dp2.to(dk.dtype.element_ty), here)
                    twist = p2 * (cos * db - sin * da)
                da, db = unweave(dp)
                dp = da * cos + db * sin
                if KIND == 2:
                    twist += p * (cos * db - sin * da)
                else:
                    twist = p * (cos * db - sin * da)
            tl.store(to, (p * (dp + pull[None, :])).to(dk.dtype.element_ty), here)
            dy = dot(f, tl.trans(g), dy, OPERAND, PRECISION)
            if LEARN:  # a sum for each tile: one in registers would not fit there
                place = places(turns, t, AXES, TOTAL, PREFIX).to(tl.float32)
                at = dtheta + (bh * tl.cdiv(length, BL) + first // BL) * WIDTH + kc
                tl.store(at, tl.sum(place * twist, 0), kc < WIDTH)
        if MASKED:
            dy = tl.where(seen[:, None], dy, 0.0)
        to = dv + ((b * length + t) * heads + h)[:, None] * VDIM + vc[None, :]
        tl.store(to, dy.to(dv.dtype.element_ty), inside[:, None] & (vc < VDIM)[None, :])


# ------------------------------------------------------------------------------------ launches
# Measured on one H200 (bf16, CUDA graph, 4 x 16384 tokens): the fastest of about 15 plans for heads
# of 64 channels, and of about 6 for heads of 128. With rotary a key column is a pair of channels.
PLANS = {
    ("summarize", "none"): (Plan(64, 64, 3, 4, 3, 168), Plan(64, 64, 3, 8, 2)),
    ("summarize", "cosine"): (Plan(64, 64, 3, 4, 3, 168), Plan(64, 64, 3, 8, 2, 128)),
    ("summarize", "rotary"): (Plan(64, 32, 3, 4, 3, 168), Plan(64, 32, 2, 8, 2, 128)),
    ("read", "none"): (Plan(64, 64, 3, 4, 8, 128), Plan(64, 64, 3, 4, 4, 128)),
    ("read", "cosine"): (Plan(64, 64, 3, 4, 4, 128), Plan(64, 128, 1, 8, 2, 128)),
    ("read", "rotary"): (Plan(64, 64, 3, 4, 4, 128), Plan(64, 128, 1, 4, 4, 128)),
    ("read_backward", "none"): (Plan(64, 32, 3, 4, 4, 128), Plan(64, 64, 2, 8, 2, 128)),
    ("read_backward", "cosine"): (Plan(64, 32, 3, 4, 3, 168), Plan(64, 64, 2, 8, 1)),
    ("read_backward", "rotary"): (Plan(64, 32, 3, 4, 3, 168), Plan(64, 32, 2, 8, 2, 128)),
    ("read_backward", "rotary learnt"): (Plan(64, 32, 3, 4, 2), Plan(64, 32, 2, 8, 2, 128)),
    ("summarize_backward", "none"): (Plan(64, 64, 2, 4, 8, 128), Plan(64, 128, 2, 8, 1)),
    ("summarize_backward", "cosine"): (Plan(64, 64, 3, 4, 2), Plan(64, 128, 1, 8, 1)),
    ("summarize_backward", "cosine learnt"): (Plan(64, 64, 2, 4, 4), Plan(64, 128, 1, 8, 1)),
    ("summarize_backward", "rotary"): (Plan(64, 32, 3, 4, 4), Plan(64, 64, 1, 8, 1)),
    ("summarize_backward", "rotary learnt"): (Plan(64, 32, 2, 4, 4), Plan(64, 64, 1, 8, 1)),
}


def plan(
    kernel: str, keys: int, values: int, kind: str, size: int = 2, learn: bool = False
) -> Plan:
    """Launch plan for a tile of the memory, with operands of `size` bytes; `keys` may be cut.
    learn: with the gradient of theta."""
    pair = 2 if kind == "rotary" else 1
    most = max(keys, pair * values) if kernel == "read" else max(pair * keys, values)
    if size == 2 and most <= 128:
        learnt = (kernel, f"{kind} learnt")
        chosen = PLANS[learnt if learn and learnt in PLANS else (kernel, kind)][most > 64]
        return chosen._replace(keys=min(keys, chosen.keys))
    # not measured: as many columns as fit, in registers as sums or in shared memory as operands
    woven = 1 if kind == "none" else 4 if kind == "rotary" and "summarize" in kernel else 2
    room = 16384 if kernel in ("summarize", "read_backward") else 65536 // size
    if size > 2 and kernel in ("read", "read_backward"):
        room = 8192
    cut = max(16, min(keys, room // (woven * values)))
    if size > 2 and kernel == "summarize_backward" and woven * keys * values > 8192:
        cut = min(cut, keys // 2)  # a whole memory would stay on chip, in four float32 copies
    keys = cut
    return Plan(32 if size > 2 else 64, keys, 1, 8, 4)


def flags(keep: Tensor | None) -> Tensor | None:
    """A mask as bytes."""
    return None if keep is None else keep.contiguous().view(torch.uint8)


def _float(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def wide(x: Tensor) -> int:
    """Bytes of an operand."""
    return 2 if x.dtype == torch.bfloat16 else 4


def summarize_parts(
    k: Tensor, v: Tensor, keep: Tensor | None, place: Place, parts: int = 0, span: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """States (batch * heads, parts, ...) of parts of `span` tokens; by default as many as suit."""
    (k, v), strided, unit = prepare(k, v)
    (batch, length, heads, dim), vdim = k.shape, v.shape[-1]
    bv, width = pad(vdim), dim // 2 if place.kind == "rotary" else dim
    chosen = plan("summarize", pad(width), bv, place.kind, wide(k))
    block, bk = chosen.block, chosen.keys
    blocks, tall = triton.cdiv(width, bk), 1 if place.kind == "none" else 2
    if not parts:
        programs = chosen.programs * processors(k)
        parts, span = split(length, batch * heads * blocks, block, programs)
    # tokens that the threads of a program load at once: sums within a thread cost no exchange
    rows = min(block, chosen.warps * 32 * (16 // k.element_size()) // bk)
    top = _float(k, batch * heads, parts, dim)
    total, memory = torch.empty_like(top), _float(k, batch * heads, parts, tall * dim, vdim)
    _summarize[(batch * heads * blocks, parts)](
        k, v, flags(keep), top=top, total=total, memory=memory, length=length, span=span,
        parts=parts, heads=heads, **dict(zip(KV, strided, strict=True)), DIM=dim, VDIM=vdim, BK=bk,
        BV=bv, BL=block, BLOCKS=blocks, MASKED=keep is not None, UNIT=unit, STAGES=chosen.stages,
        ROWS=rows, **place.arguments(k), **operand(k), **chosen.options(),
    )  # fmt: skip
    return top, total, memory


def summarize(
    k: Tensor, v: Tensor, keep: Tensor | None, place: Place
) -> tuple[Tensor, Tensor, Tensor]:
    """(batch, length, heads, dim) -> State; keep (batch, length) bool or None."""
    top, total, memory = summarize_parts(k, v, keep, place)
    (batch, _, heads, dim), vdim, parts = k.shape, v.shape[-1], top.shape[1]
    bv, tall = pad(vdim), 1 if place.kind == "none" else 2
    if parts > 1:
        joined = (
            _float(k, batch, heads, dim),
            _float(k, batch, heads, dim),
            _float(k, batch, heads, tall * dim, vdim),
        )
        some = max(1, 256 // bv)
        _merge[(batch * heads, triton.cdiv(tall * dim, some))](
            top, total, memory, *joined, parts, DIM=dim, VDIM=vdim, BV=bv, TALL=tall, BC=some,
            num_warps=2,
        )  # fmt: skip
        return joined
    return (
        top.view(batch, heads, dim), total.view(batch, heads, dim),
        memory.view(batch, heads, tall * dim, vdim),
    )  # fmt: skip


def read(q: Tensor, total: Tensor, memory: Tensor, place: Place) -> Tensor:
    """Queries (batch, length, heads, dim), SiLU included, on a State."""
    (q,), strided, unit = prepare(q)
    (batch, length, heads, dim), vdim = q.shape, memory.shape[-1]
    out = torch.empty(batch, length, heads, vdim, dtype=q.dtype, device=q.device)
    bk, bv = pad(dim // 2 if place.kind == "rotary" else dim), pad(vdim)
    # the features of a query are read whole, so here the cut is along the values
    chosen = plan("read", bv, bk, place.kind, wide(q))
    block, bv = chosen.block, chosen.keys
    blocks = triton.cdiv(vdim, bv)
    parts, span = split(length, batch * heads * blocks, block, chosen.programs * processors(q))
    _read[(batch * heads * blocks, parts)](
        q, total.contiguous(), memory.contiguous(), out=out, length=length, span=span, heads=heads,
        **dict(zip(("sqb", "sqt", "sqh"), strided, strict=True)), DIM=dim, VDIM=vdim, BK=bk, BV=bv,
        BL=block, BLOCKS=blocks, UNIT=unit, STAGES=chosen.stages, **place.arguments(q),
        **operand(q), **chosen.options(),
    )  # fmt: skip
    return out


def read_backward(
    q: Tensor, total: Tensor, memory: Tensor, dout: Tensor, place: Place, learn: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, of the State's sum and memory, and of theta (heads, slots), empty if not
    wanted."""
    (q, dout), strided, unit = prepare(q, dout)
    (batch, length, heads, dim), vdim = q.shape, memory.shape[-1]
    total, memory = total.contiguous(), memory.contiguous()
    width, tall = dim // 2 if place.kind == "rotary" else dim, 1 if place.kind == "none" else 2
    bv = pad(vdim)
    chosen = plan("read_backward", pad(width), bv, place.kind, wide(q), learn)
    block, bk = chosen.block, chosen.keys
    blocks = triton.cdiv(width, bk)
    parts, span = split(length, batch * heads * blocks, block, chosen.programs * processors(q))
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    pulls = _float(q, batch * heads, parts, tall * width, vdim)
    turned = _float(q, batch, heads, parts, width if learn else 0)
    _read_backward[(batch * heads * blocks, parts)](
        q, dout, total, memory, dq=dq, pulls=pulls, dtheta=turned, length=length, span=span,
        parts=parts, heads=heads,
        **dict(zip(("sqb", "sqt", "sqh", "sob", "sot", "soh"), strided, strict=True)),
        DIM=dim, VDIM=vdim, BK=bk, BV=bv, BL=block, BLOCKS=blocks, LEARN=learn, UNIT=unit,
        STAGES=chosen.stages, **place.arguments(q), **operand(q), **chosen.options(),
    )  # fmt: skip
    dtotal, dmemory = torch.empty_like(total), torch.empty_like(memory)
    some = max(1, 256 // bv)
    _pull[(batch * heads, triton.cdiv(width, some))](
        pulls, total, memory, dtotal, dmemory, parts, DIM=dim, VDIM=vdim, BV=bv,
        KIND=KINDS[place.kind], BC=some, num_warps=2,
    )  # fmt: skip
    return dq, dtotal, dmemory, turned.sum((0, 2))


def summarize_backward(
    k: Tensor, v: Tensor, keep: Tensor | None, top: Tensor, dtotal: Tensor, dmemory: Tensor,
    place: Place, learn: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of k, v, and of theta (heads, slots), empty if not wanted."""
    (k, v), strided, unit = prepare(k, v)
    (batch, length, heads, dim), vdim = k.shape, v.shape[-1]
    bv, width = pad(vdim), dim // 2 if place.kind == "rotary" else dim
    chosen = plan("summarize_backward", pad(width), bv, place.kind, wide(k), learn)
    block, bk = chosen.block, chosen.keys
    parts, span = split(length, batch * heads, block, chosen.programs * processors(k))
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    turned = _float(k, batch, heads, triton.cdiv(length, block), width if learn else 0)
    _summarize_backward[(batch * heads, parts)](
        k, v, flags(keep), top=top.contiguous(), dtotal=dtotal.contiguous(),
        dmemory=dmemory.contiguous(), dk=dk, dv=dv, dtheta=turned, length=length, span=span,
        heads=heads, **dict(zip(KV, strided, strict=True)), DIM=dim, VDIM=vdim, BK=bk, BV=bv,
        BL=block, BLOCKS=triton.cdiv(width, bk), LEARN=learn, MASKED=keep is not None, UNIT=unit,
        STAGES=chosen.stages, **place.arguments(k), **operand(k), **chosen.options(),
    )  # fmt: skip
    return dk, dv, turned.sum((0, 2))
