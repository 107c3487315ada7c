"""Gradients of global attention: of queries and the State that they read, and of a source.

Symbols as in attention.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ndlightnet_kernels.attention import _load_query, _read_memory
from ndlightnet_kernels.launch import Launch, remembered
from ndlightnet_kernels.phases import coordinates, cos_sin, cos_sin_once, from_origin, slot_frequencies
from ndlightnet_kernels.plans import operand_bytes, plan
from ndlightnet_kernels.position import KINDS, FlatPosition
from ndlightnet_kernels.segments import join_grads
from ndlightnet_kernels.summarize import _keys
from ndlightnet_kernels.sums import theta_grad
from ndlightnet_kernels.tiles import (
    SIZES,
    address,
    arguments,
    cdiv,
    deinterleave,
    dense_empty,
    dense_rows,
    dot,
    even,
    flags,
    form,
    interleave,
    load,
    pad,
    plan_splits,
    powers,
    processors,
    rope_features,
    rope_features_backward,
    rows_added,
    scratch,
    silu,
    split_bounds,
    valid_tokens,
)


@triton.jit(do_not_specialize=SIZES)
def _read_backward(
    q,
    dout,
    total,
    memory,
    splits,
    shapes,
    theta,
    offset,
    dq,
    dmemories,
    dtheta,
    sqb,
    sqt,
    sqh,
    sob,
    sot,
    soh,
    sdqb,
    sdqt,
    sdqh,
    length,
    span,
    n_splits,
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
):
    """Compute dq, and a split's gradient (fa, fb)^T dout of the normalised memory, for a block of features."""
    KIND: tl.constexpr = ANGLES[0]
    SLOTS: tl.constexpr = ANGLES[2]
    OPERAND: tl.constexpr = tl.bfloat16 if PRODUCT[0] else tl.float32
    bh, split = (tl.program_id(0) // BLOCKS).to(tl.int64), tl.program_id(1)
    b, h = bh // heads, bh % heads
    row, slot, begin, end, base, state = split_bounds(splits, split, b, bh, h, heads, span, length, prefix)
    WIDTH: tl.constexpr = DIM // 2 if KIND == 2 else DIM
    c, vc = tl.program_id(0) % BLOCKS * BK + tl.arange(0, BK), tl.arange(0, BV)
    ma, mb = _read_memory(total, memory, state, c, vc, DIM, VDIM, KIND)
    m = tl.trans(ma.to(OPERAND))
    if KIND != 0:
        m = interleave(m, tl.trans(mb.to(OPERAND)), even(SLOTS, VDIM))
    HALVES: tl.constexpr = 1 if KIND == 0 else 2
    dmem = tl.zeros((BV, HALVES * BK), tl.float32)
    angles = (theta, offset, each, h * per_head, (n1, n2, n3, n4, n5, n6, n7))
    freqs = slot_frequencies(angles, shapes, row, base, c, ANGLES)
    learnt = tl.zeros((BL // 16, 8, BK), tl.float32)
    q_rows, dout_rows = (q, b, h, sqb, sqt, sqh, WIDTH, UNIT), (dout, b, h, sob, sot, soh, VDIM, UNIT)
    dq_rows = (dq, b, h, sdqb, sdqt, sdqh, WIDTH, UNIT)
    for first in tl.range(begin, end, BL, num_stages=STAGES):
        t = first + tl.arange(0, BL)
        valid = t < end
        x1, x2 = _load_query(q_rows, t, c, valid, KIND)
        do = load(dout_rows, t, vc, valid)
        x1, slope1 = silu(x1)
        to = address(dq_rows, t, c)
        in_tile = valid[:, None] & (c < WIDTH)[None, :]
        df = dot(do, m, tl.zeros((BL, HALVES * BK), tl.float32), PRODUCT)
        if KIND == 0:
            dmem = dot(tl.trans(do), x1, dmem, PRODUCT)
            tl.store(to, (df * slope1).to(dq.dtype.element_ty), in_tile)
        else:
            slope2 = slope1
            if KIND == 2:
                x2, slope2 = silu(x2)
            if dtheta is not None or KIND == 1:
                cos, sin = cos_sin_once(freqs, t, ANGLES)
            else:
                cos, sin = cos_sin(freqs, coordinates(freqs, t, ANGLES), ANGLES)
            fa, fb = rope_features(x1, x2, cos, sin, KIND)
            f = interleave(fa.to(OPERAND), fb.to(OPERAND), SLOTS)
            dmem = dot(tl.trans(do), f, dmem, PRODUCT)
            da, db = deinterleave(df)
            d1, d2 = rope_features_backward(da, db, cos, sin, KIND)
            tl.store(to, (d1 * slope1).to(dq.dtype.element_ty), in_tile)
            if KIND == 2:
                tl.store(to + WIDTH, (d2 * slope2).to(dq.dtype.element_ty), in_tile)
            if dtheta is not None:
                at_axis = from_origin(freqs, coordinates(freqs, t, ANGLES))
                learnt += rows_added(at_axis * (fa * db - fb * da))
    if dtheta is not None:
        at = dtheta + (bh * n_splits + slot) * WIDTH + c
        tl.store(at, tl.sum(tl.sum(learnt, 0), 0), c < WIDTH)
    to = dmemories + ((bh * n_splits + slot) * (HALVES * WIDTH) + c)[None, :] * VDIM + vc[:, None]
    in_tile = (vc < VDIM)[:, None] & (c < WIDTH)[None, :]
    if KIND == 0:
        tl.store(to, dmem, in_tile)
    else:
        dcos_rows, dsin_rows = deinterleave(dmem)
        tl.store(to, dcos_rows, in_tile)
        tl.store(to + WIDTH * VDIM, dsin_rows, in_tile)


@triton.jit
def _grad_tile(dmemory, bh, kc, inside, vc, DIM, VDIM, KIND, OPERAND):
    """Load dmemory of some channels, transposed, its cos and sin halves interleaved."""
    HALVES: tl.constexpr = 1 if KIND == 0 else 2
    in_tile = (vc < VDIM)[:, None] & inside[None, :]
    at = dmemory + (bh * (HALVES * DIM) + kc)[None, :] * VDIM + vc[:, None]
    g = tl.load(at, mask=in_tile, other=0.0).to(OPERAND)
    if KIND != 0:
        sin = tl.load(at + DIM * VDIM, mask=in_tile, other=0.0).to(OPERAND)
        g = interleave(g, sin, even(DIM // KIND, VDIM))
    return g


@triton.jit
def _grads(top, dtotal, dmemory, bh, kc, vc, DIM, VDIM, KIND, OPERAND):
    """Load dmemory, top and dtotal of channels `kc`; with rotary also of pairs' second channels."""
    WIDTH: tl.constexpr = DIM // 2 if KIND == 2 else DIM
    inside = kc < WIDTH
    g = _grad_tile(dmemory, bh, kc, inside, vc, DIM, VDIM, KIND, OPERAND)
    mx = tl.load(top + bh * DIM + kc, mask=inside, other=0.0)
    dsum = tl.load(dtotal + bh * DIM + kc, mask=inside, other=0.0)
    mx2, dsum2 = mx, dsum
    if KIND == 2:
        g2 = _grad_tile(dmemory, bh, kc + WIDTH, inside, vc, DIM, VDIM, KIND, OPERAND)
        g = interleave(g, g2, even(DIM // KIND, VDIM))
        mx2 = tl.load(top + bh * DIM + WIDTH + kc, mask=inside, other=0.0)
        dsum2 = tl.load(dtotal + bh * DIM + WIDTH + kc, mask=inside, other=0.0)
    return g, mx, dsum, mx2, dsum2


@triton.jit
def _key_block(k_rows, mask, dk_rows, dtheta, y, dy, grads, freqs, tokens, tile, kc, ANGLES, PRODUCT):
    """Store dk of some channels of a tile of tokens; return dy plus what these add to it. tokens: their indices, which
    are no padding, which are before the end, the end."""
    KIND: tl.constexpr = ANGLES[0]
    SLOTS: tl.constexpr = ANGLES[2]
    OPERAND: tl.constexpr = tl.bfloat16 if PRODUCT[0] else tl.float32
    HALVES: tl.constexpr = 1 if KIND == 0 else 2 * KIND
    t, valid, inside, end = tokens
    width = k_rows[6]
    g, mx, dsum, mx2, dsum2 = grads
    x, x2 = _keys(k_rows, mask, t, kc, valid, end, KIND)
    to = address(dk_rows, t, kc)
    in_tile = inside[:, None] & (kc < width)[None, :]
    dp = dot(y, g, tl.zeros((t.shape[0], HALVES * kc.shape[0]), tl.float32), PRODUCT)
    p = powers(x, mx, OPERAND)
    f = p.to(OPERAND)
    if KIND != 0:
        cos, sin = cos_sin_once(freqs, t, ANGLES)
        f = interleave((p * cos).to(OPERAND), (p * sin).to(OPERAND), SLOTS)
        if KIND == 2:
            p2 = powers(x2, mx2, OPERAND)
            f2 = interleave((p2 * cos).to(OPERAND), (p2 * sin).to(OPERAND), SLOTS)
            f = interleave(f, f2, SLOTS)
            dp, dp2 = deinterleave(dp)
            da, db = deinterleave(dp2)
            dp2 = da * cos + db * sin
            dp2 = p2 * (dp2 + dsum2[None, :])
            tl.store(to + width, dp2.to(dk_rows[0].dtype.element_ty), in_tile)
            twist = p2 * (cos * db - sin * da)
        da, db = deinterleave(dp)
        dp = da * cos + db * sin
        if KIND == 2:
            twist += p * (cos * db - sin * da)
        else:
            twist = p * (cos * db - sin * da)
    tl.store(to, (p * (dp + dsum[None, :])).to(dk_rows[0].dtype.element_ty), in_tile)
    if dtheta is not None:  # a sum for each tile: one of all tiles would not fit in registers
        at_axis = from_origin(freqs, coordinates(freqs, t, ANGLES))
        at = dtheta + tile * width + kc
        tl.store(at, tl.sum(at_axis * twist, 0), kc < width)
    return dot(f, tl.trans(g), dy, PRODUCT)


@triton.jit(do_not_specialize=SIZES)
def _summarize_backward(
    k,
    v,
    mask,
    splits,
    shapes,
    theta,
    offset,
    top,
    dtotal,
    dmemory,
    dk,
    dv,
    dtheta,
    skb,
    skt,
    skh,
    svb,
    svt,
    svh,
    sdkb,
    sdkt,
    sdkh,
    sdvb,
    sdvt,
    sdvh,
    length,
    span,
    tiles,
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
    ADD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute dk and dv of a split: dk = p (v . dmemory + dtotal), dv = p . dmemory, with ADD plus what dv holds."""
    KIND: tl.constexpr = ANGLES[0]
    OPERAND: tl.constexpr = tl.bfloat16 if PRODUCT[0] else tl.float32
    WIDTH: tl.constexpr = DIM // 2 if KIND == 2 else DIM
    bh, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = bh // heads, bh % heads
    row, slot, begin, end, base, state = split_bounds(splits, split, b, bh, h, heads, span, length, prefix)
    vc, kc = tl.arange(0, BV), tl.arange(0, BK)
    angles = (theta, offset, each, h * per_head, (n1, n2, n3, n4, n5, n6, n7))
    freqs = slot_frequencies(angles, shapes, row, base, kc, ANGLES)
    k_rows, v_rows = (k, b, h, skb, skt, skh, WIDTH, UNIT), (v, b, h, svb, svt, svh, VDIM, UNIT)
    dk_rows, dv_rows = (dk, b, h, sdkb, sdkt, sdkh, WIDTH, UNIT), (dv, b, h, sdvb, sdvt, sdvh, VDIM, UNIT)
    grads = _grads(top, dtotal, dmemory, state, kc, vc, DIM, VDIM, KIND, OPERAND)
    for first in tl.range(begin, end, BL, num_stages=STAGES):
        t = first + tl.arange(0, BL)
        tile = bh * tiles + slot * tl.cdiv(span, BL) + (first - begin) // BL
        inside = t < end
        valid = valid_tokens(mask, b, t, end, length)
        tokens = (t, valid, inside, end)
        y = load(v_rows, t, vc, valid)
        dy = tl.zeros((BL, BV), tl.float32)
        if BLOCKS == 1:
            dy = _key_block(k_rows, mask, dk_rows, dtheta, y, dy, grads, freqs, tokens, tile, kc, ANGLES, PRODUCT)
        else:  # a head wider than a tile: its memory does not stay on chip
            for block in tl.range(0, BLOCKS, num_stages=1):
                c = block * BK + kc
                block_grads = _grads(top, dtotal, dmemory, state, c, vc, DIM, VDIM, KIND, OPERAND)
                block_freqs = slot_frequencies(angles, shapes, row, base, c, ANGLES)
                dy = _key_block(
                    k_rows, mask, dk_rows, dtheta, y, dy, block_grads, block_freqs, tokens, tile, c, ANGLES, PRODUCT
                )
        if mask is not None:
            dy = tl.where(valid[:, None], dy, 0.0)
        if ADD:
            dy += load(dv_rows, t, vc, inside).to(tl.float32)
        tl.store(address(dv_rows, t, vc), dy.to(dv.dtype.element_ty), inside[:, None] & (vc < VDIM)[None, :])


# ------------------------------------------------------------------------------------ launches
Sizes = tuple[int, ...]


def _read_plan(
    q: Tensor, dout: Tensor, dq: Tensor, vdim: int, position: FlatPosition, learn: bool
) -> tuple[Launch, Launch, Sizes, Sizes]:
    """Return the two launches, and sizes of gradients of memories and of angles."""
    batch, length, heads, dim = q.shape
    width, halves, bv = position.width(dim), position.halves, pad(vdim)
    chosen = plan("read_backward", pad(width), bv, position.kind, operand_bytes(q), learn)
    block, bk = chosen.block, chosen.keys
    blocks = cdiv(width, bk)
    n_splits, span = plan_splits(length, batch * heads * blocks, block, chosen.programs * processors(q))
    if position.splits is not None:
        n_splits = position.splits.shape[0]
    counts = {"n_splits": n_splits, "span": span, "BK": bk, "BV": bv, "BLOCKS": blocks}
    grid = (batch * heads * blocks, n_splits)
    launch = Launch(_read_backward, grid, **counts, **arguments(position, vdim, q=q, o=dout, dq=dq), **chosen.options())
    some = max(1, 256 // bv)
    tile = {"DIM": dim, "VDIM": vdim, "BV": bv, "KIND": KINDS[position.kind], "BC": some}
    grid = (position.samples(batch) * heads, cdiv(width, some))
    join = Launch(join_grads, grid, n_splits=n_splits, heads=heads, **tile, num_warps=2)
    sizes = (batch * heads, n_splits, halves * width, vdim)
    return launch, join, sizes, (batch, heads, n_splits, width)


def read_backward(
    q: Tensor,
    total: Tensor,
    memory: Tensor,
    dout: Tensor,
    position: FlatPosition,
    learn: bool,
    dq: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of q, of the State's sum and memory, and of theta (heads, slots; empty if not wanted). dq: where
    that of q is written, with a dense last axis."""
    q, dout, vdim = dense_rows(q), dense_rows(dout), memory.shape[-1]
    dq = dense_empty(q) if dq is None else dq
    total, memory = total.contiguous(), memory.contiguous()
    launch, join, memories, angles = remembered(
        ("read_backward", form(q, dout, dq), vdim, total.dtype, memory.dtype, position.key, learn),
        lambda: _read_plan(q, dout, dq, vdim, position, learn),
    )
    dmemories = scratch(q, *memories)
    partial_dtheta = scratch(q, *angles) if learn else None
    launch(q, dout, total, memory, position.splits, position.shapes, *position.angles, dq, dmemories, partial_dtheta)
    dtotal, dmemory = torch.empty_like(total), torch.empty_like(memory)
    join(dmemories, total, memory, position.first, dtotal, dmemory)
    return dq, dtotal, dmemory, theta_grad(q, partial_dtheta)


def _summarize_plan(
    k: Tensor, v: Tensor, dk: Tensor, dv: Tensor, add: bool, position: FlatPosition, learn: bool
) -> tuple[Launch, Sizes]:
    """Return the launch, and sizes of gradients of angles."""
    (batch, length, heads, dim), vdim = k.shape, v.shape[-1]
    bv, width = pad(vdim), position.width(dim)
    chosen = plan("summarize_backward", pad(width), bv, position.kind, operand_bytes(k), learn)
    block, bk = chosen.block, chosen.keys
    n_splits, span = plan_splits(length, batch * heads, block, chosen.programs * processors(k))
    tiles = cdiv(length, block)
    if position.splits is not None:
        n_splits, span = position.splits.shape[0], position.span
        tiles = n_splits * cdiv(span, block)
    sizes = {"span": span, "tiles": tiles, "BK": bk, "BV": bv, "BLOCKS": cdiv(width, bk)}
    grid = (batch * heads, n_splits)
    rows = arguments(position, vdim, k=k, v=v, dk=dk, dv=dv)
    launch = Launch(_summarize_backward, grid, **sizes, **rows, ADD=add, **chosen.options())
    return launch, (batch, heads, tiles, width)


def summarize_backward(
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    top: Tensor,
    dtotal: Tensor,
    dmemory: Tensor,
    position: FlatPosition,
    learn: bool,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    add: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of k, v, and of theta (heads, slots; empty if not wanted). dk, dv: where those of k and v are
    written, with a dense last axis, the second with `add` plus what is there."""
    k, v = dense_rows(k), dense_rows(v)
    dk, dv = dense_empty(k) if dk is None else dk, dense_empty(v) if dv is None else dv
    launch, angles = remembered(
        ("summarize_backward", form(k, v, dk, dv), add, position.key, learn),
        lambda: _summarize_plan(k, v, dk, dv, add, position, learn),
    )
    partial_dtheta = scratch(k, *angles) if learn else None
    if partial_dtheta is not None and position.splits is not None:  # shorter splits leave tiles unset
        partial_dtheta.zero_()
    grads = top.contiguous(), dtotal.contiguous(), dmemory.contiguous()
    launch(k, v, flags(mask), position.splits, position.shapes, *position.angles, *grads, dk, dv, partial_dtheta)
    return dk, dv, theta_grad(k, partial_dtheta)
