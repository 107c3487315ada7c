"""The gradient of queries in the causal form, and of the State before a segment."""

# mypy: disable-error-code="assignment"
# (a jit function builds its tuples of tensors step by step)
from __future__ import annotations

import triton
import triton.language as tl

from ndlightnet_kernels.causal_chunks import (
    at_level,
    decay_exp_until,
    decay_state,
    decayed,
    fall_to,
    gather,
    load_entry,
    next_anchor,
    rope_backward,
    rotation,
    silu_and_over,
    to_anchor,
    token_decay_exps,
)
from ndlightnet_kernels.phases import from_origin, pinned, slot_frequencies
from ndlightnet_kernels.segments import log2_rate
from ndlightnet_kernels.tiles import SIZES, dense, dot, hide, load, load_keys, powers, silu, valid_tokens, weight


@triton.jit(do_not_specialize=SIZES)
def _causal_dq(
    q,
    k,
    v,
    dout,
    mask,
    theta,
    offset,
    forget,
    top,
    total,
    memory,
    flag,
    dq,
    dphi,
    chunk_top,
    chunk_total,
    dsums,
    dmemories,
    dtheta,
    sqb,
    sqt,
    sqh,
    skb,
    skt,
    skh,
    svb,
    svt,
    svh,
    sob,
    sot,
    soh,
    length,
    span,
    segments,
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
    CAREFUL: tl.constexpr,
    ANGLES: tl.constexpr,
    UNIT: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Compute dq, forward in time, by dphi_t = memory_t dout_t, and what the segment's queries add
    to the gradients of the State before it (unless `dsums` is None).

    Also stores dphi and each chunk's (max, sum) for `_causal_dkv`.
    """
    KIND: tl.constexpr = ANGLES[0]
    OPERAND: tl.constexpr = tl.bfloat16 if PRODUCT[0] else tl.float32
    bh, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = bh // heads, bh % heads
    begin, end = segment * span, min(segment * span + span, length)
    if CAREFUL:
        if tl.load(flag + bh * segments + segment) == 0:
            return
    kc, vc, lane = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BL)
    angles = (theta, offset, each, h * per_head, (n1, n2, n3, n4, n5, n6, n7))
    freqs = slot_frequencies(angles, None, b, prefix, kc, ANGLES)
    q_rows, k_rows = (q, b, h, sqb, sqt, sqh, DIM, UNIT), (k, b, h, skb, skt, skh, DIM, UNIT)
    v_rows, dout_rows = (v, b, h, svb, svt, svh, VDIM, UNIT), (dout, b, h, sob, sot, soh, VDIM, UNIT)
    HALVES: tl.constexpr = 1 if KIND == 0 else 2
    mx, sm, m, m_sin = load_entry(top, total, memory, bh, segment, segments, kc, vc, DIM, VDIM, HALVES)
    entry_top, run, inside = mx, tl.zeros((BL, BK), tl.float32), kc < DIM
    after = top + (bh * (segments + 1) + segment + 1) * DIM + kc
    rate = None if forget is None else log2_rate(forget, bh, heads)
    decay_exp = None if rate is None else token_decay_exps(rate, lane)
    if not CAREFUL:
        anchor = tl.load(after, mask=inside, other=float("-inf"))
        mx, sm, m, m_sin = to_anchor(anchor, mx, sm, m, m_sin, OPERAND)
        if forget is not None:
            fall = tl.exp2(rate * -BL)
            enter = tl.exp2(rate * BL - decay_exp_until(rate, begin, None, BL))  # falls once more in a chunk
            sm, m, m_sin = sm * enter, m * enter, m_sin * enter
        run += tl.where(inside, sm, 1.0)[None, :]
    acc = tl.zeros((BV, BK), tl.float32)
    acc_sin = acc
    dsum = tl.zeros((BK,), tl.float32)
    spread = tl.zeros((BL, BK), tl.float32)
    ones = (lane[:, None] >= lane[None, :]).to(OPERAND)
    for first in range(begin, end, BL):
        t = first + lane
        chunk = (bh * tl.cdiv(length, BL) + first // BL) * DIM + kc
        if forget is not None:
            since = decay_exp_until(rate, begin, None, BL) + rate * (first - begin).to(tl.float32)
            if CAREFUL:
                lag = tl.where(first == begin, since, rate * BL)
                mx, sm, m, m_sin = decay_state(lag, mx, sm, m, m_sin)
            else:
                run, m, m_sin = run * fall, m * fall, m_sin * fall
        if CAREFUL:
            tl.store(chunk_top + chunk, mx, inside)
            tl.store(chunk_total + chunk, sm, inside)
        else:  # all rows are the same
            row = chunk_total + chunk[None, :] + lane[:, None] * 0
            tl.store(row, run, (lane == 0)[:, None] & inside[None, :])
        valid = valid_tokens(mask, b, t, length, length)
        x = load_keys(k_rows, t, kc, length)
        if mask is not None or forget is not None:
            x = hide(x, valid)
        y = load(v_rows, t, vc, valid)
        do = load(dout_rows, t, vc, t < length)
        x_q = load(q_rows, t, kc, t < length).to(tl.float32)
        at_axis, cos, sin = rotation(freqs, t, kc, ANGLES)
        pair = dot(do, tl.trans(y), tl.zeros((BL, BL), tl.float32), PRODUCT)
        pair = tl.where(lane[:, None] >= lane[None, :], pair, 0.0).to(OPERAND)
        zero = tl.zeros((BL, BK), tl.float32)
        far, far_sin = dot(do, m, zero, PRODUCT), zero
        if KIND != 0:
            far_sin = dot(do, m_sin, zero, PRODUCT)
        if CAREFUL:
            phi, slope = silu(x_q)
            best = tl.maximum(mx, tl.max(decayed(x, decay_exp), 0))
            todo = (lane >= 0)[:, None] & inside[None, :]
            anchor, from_entry, d, d_sin = best, zero, zero, zero
            rounds = 0  # each serves at least one row
            while (tl.max(anchor, 0) > float("-inf")) & (rounds < BL):
                rounds += 1
                low, inverse, entered, todo = at_level(x, decay_exp, anchor, mx, sm, todo, ones, PRODUCT)
                e, e_sin = gather(
                    pair, low, cos, sin, far * entered[None, :], far_sin * entered[None, :], KIND, PRODUCT
                )
                d += e * inverse
                d_sin += e_sin * inverse
                from_entry += phi * inverse * entered[None, :]
                anchor = next_anchor(x, decay_exp, mx, todo)
            p, carry = weight(x, best[None, :], decay_exp), weight(mx, best)
        else:
            p = powers(x, mx, OPERAND, decay_exp)
            p = pinned(p.to(OPERAND) if KIND == 0 else p)
            d, d_sin = gather(pair, p, cos, sin, far, far_sin, KIND, PRODUCT)
            s = dot(ones, p, run, PRODUCT)
            phi, slope, inverse, from_entry = silu_and_over(x_q, s)
            run = dot(tl.full((BL, BL), 1.0, OPERAND), p, run, PRODUCT)
            d, d_sin = d * inverse, d_sin * inverse
        grad = rope_backward(d, d_sin, cos, sin, KIND)
        to = dense(b, h, t, kc, length, heads, DIM)
        in_tile = (t < length)[:, None] & inside[None, :]
        tl.store(dphi + to, grad.to(dphi.dtype.element_ty), in_tile)
        tl.store(dq + to, (grad * slope).to(dq.dtype.element_ty), in_tile)
        if dtheta is not None:
            angle = tl.sum(from_origin(freqs, at_axis) * phi * (cos * d_sin - sin * d), 0)
            tl.store(dtheta + chunk, angle, inside)
        if CAREFUL:
            # from this chunk's units to those of the State before
            rescale = weight(entry_top, mx, None if forget is None else -since)
            if dsums is not None:
                dsum += rescale * tl.sum(from_entry * grad, 0)
                from_entry *= rescale[None, :]
            m, m_sin = m * carry[None, :], m_sin * carry[None, :]
            sm = sm * carry + tl.sum(p.to(OPERAND).to(tl.float32), 0)
            mx = best
        if dsums is not None:
            if not CAREFUL:
                if forget is not None:
                    from_entry *= tl.exp2(-since)
                spread += from_entry * grad
            acc, acc_sin = gather(tl.trans(do), from_entry, cos, sin, acc, acc_sin, KIND, PRODUCT)
        m, m_sin = gather(tl.trans(y), p, cos, sin, m, m_sin, KIND, PRODUCT)
    if dsums is not None:
        if not CAREFUL:
            rescale = fall_to(entry_top, mx, OPERAND)
            dsum = tl.sum(spread, 0) * rescale
            acc, acc_sin = acc * rescale[None, :], acc_sin * rescale[None, :]
        tl.store(dsums + (bh * segments + segment) * DIM + kc, dsum, inside)
        to = dmemories + ((bh * segments + segment) * (HALVES * DIM) + kc)[None, :] * VDIM + vc[:, None]
        in_tile = inside[None, :] & (vc < VDIM)[:, None]
        tl.store(to, acc, in_tile)
        if KIND != 0:
            tl.store(to + DIM * VDIM, acc_sin, in_tile)
