"""Gradients of causal attention: one pass forward in time (dq), one backward (dk, dv).

dphi_t = memory_t dout_t;  dv_u = sum_(t >= u) (phi_t / s_t . exp(k_u)) dout_t;
dk_u = exp(k_u) sum_(t >= u) (phi_t (v_u . dout_t) - phi_t dphi_t) / s_t,  per key channel.
Segments, anchors and the careful form as in causal.py.
"""

# mypy: disable-error-code="assignment"
# (a jit function builds its tuples of tensors step by step)
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ndlightnet_kernels.causal_chunks import (
    at_level,
    decay_exp_until,
    decayed,
    gather,
    next_anchor,
    read_memory,
    rope_backward,
    rotation,
    scores,
    silu_over,
    token_decay_exps,
)
from ndlightnet_kernels.causal_dq import _causal_dq
from ndlightnet_kernels.launch import Launch, remembered
from ndlightnet_kernels.phases import from_origin, materialized, slot_frequencies
from ndlightnet_kernels.plans import CAREFUL, Chunks, causal, fills, plan_segments
from ndlightnet_kernels.position import FlatPosition
from ndlightnet_kernels.segments import log2_rate, memory_launch, suffix_grads
from ndlightnet_kernels.sums import theta_grad
from ndlightnet_kernels.tiles import (
    SIZES,
    arguments,
    cdiv,
    dense,
    dense_empty,
    dense_rows,
    dot,
    flags,
    form,
    hide,
    load,
    load_keys,
    pad,
    powers,
    scratch,
    silu,
    slip,
    valid_tokens,
    weight,
)


