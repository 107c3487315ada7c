"""Gradients of causal attention to the last tokens: by chunks of queries (dq) and of keys (dk, dv).

dphi_t = memory_t dout_t;  dv_u = sum_t (phi_t / s_t . exp(k_u)) dout_t;
dk_u = exp(k_u) sum_t (phi_t (v_u . dout_t) - phi_t dphi_t) / s_t,  per key channel, over t with
u <= t < u + window. Anchors and the careful form as in window.py.
"""

# mypy: disable-error-code="assignment"
# (a jit function builds its tuples of tensors step by step)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ndlightnet_kernels.causal_chunks import TINY, gather, reciprocal, rope_backward, rotation, silu_and_over
from ndlightnet_kernels.launch import remembered
from ndlightnet_kernels.phases import from_origin, slot_frequencies
from ndlightnet_kernels.plans import CAREFUL, windowed
from ndlightnet_kernels.position import FlatPosition
from ndlightnet_kernels.segments import log2_rate
from ndlightnet_kernels.sums import theta_grad
from ndlightnet_kernels.tiles import (
    SIZES,
    dense,
    dense_empty,
    dense_rows,
    dot,
    flags,
    form,
    hide,
    load,
    load_keys,
    powers,
    scratch,
    silu,
    valid_tokens,
)
from ndlightnet_kernels.window import (
    attended,
    attending,
    capped,
    next_window_anchor,
    plan,
    products,
    since,
    window_keys,
)

CAREFUL_BL = tl.constexpr(CAREFUL.chunk)


