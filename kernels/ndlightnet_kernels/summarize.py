"""The State of one split of a source: the first half of global attention, and of segments of the
causal form. Symbols as in attention.py."""

from __future__ import annotations

import triton
import triton.language as tl

from ndlightnet_kernels.phases import slot_frequencies, tile_cos_sin, tile_tokens
from ndlightnet_kernels.segments import log2_rate
from ndlightnet_kernels.tiles import (
    SIZES,
    deinterleave,
    dot,
    hide,
    interleave,
    later,
    load,
    load_keys,
    powers,
    read_split,
    second_channels,
    slip,
    valid_tokens,
)


@triton.jit
def _keys(k_rows, mask, t, kc, valid, end, KIND: tl.constexpr):
    """Load logits, and with rotary those of the pairs' second channels."""
    x = load_keys(k_rows, t, kc, end)
    x2 = x
    if KIND == 2:
        x2 = load_keys(second_channels(k_rows), t, kc, end)
    if mask is not None:
        x, x2 = hide(x, valid), hide(x2, valid)
    return x, x2


@triton.jit
def _added(p, valid, mask, ROWS: tl.constexpr):
    """Sum p over tokens, without those after the last one, to (ROWS, columns): within threads, without an exchange."""
    if mask is None:  # by a factor, which costs less than a selection
        p *= valid.to(tl.float32)[:, None]
    return tl.sum(tl.reshape(p, (p.shape[0] // ROWS, ROWS, p.shape[1])), 0)


@triton.jit
def _fade(rate, t, end):
    """Return the fall of tokens' weights up to token `end` - 1, in powers of 2."""
    return (rate * tl.minimum(t - (end - 1), 0).to(tl.float32))[:, None]


@triton.jit
def _collect(k_rows, v_rows, mask, freqs, rate, tops, bounds, kc, vc, BL, ANGLES, PRODUCT, STAGES, ROWS):
    """Return sums of exp(k - mx) and memories y^T (p cos, p sin) of a split; with rotary also those
    of the pairs' second channels. Memories are transposed, so that both sides of a product lie in
    shared memory as they were read. Sums stay spread over the tile's rows until the end."""
    KIND: tl.constexpr = ANGLES[0]
    SLOTS: tl.constexpr = ANGLES[2]
    OPERAND: tl.constexpr = tl.bfloat16 if PRODUCT[0] else tl.float32
    HALVES: tl.constexpr = 1 if KIND == 0 else 2 * KIND
    mx, mx2 = tops
    begin, end, length = bounds
    spread = tl.zeros((ROWS, kc.shape[0]), tl.float32)
    spread2 = spread
    acc = tl.zeros((vc.shape[0], HALVES * kc.shape[0]), tl.float32)
    for first in tl.range(begin, end, BL, num_stages=STAGES):
        t = tile_tokens(first, BL, ROWS)
        valid = valid_tokens(mask, k_rows[1], t, end, length)
        x, x2 = _keys(k_rows, mask, t, kc, valid, end, KIND)
        y = tl.trans(load(v_rows, t, vc, valid))
        p = powers(x, mx, OPERAND, None if rate is None else _fade(rate, t, end))
        spread += _added(p, valid, mask, ROWS)
        if KIND != 0:
            cos, sin = tile_cos_sin(freqs, first, BL, ROWS, ANGLES)
            interleaved = interleave((p * cos).to(OPERAND), (p * sin).to(OPERAND), SLOTS)
            if KIND == 2:
                p = powers(x2, mx2, OPERAND)
                spread2 += _added(p, valid, mask, ROWS)
                second = interleave((p * cos).to(OPERAND), (p * sin).to(OPERAND), SLOTS)
                interleaved = interleave(interleaved, second, SLOTS)
            acc = dot(y, interleaved, acc, PRODUCT)
        else:
            acc = dot(y, p, acc, PRODUCT)
    return tl.sum(spread, 0), tl.sum(spread2, 0), acc


@triton.jit
def _maxima(k_rows, mask, rate, begin, end, length, kc, BL, KIND):
    """Return the largest logits of tokens [begin, end); with rotary also of the second channels.
    rate: log2 of the fall of a weight with every later token, or None; not with rotary."""
    mx = tl.full((kc.shape[0],), float("-inf"), tl.float32)
    mx2 = mx
    for first in tl.range(begin, end, BL, num_stages=1):
        t = first + tl.arange(0, BL)
        valid = valid_tokens(mask, k_rows[1], t, end, length)
        x, x2 = _keys(k_rows, mask, t, kc, valid, end, KIND)
        if rate is not None:
            x += _fade(rate, t, end) * 0.6931471805599453
        mx = tl.maximum(mx, tl.max(x, 0))
        if KIND == 2:
            mx2 = tl.maximum(mx2, tl.max(x2, 0))
    return mx, mx2


@triton.jit
def _store_top(top, at, mx, mx2, inside, WIDTH: tl.constexpr, KIND: tl.constexpr):
    tl.store(top + at, mx, inside)
    if KIND == 2:
        tl.store(top + at + WIDTH, mx2, inside)


@triton.jit(do_not_specialize=SIZES)
def _summarize(
    k,
    v,
    mask,
    splits,
    shapes,
    theta,
    offset,
    forget,
    top,
    total,
    memory,
    skb,
    skt,
    skh,
    svb,
    svt,
    svh,
    length,
    span,
    n_splits,
    per_segment,
    heads,
    per_head,
    n1,
    n2,
    n3,
    n4,
    n5,
    n6,
    n7,
    prefix,
    each,
    DIM: tl.constexpr,
    VDIM: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BL: tl.constexpr,
    BLOCKS: tl.constexpr,
    ANGLES: tl.constexpr,
    UNIT: tl.constexpr,
    PRODUCT: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute the State of one split of the length, for one block of key channels (rotary: of pairs). The last of the
    `per_segment` splits of `span` tokens may be empty. A tile's maxima cost more than its products, so exponents first
    refer to the first tile's maximum. If a sum then shows that the split's logits range too far for it, the split is
    computed again with the maximum of all its tokens. Either way no exponent overflows with `top` as its reference.

    forget: decay rate of each head for a token; weights are then those at the segment's end."""
    KIND: tl.constexpr = ANGLES[0]
    OPERAND: tl.constexpr = tl.bfloat16 if PRODUCT[0] else tl.float32
    bh, split = (tl.program_id(0) // BLOCKS).to(tl.int64), tl.program_id(1)
    b, h = bh // heads, bh % heads
    WIDTH: tl.constexpr = DIM // 2 if KIND == 2 else DIM
    kc, vc = tl.program_id(0) % BLOCKS * BK + tl.arange(0, BK), tl.arange(0, BV)
    inside = kc < WIDTH
    k_rows, v_rows = (k, b, h, skb, skt, skh, WIDTH, UNIT), (v, b, h, svb, svt, svh, VDIM, UNIT)
    step = tl.cdiv(tl.cdiv(span, BL), per_segment) * BL
    begin = split // per_segment * span + split % per_segment * step
    end = min(min(begin + step, (split // per_segment + 1) * span), length)
    row, slot, base = b, split, prefix
    if splits is not None:
        row, slot, begin, end, base = read_split(splits, split)
    angles = (theta, offset, each, h * per_head, (n1, n2, n3, n4, n5, n6, n7))
    freqs = slot_frequencies(angles, shapes, row, base, kc, ANGLES)
    rate = None if forget is None else log2_rate(forget, bh, heads)
    mx, mx2 = _maxima(k_rows, mask, None, begin, min(begin + BL, end), length, kc, BL, KIND)
    mx, mx2 = tl.where(mx == float("-inf"), 0.0, mx), tl.where(mx2 == float("-inf"), 0.0, mx2)
    at = (bh * n_splits + slot) * DIM + kc
    _store_top(top, at, mx, mx2, inside, WIDTH, KIND)
    sm, sm2, acc = _collect(
        k_rows, v_rows, mask, freqs, rate, (mx, mx2), (begin, end, length), kc, vc, BL, ANGLES, PRODUCT, STAGES, ROWS
    )
    good = (sm > 1e-25) & (sm < 1e25)
    if KIND == 2:
        good = good & (sm2 > 1e-25) & (sm2 < 1e25)
    if tl.min((good | (kc >= WIDTH)).to(tl.int32), 0) == 0:
        mx, mx2 = _maxima(k_rows, mask, rate, begin, end, length, kc, BL, KIND)
        _store_top(top, at, mx, mx2, inside, WIDTH, KIND)
        sm, sm2, acc = _collect(
            k_rows, v_rows, mask, freqs, rate, (mx, mx2), (begin, end, length), kc, vc, BL, ANGLES, PRODUCT, 1, ROWS
        )
    tl.debug_barrier()  # loaded again: a register less in the loop
    fix = slip(tl.load(top + at, mask=inside, other=0.0), OPERAND)
    if forget is not None:
        mx = tl.load(top + at, mask=inside, other=0.0)
        mx, rest = later(mx, rate * ((split // per_segment + 1) * span - end).to(tl.float32))
        fix *= rest
        tl.debug_barrier()
        tl.store(top + at, mx, inside)
    tl.store(total + at, sm * fix, inside)
    HALVES: tl.constexpr = 1 if KIND == 0 else 2
    to = memory + ((bh * n_splits + slot) * (HALVES * DIM) + kc)[None, :] * VDIM + vc[:, None]
    in_tile = (vc < VDIM)[:, None] & inside[None, :]
    if KIND == 0:
        tl.store(to, acc * fix[None, :], in_tile)
    elif KIND == 1:
        cos, sin = deinterleave(acc)
        tl.store(to, cos * fix[None, :], in_tile)
        tl.store(to + DIM * VDIM, sin * fix[None, :], in_tile)
    else:
        fix2 = slip(tl.load(top + at + WIDTH, mask=inside, other=0.0), OPERAND)
        one, two = deinterleave(acc)
        cos, sin = deinterleave(one)
        tl.store(to, cos * fix[None, :], in_tile)
        tl.store(to + DIM * VDIM, sin * fix[None, :], in_tile)
        cos, sin = deinterleave(two)
        tl.store(to + WIDTH * VDIM, cos * fix2[None, :], in_tile)
        tl.store(to + (DIM + WIDTH) * VDIM, sin * fix2[None, :], in_tile)
        tl.store(total + at + WIDTH, sm2 * fix2, inside)
