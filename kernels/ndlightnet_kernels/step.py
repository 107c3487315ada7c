"""One step of causal attention, for decoding: the State is read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ndlightnet_kernels.launch import Launch, remembered
from ndlightnet_kernels.phases import coordinates, cos_sin, slot_frequencies
from ndlightnet_kernels.position import FlatPosition
from ndlightnet_kernels.tiles import SIZES, angle_arguments, cdiv, pad, silu, weight


@triton.jit(do_not_specialize=SIZES)
def _step(
    q,
    k,
    v,
    top,
    total,
    memory,
    theta,
    offset,
    out,
    top_out,
    total_out,
    memory_out,
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
    ANGLES: tl.constexpr,
):
    KIND: tl.constexpr = ANGLES[0]
    bh = tl.program_id(0).to(tl.int64)
    c, vc = tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    inside, inside_v = c < DIM, vc < VDIM
    x = tl.load(k + bh * DIM + c, mask=inside, other=float("-inf")).to(tl.float32)
    f, _ = silu(tl.load(q + bh * DIM + c, mask=inside, other=0.0).to(tl.float32))
    y = tl.load(v + bh * VDIM + vc, mask=inside_v, other=0.0).to(tl.float32)
    old = tl.load(top + bh * DIM + c, mask=inside, other=float("-inf"))
    new = tl.maximum(old, x)
    p, fall = weight(x, new), weight(old, new)
    s = fall * tl.load(total + bh * DIM + c, mask=inside, other=0.0) + p
    f = tl.where(s > 0, f / tl.where(s > 0, s, 1.0), 0.0)
    HALVES: tl.constexpr = 1 if KIND == 0 else 2
    at = (bh * (HALVES * DIM) + c)[:, None] * VDIM + vc[None, :]
    in_tile = inside[:, None] & inside_v[None, :]
    m = fall[:, None] * tl.load(memory + at, mask=in_tile, other=0.0)
    if KIND == 0:
        m += p[:, None] * y[None, :]
        o = tl.sum(f[:, None] * m, 0)
    else:
        t = tl.zeros((1,), tl.int32)
        angles = (theta, offset, each, bh % heads * per_head, (n1, n2, n3, n4, n5, n6, n7))
        freqs = slot_frequencies(angles, None, bh // heads, prefix, c, ANGLES)
        at_axis = coordinates(freqs, t, ANGLES)
        cos, sin = cos_sin(freqs, at_axis, ANGLES)
        cos, sin = tl.max(cos, 0), tl.max(sin, 0)  # there is one row
        m += (p * cos)[:, None] * y[None, :]
        o = tl.sum((f * cos)[:, None] * m, 0)
        m_sin = fall[:, None] * tl.load(memory + at + DIM * VDIM, mask=in_tile, other=0.0)
        m_sin += (p * sin)[:, None] * y[None, :]
        o += tl.sum((f * sin)[:, None] * m_sin, 0)
        tl.store(memory_out + at + DIM * VDIM, m_sin, in_tile)
    tl.store(memory_out + at, m, in_tile)
    tl.store(out + bh * VDIM + vc, o.to(out.dtype.element_ty), inside_v)
    if tl.program_id(1) == 0:
        tl.store(top_out + bh * DIM + c, new, inside)
        tl.store(total_out + bh * DIM + c, s, inside)


def _plan(k: Tensor, vdim: int, position: FlatPosition) -> Launch:
    batch, heads, dim = k.shape
    bk, bv = pad(dim), min(pad(vdim), 32)
    angles = angle_arguments(position, k, wide=True)
    return Launch(
        _step, (batch * heads, cdiv(vdim, bv)), heads=heads, DIM=dim, VDIM=vdim, BK=bk, BV=bv, **angles, num_warps=4
    )


def step(
    q: Tensor, k: Tensor, v: Tensor, top: Tensor, total: Tensor, memory: Tensor, position: FlatPosition
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the output and the next State after one token of q, k (batch, heads, dim) and v
    (batch, heads, value_dim)."""
    batch, heads, vdim = v.shape
    dtypes = q.dtype, k.dtype, v.dtype, top.dtype, total.dtype, memory.dtype
    launch = remembered(("step", k.device, dtypes, k.shape, vdim, position.key), lambda: _plan(k, vdim, position))
    tensors = [x.contiguous() for x in (q, k, v, top, total, memory)]
    out = torch.empty(batch, heads, vdim, dtype=q.dtype, device=q.device)
    new = [torch.empty_like(x) for x in tensors[3:]]
    launch(*tensors, *position.angles, out, *new)
    return out, new[0], new[1], new[2]