@triton.jit
def _store_angles(dtheta, angle, bh, block, chunks, kc, inside, DIM, BL, PLAIN, LEAST):
    """Store a chunk's gradient of angles among those of the careful form's chunks, which may be
    smaller: in the first of them, zeros in the others."""
    at = (bh * (chunks * (PLAIN // LEAST)) + block * (BL // LEAST)) * DIM + kc
    tl.store(dtheta + at, angle, inside)
    for i in tl.static_range(1, BL // LEAST):
        tl.store(dtheta + at + i * DIM, tl.zeros(angle.shape, tl.float32), inside)


@triton.jit(do_not_specialize=SIZES)
def _window_dq(
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
    levels,
    dq,
    dphi,
    features,
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
    window,
    chunks,
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
    PLAIN: tl.constexpr,
    CAREFUL: tl.constexpr,
    ANGLES: tl.constexpr,
    UNIT: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Compute dq of a chunk; also dphi, phi / s, and in the careful form each query's anchor."""
    KIND: tl.constexpr = ANGLES[0]
    OPERAND: tl.constexpr = tl.bfloat16 if PRODUCT[0] else tl.float32
    bh, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = bh // heads, bh % heads
    chunk = bh * chunks + block * BL // PLAIN
    if CAREFUL:
        if tl.load(flag + chunk) == 0:
            return
    first = block * BL
    kc, vc, t = tl.arange(0, BK), tl.arange(0, BV), first + tl.arange(0, BL)
    angles = (theta, offset, each, h * per_head, (n1, n2, n3, n4, n5, n6, n7))
    freqs = slot_frequencies(angles, None, b, prefix, kc, ANGLES)
    q_rows, k_rows = (q, b, h, sqb, sqt, sqh, DIM, UNIT), (k, b, h, skb, skt, skh, DIM, UNIT)
    v_rows, dout_rows = (v, b, h, svb, svt, svh, VDIM, UNIT), (dout, b, h, sob, sot, soh, VDIM, UNIT)
    rate = None if forget is None else log2_rate(forget, bh, heads)
    inside, begin = kc < DIM, tl.maximum(first - window + 1, 0) // BL * BL
    view = (first, begin, length, window)
    x_q = load(q_rows, t, kc, t < length).to(tl.float32)
    do = load(dout_rows, t, vc, t < length)
    in_tile = (t < length)[:, None] & inside[None, :]
    to = dense(b, h, t, kc, length, heads, DIM)
    d = tl.zeros((BL, BK), tl.float32)
    d_sin = d
    if CAREFUL:
        phi, slope = silu(x_q)
        todo, f, level = in_tile, d, d - float("inf")
        anchor = next_window_anchor(k_rows, mask, None, t, view, kc, rate, PLAIN, PRODUCT)
        rounds = 0  # each serves at least one query
        while (tl.max(anchor, 0) > float("-inf")) & (rounds < BL):
            rounds += 1
            s = tl.zeros((BL, BK), tl.float32)
            e, e_sin = s, s
            for at in range(begin, first + BL, BL):
                u = at + tl.arange(0, BL)
                x, valid = window_keys(k_rows, mask, u, view, kc)
                decay_exp = None if rate is None else since(rate, u, first, PLAIN)
                p, seen = capped(x, anchor, decay_exp), attended(t, u, window)
                y = load(v_rows, u, vc, valid)
                _u, cos, sin = rotation(freqs, u, kc, ANGLES)
                pair = dot(do, tl.trans(y), tl.zeros((BL, BL), tl.float32), PRODUCT)
                pair = tl.where(seen, pair, 0.0).to(OPERAND)
                s = dot(seen, p, s, PRODUCT)
                e, e_sin = gather(pair, p, cos, sin, e, e_sin, KIND, PRODUCT)
            good = todo & (s >= TINY)
            inverse = tl.where(good, reciprocal(s), 0.0)
            d, d_sin, f = d + e * inverse, d_sin + e_sin * inverse, f + phi * inverse
            level = tl.where(good, anchor[None, :], level)
            todo = todo & (s < TINY)
            anchor = next_window_anchor(k_rows, mask, todo, t, view, kc, rate, PLAIN, PRODUCT)
        tl.store(levels + to, level, in_tile)
    else:
        anchor = tl.load(top + chunk * DIM + kc, mask=inside, other=0.0)
        s = d
        for at in range(begin, first + BL, BL):
            u = at + tl.arange(0, BL)
            x, valid = window_keys(k_rows, mask, u, view, kc)
            decay_exp = None if rate is None else since(rate, u, first, PLAIN)
            p, seen = powers(x, anchor, OPERAND, decay_exp), attended(t, u, window)
            y = load(v_rows, u, vc, valid)
            _u, cos, sin = rotation(freqs, u, kc, ANGLES)
            pair = dot(do, tl.trans(y), tl.zeros((BL, BL), tl.float32), PRODUCT)
            pair = tl.where(seen, pair, 0.0).to(OPERAND)
            s = dot(seen, p, s, PRODUCT)
            d, d_sin = gather(pair, p, cos, sin, d, d_sin, KIND, PRODUCT)
        phi, slope, inverse, f = silu_and_over(x_q, tl.where(in_tile, s, 1.0))
        d, d_sin = d * inverse, d_sin * inverse
    at_axis, cos, sin = rotation(freqs, t, kc, ANGLES)
    grad = rope_backward(d, d_sin, cos, sin, KIND)
    tl.store(dphi + to, grad.to(dphi.dtype.element_ty), in_tile)
    tl.store(features + to, f.to(features.dtype.element_ty), in_tile)
    tl.store(dq + to, (grad * slope).to(dq.dtype.element_ty), in_tile)
    if dtheta is not None:
        angle = tl.sum(from_origin(freqs, at_axis) * phi * (cos * d_sin - sin * d), 0)
        _store_angles(dtheta, angle, bh, block, chunks, kc, inside, DIM, BL, PLAIN, CAREFUL_BL)


@triton.jit
def _add(p, fg, f, chunk_pair, d, d_sin, down, dy, KIND, PRODUCT):
    """Add what queries with features f give to the gradients of keys and values. chunk_pair: cos and sin of queries,
    masked products of values and dout, which queries attend, dout, cos and sin of keys."""
    cos_t, sin_t, pair, seen, do, cos, sin = chunk_pair
    zero = tl.zeros(p.shape, tl.float32)
    e, e_sin = gather(pair, f, cos_t, sin_t, zero, zero, KIND, PRODUCT)
    d, d_sin = d + e * p, d_sin + e_sin * p
    down += p * dot(seen, fg, zero, PRODUCT)
    score = products(p, cos, sin, f, cos_t, sin_t, KIND, PRODUCT)
    return d, d_sin, down, dot(tl.where(seen, score, 0.0), do, dy, PRODUCT)


@triton.jit(do_not_specialize=SIZES)
def _window_dkv(
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
    levels,
    dphi,
    features,
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
    window,
    chunks,
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
    PLAIN: tl.constexpr,
    CAREFUL: tl.constexpr,
    ANGLES: tl.constexpr,
    UNIT: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Compute dk and dv of a chunk of keys; by the careful form if any chunk of queries that
    attends to them was flagged."""
    KIND: tl.constexpr = ANGLES[0]
    OPERAND: tl.constexpr = tl.bfloat16 if PRODUCT[0] else tl.float32
    bh, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = bh // heads, bh % heads
    begin = block * BL
    end, lost = tl.minimum(begin + BL + window - 1, length), block * 0
    start = begin // PLAIN * PLAIN
    for at in range(start, tl.minimum(start + PLAIN + window - 1, length), PLAIN):
        lost = tl.maximum(lost, tl.load(flag + bh * chunks + at // PLAIN))
    if (lost == 0) if CAREFUL else (lost != 0):
        return
    kc, vc, u = tl.arange(0, BK), tl.arange(0, BV), begin + tl.arange(0, BL)
    angles = (theta, offset, each, h * per_head, (n1, n2, n3, n4, n5, n6, n7))
    freqs = slot_frequencies(angles, None, b, prefix, kc, ANGLES)
    k_rows = (k, b, h, skb, skt, skh, DIM, UNIT)
    v_rows, dout_rows = (v, b, h, svb, svt, svh, VDIM, UNIT), (dout, b, h, sob, sot, soh, VDIM, UNIT)
    rate = None if forget is None else log2_rate(forget, bh, heads)
    inside = kc < DIM
    valid = valid_tokens(mask, b, u, length, length)
    x = load_keys(k_rows, u, kc, length)
    y = load(v_rows, u, vc, valid)
    at_axis, cos, sin = rotation(freqs, u, kc, ANGLES)
    d, dy = tl.zeros((BL, BK), tl.float32), tl.zeros((BL, BV), tl.float32)
    d_sin, down = d, d
    for at in range(begin, end, BL):
        t = at + tl.arange(0, BL)
        chunk = bh * chunks + at // PLAIN
        anchor = tl.load(top + chunk * DIM + kc, mask=inside, other=0.0)
        to = dense(b, h, t, kc, length, heads, DIM)
        in_tile = (t < length)[:, None] & inside[None, :]
        f = tl.load(features + to, mask=in_tile, other=0.0).to(tl.float32)
        g = tl.load(dphi + to, mask=in_tile, other=0.0).to(tl.float32)
        do = load(dout_rows, t, vc, t < length)
        _, cos_t, sin_t = rotation(freqs, t, kc, ANGLES)
        seen = attending(u, t, window)
        pair = dot(y, tl.trans(do), tl.zeros((BL, BL), tl.float32), PRODUCT)
        pair = tl.where(seen, pair, 0.0).to(OPERAND)
        # a key that no query of the chunk attends to may be far above its anchor
        some = hide(x, valid & (u > at - window))
        chunk_pair = (cos_t, sin_t, pair, seen, do, cos, sin)
        decay_exp = None if rate is None else since(rate, u, at, PLAIN)
        if CAREFUL:
            level = tl.where(in_tile, anchor[None, :], float("-inf"))
            if tl.load(flag + chunk) != 0:
                level = tl.load(levels + to, mask=in_tile, other=float("-inf"))
            anchor = tl.max(level, 0)
            while tl.max(anchor, 0) > float("-inf"):
                mine = level == anchor[None, :]
                level_f = tl.where(mine & in_tile, f, 0.0)
                p = capped(some, anchor, decay_exp)
                d, d_sin, down, dy = _add(p, g * level_f, level_f, chunk_pair, d, d_sin, down, dy, KIND, PRODUCT)
                level = tl.where(mine, float("-inf"), level)
                anchor = tl.max(level, 0)
        else:
            p = powers(some, anchor, OPERAND, decay_exp)
            d, d_sin, down, dy = _add(p, g * f, f, chunk_pair, d, d_sin, down, dy, KIND, PRODUCT)
    grad = rope_backward(d, d_sin, cos, sin, KIND) - down
    tl.store(
        dk + dense(b, h, u, kc, length, heads, DIM),
        grad.to(dk.dtype.element_ty),
        (u < length)[:, None] & inside[None, :],
    )
    if dtheta is not None:
        angle = tl.sum(from_origin(freqs, at_axis) * (cos * d_sin - sin * d), 0)
        _store_angles(dtheta, angle, bh, block, chunks, kc, inside, DIM, BL, PLAIN, CAREFUL_BL)
    in_tile = (u < length)[:, None] & (vc < VDIM)[None, :]
    to = dense(b, h, u, vc, length, heads, VDIM)
    tl.store(dv + to, tl.where(valid[:, None], dy, 0.0).to(dv.dtype.element_ty), in_tile)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    forget: Tensor | None,
    top: Tensor,
    flag: Tensor,
    dout: Tensor,
    window: int,
    position: FlatPosition,
    learn: bool,
) -> tuple[Tensor, ...]:
    """Return gradients of q, k, v, and of theta (heads, slots; empty if not wanted)."""
    q, k, v, dout = inputs = tuple(map(dense_rows, (q, k, v, dout)))
    chosen = windowed(k, v.shape[-1], position.kind)
    by_q, by_k = remembered(
        ("window_backward", form(*inputs), window, position.key),
        lambda: tuple(
            plan(kernel, c, position, window, k, v, q=q, o=dout)
            for kernel, c in ((_window_dq, chosen.dq), (_window_dkv, chosen.dkv))
        ),
    )
    dq, dk, dv = map(dense_empty, (q, k, v))
    dphi, levels = torch.empty_like(dq), scratch(k, *k.shape)
    features = dq.new_empty(dq.shape, dtype=q.dtype if q.dtype == torch.bfloat16 else torch.float32)
    batch, _, heads, dim = k.shape
    chunks = top.shape[1] * (chosen.dq.chunk // CAREFUL.chunk)
    dtheta_q, dtheta_k = (scratch(k, batch, heads, chunks, dim) if learn else None for _ in range(2))
    tensors = *inputs, flags(mask), *position.angles, forget, top, flag, levels
    for launch in by_q:
        launch(*tensors, dq, dphi, features, dtheta_q)
    for launch in by_k:
        launch(*tensors, dphi, features, dk, dv, dtheta_k)
    partial = None if dtheta_q is None or dtheta_k is None else dtheta_q + dtheta_k
    return dq, dk, dv, theta_grad(k, partial)