@triton.jit(do_not_specialize=SIZES)
def _causal_dkv(
    q,
    k,
    v,
    dout,
    mask,
    theta,
    offset,
    forget,
    top,
    flag,
    dphi,
    chunk_top,
    chunk_total,
    dsums,
    dmemories,
    dk,
    dv,
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
    """Compute dk and dv of a segment, backward in time, from its later queries and from gradients
    of later segments, carried as an adjoint State in units of the State's maximum."""
    KIND: tl.constexpr = ANGLES[0]
    OPERAND: tl.constexpr = tl.bfloat16 if PRODUCT[0] else tl.float32
    bh, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = bh // heads, bh % heads
    if CAREFUL:
        if tl.load(flag + bh * segments + segment) == 0:
            return
    kc, vc, lane = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BL)
    angles = (theta, offset, each, h * per_head, (n1, n2, n3, n4, n5, n6, n7))
    freqs = slot_frequencies(angles, None, b, prefix, kc, ANGLES)
    q_rows, k_rows = (q, b, h, sqb, sqt, sqh, DIM, UNIT), (k, b, h, skb, skt, skh, DIM, UNIT)
    v_rows, dout_rows = (v, b, h, svb, svt, svh, VDIM, UNIT), (dout, b, h, sob, sot, soh, VDIM, UNIT)
    HALVES: tl.constexpr = 1 if KIND == 0 else 2
    inside = kc < DIM
    dsum, acc = tl.zeros((BL, BK), tl.float32), tl.zeros((BV, BK), tl.float32)
    acc_sin = acc
    if dsums is not None:
        dsum += tl.load(dsums + (bh * segments + segment) * DIM + kc, mask=inside, other=0.0)[None, :]
        tile = dmemories + ((bh * segments + segment) * (HALVES * DIM) + kc)[None, :] * VDIM + vc[:, None]
        tile_mask = inside[None, :] & (vc < VDIM)[:, None]
        acc = tl.load(tile, mask=tile_mask, other=0.0)
        if KIND != 0:
            acc_sin = tl.load(tile + DIM * VDIM, mask=tile_mask, other=0.0)
    at = (bh * (segments + 1) + segment + 1) * DIM + kc
    unit = tl.load(top + at, mask=inside, other=float("-inf"))
    rate = None if forget is None else log2_rate(forget, bh, heads)
    decay_exp = None if rate is None else token_decay_exps(rate, lane)
    if not CAREFUL:  # in units of the keys
        fix = slip(unit, OPERAND)[None, :]
        dsum, acc, acc_sin = dsum * fix, acc * fix, acc_sin * fix
    later = lane[None, :] >= lane[:, None]  # queries that attend to a key
    later_tokens, ones = later.to(OPERAND), (lane[:, None] >= lane[None, :]).to(OPERAND)
    end = min(segment * span + span, length)
    chunks = tl.cdiv(end - segment * span, BL)
    for i in range(chunks):
        first = segment * span + (chunks - 1 - i) * BL
        t = first + lane
        chunk = (bh * tl.cdiv(length, BL) + first // BL) * DIM + kc
        mx = unit
        if CAREFUL:
            mx = tl.load(chunk_top + chunk, mask=inside, other=float("-inf"))
        sm = tl.load(chunk_total + chunk, mask=inside, other=1.0)
        valid = valid_tokens(mask, b, t, length, length)
        x = load_keys(k_rows, t, kc, length)
        if mask is not None or forget is not None:
            x = hide(x, valid)
        y = load(v_rows, t, vc, valid)
        do = load(dout_rows, t, vc, t < length)
        x_q = load(q_rows, t, kc, t < length).to(tl.float32)
        to = dense(b, h, t, kc, length, heads, DIM)
        valid_k = (t < length)[:, None] & inside[None, :]
        g = tl.load(dphi + to, mask=valid_k, other=0.0).to(tl.float32)
        at_axis, cos, sin = rotation(freqs, t, kc, ANGLES)
        pair = dot(y, tl.trans(do), tl.zeros((BL, BL), tl.float32), PRODUCT)
        pair = tl.where(later, pair, 0.0).to(OPERAND)
        zero = tl.zeros((BL, BK), tl.float32)
        score = tl.zeros((BL, BL), tl.float32)
        if forget is not None:  # from the next chunk's middle, or from the segment's last token
            lag = tl.where(i == 0, decay_exp_until(rate, segment * span, end, BL), rate * BL)
        if CAREFUL:
            best = tl.maximum(mx, tl.max(decayed(x, decay_exp), 0))
            # to this chunk's units; the segment's first `unit` may differ from the exact maximum
            both = (best > float("-inf")) & (unit > float("-inf"))
            factor = (best - unit) * 1.4426950408889634
            if forget is not None:
                factor -= lag
            factor = tl.where(both, tl.exp2(factor), 0.0)
            acc, acc_sin = acc * factor[None, :], acc_sin * factor[None, :]
            dsum *= factor[None, :]
        else:
            best = mx
            if forget is not None:
                fall = tl.exp2(-lag)
                acc, acc_sin, dsum = acc * fall, acc_sin * fall, dsum * fall
        p = materialized(powers(x, best, OPERAND, decay_exp))
        d, d_sin = dot(y, acc, zero, PRODUCT), zero
        if KIND != 0:
            d_sin = dot(y, acc_sin, zero, PRODUCT)
        if CAREFUL:
            d, d_sin, down = d * p, d_sin * p, dsum * p
            todo = (lane >= 0)[:, None] & inside[None, :]
            anchor, from_entry, carry = best, zero, weight(mx, best)
            phi, _ = silu(x_q)
            rounds = 0  # each serves at least one row
            while (tl.max(anchor, 0) > float("-inf")) & (rounds < BL):
                rounds += 1
                low, inverse, entered, todo = at_level(x, decay_exp, anchor, mx, sm, todo, ones, PRODUCT)
                f = phi * inverse
                score = scores(low, f, cos, sin, score, KIND, PRODUCT)
                e, e_sin = gather(pair, f, cos, sin, zero, zero, KIND, PRODUCT)
                d += e * low
                d_sin += e_sin * low
                down += low * dot(later_tokens, g * f, zero, PRODUCT)
                from_entry += f * entered[None, :]
                anchor = next_anchor(x, decay_exp, mx, todo)
        else:
            from_entry = silu_over(x_q, dot(ones, p, zero + sm[None, :], PRODUCT))
            score = scores(p, from_entry, cos, sin, score, KIND, PRODUCT)
            d, d_sin = gather(pair, from_entry, cos, sin, d, d_sin, KIND, PRODUCT)
            down = dot(later_tokens, g * from_entry, dsum, PRODUCT)
            d, d_sin, down = d * p, d_sin * p, down * p
        grad = rope_backward(d, d_sin, cos, sin, KIND) - down
        tl.store(dk + to, grad.to(dk.dtype.element_ty), valid_k)
        if dtheta is not None:
            angle = tl.sum(from_origin(freqs, at_axis) * (cos * d_sin - sin * d), 0)
            tl.store(dtheta + chunk, angle, inside)
        dy = tl.zeros((BL, BV), tl.float32)
        dy = read_memory(p, acc, acc_sin, cos, sin, dy, KIND, PRODUCT)
        dy = dot(tl.where(later, score, 0.0), do, dy, PRODUCT)
        to = dense(b, h, t, vc, length, heads, VDIM)
        in_tile = (t < length)[:, None] & (vc < VDIM)[None, :]
        tl.store(dv + to, tl.where(valid[:, None], dy, 0.0).to(dv.dtype.element_ty), in_tile)
        if CAREFUL:
            acc, acc_sin = acc * carry[None, :], acc_sin * carry[None, :]
            dsum *= carry[None, :]
            unit = mx
        acc, acc_sin = gather(tl.trans(do), from_entry, cos, sin, acc, acc_sin, KIND, PRODUCT)
        # the sum in every row, by a product that costs less than an exchange
        dsum = dot(tl.full((BL, BL), 1.0, OPERAND), g * from_entry, dsum, PRODUCT)


Pair = tuple[Launch, Launch]


def _plan(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, position: FlatPosition
) -> tuple[int, int, bool, Pair, Launch, Pair]:
    """Return the numbers of segments and of chunks, whether rows alone fill the card, and the
    launches: dq, between segments, dk and dv."""
    (batch, length, heads, dim), vdim = k.shape, v.shape[-1]
    segments, span = plan_segments(k, vdim, position.kind)
    chosen = causal(k, vdim, position.kind)
    rows, sizes = batch * heads, {"span": span, "segments": segments, "BK": pad(dim), "BV": pad(vdim)}
    sizes |= {"BL": chosen.dq.chunk, **arguments(position, vdim, k=k, q=q, v=v, o=dout)}

    def forms(kernel: Any, chunks: Chunks) -> Pair:
        plain, careful = (
            Launch(kernel, (rows, segments), CAREFUL=c is CAREFUL, **sizes, **c.options()) for c in (chunks, CAREFUL)
        )
        return plain, careful

    counts = {"segments": segments, "length": length, "span": span, "heads": heads}
    between = memory_launch(suffix_grads, rows, (position.halves, dim, vdim), **counts)
    filled = fills(k, vdim, position.kind)
    chunks = cdiv(length, chosen.dq.chunk)
    dq, dkv = forms(_causal_dq, chosen.dq), forms(_causal_dkv, chosen.dkv)
    return segments, chunks, filled, dq, between, dkv


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    forget: Tensor | None,
    entry: tuple[Tensor, Tensor, Tensor, Tensor],
    position: FlatPosition,
    dout: Tensor,
    dtotal: Tensor | None,
    dmemory: Tensor | None,
    past: bool,
    learn: bool,
) -> tuple[Tensor, ...]:
    """Return gradients of q, k, v, of the initial State's sum and memory (empty if not `past`:
    there was no State), and of theta (heads, slots; empty if not wanted)."""
    q, k, v, dout = map(dense_rows, (q, k, v, dout))
    (batch, _, heads, dim), vdim = k.shape, v.shape[-1]
    segments, chunks, filled, by_q, between, by_k = remembered(
        ("causal_backward", form(q, k, v, dout), position.key), lambda: _plan(q, k, v, dout, position)
    )
    halves, rows = position.halves, batch * heads
    dq, dk, dv = map(dense_empty, (q, k, v))
    dphi = torch.empty_like(dq)
    chunk_top, chunk_total = scratch(k, rows, chunks, dim), scratch(k, rows, chunks, dim)
    sizes = (rows, segments, dim), (rows, segments, halves * dim, vdim)
    before = past or not filled  # whole rows often have no State before them
    after = before or dtotal is not None or dmemory is not None
    query_grads, later = (tuple(scratch(k, *size) if needed else None for size in sizes) for needed in (before, after))
    dtheta_q, dtheta_k = (scratch(k, batch, heads, chunks, dim) if learn else None for _ in range(2))
    inputs = q, k, v, dout, flags(mask), *position.angles, forget
    for launch in by_q:
        launch(*inputs, *entry, dq, dphi, chunk_top, chunk_total, *query_grads, dtheta_q)
    sizes = (dim,), (halves * dim, vdim)
    first = tuple(scratch(k, batch, heads, *size) if past else scratch(k, 0) for size in sizes)
    if after:
        dmemories = (x if x is None else x.contiguous() for x in (dtotal, dmemory))
        between(forget, entry[0], *query_grads, *dmemories, *(first if past else (None, None)), *later)
    for launch in by_k:
        launch(*inputs, entry[0], entry[3], dphi, chunk_top, chunk_total, *later, dk, dv, dtheta_k)
    partial = None if dtheta_q is None or dtheta_k is None else dtheta_q + dtheta_k
    return dq, dk, dv, *first, theta_grad(k, partial)
