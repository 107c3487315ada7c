"""Gated norm after LightNet's read: LayerNorm(y) * weight + bias, times sigmoid(u); plus SiLU of a
local branch, if there is one.

Tensors are (..., dim) of any float dtype; arithmetic and statistics in float32, one rounding at the
end. The width is compiled in, the number of rows is not.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ndlightnet_kernels.launch import Launch, remembered
from ndlightnet_kernels.tiles import cdiv, power_of_2, silu

# Elements of a program's tile and its warps; for the backward also programs (a constant, so that the result has the
# same bits on every card) and load stages. Measured on an H200 at 32,768 and 65,536 rows of 384 and 768.
NARROW, WIDE = (1024, 2), (2048, 4)  # up to 512 channels, and more
BACKWARD, WIDE_BACKWARD = (1024, 2, 528, 3), (1024, 4, 528, 3)


def _tile(dim: int, elements: int, warps: int) -> tuple[int, int, int]:
    """Return the rows and columns of a tile, and its warps."""
    block = power_of_2(dim)
    return max(1, elements // block), block, max(warps, block // 512)


@triton.jit
def _tile_at(first, rows, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = first + tl.arange(0, ROWS).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (col < DIM)[None, :]
    return row, col, row[:, None] * DIM + col[None, :], mask


@triton.jit
def _read(x, at, mask):
    return tl.load(x + at, mask, 0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _norm_gate(
    y, u, weight, bias, local, out, mean, rstd, rows, eps, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    first = tl.program_id(0) * ROWS
    row, col, at, mask = _tile_at(first, rows, DIM, ROWS, BLOCK)
    x, gate = _read(y, at, mask), tl.sigmoid(_read(u, at, mask))
    w, b = _read(weight, col, col < DIM), _read(bias, col, col < DIM)
    mu = tl.sum(x, 1) / DIM
    # add the mean of the deviations: the sum of a row far from 0 is rounded at the row's size
    mu += tl.sum(tl.where(mask, x - mu[:, None], 0.0), 1) / DIM
    x = tl.where(mask, x - mu[:, None], 0.0)
    r = tl.rsqrt(tl.sum(x * x, 1) / DIM + tl.cast(eps, tl.float32))
    x = (x * r[:, None] * w[None, :] + b[None, :]) * gate
    if local is not None:
        x += silu(_read(local, at, mask))[0]
    tl.store(out + at, x.to(out.dtype.element_ty), mask)
    tl.store(mean + row, mu, row < rows)
    tl.store(rstd + row, r, row < rows)


@triton.jit(do_not_specialize=["rows"])
def _norm_gate_backward(
    dout,
    y,
    u,
    weight,
    bias,
    local,
    mean,
    rstd,
    dy,
    du,
    dlocal,
    out,
    partial,
    rows,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    col = tl.arange(0, BLOCK)
    w, b = _read(weight, col, col < DIM), _read(bias, col, col < DIM)
    dw = tl.zeros((ROWS, BLOCK), tl.float32)
    db = tl.zeros((ROWS, BLOCK), tl.float32)
    for i in tl.range(program, tl.cdiv(rows, ROWS), programs, num_stages=STAGES):
        row, col, at, mask = _tile_at(i * ROWS, rows, DIM, ROWS, BLOCK)
        mu, r = _read(mean, row, row < rows)[:, None], _read(rstd, row, row < rows)[:, None]
        d, x, gate = _read(dout, at, mask), _read(y, at, mask), tl.sigmoid(_read(u, at, mask))
        x = (x - mu) * r
        z = (x * w[None, :] + b[None, :]) * gate
        dlogit = d * z * (1 - gate)
        if local is not None:
            near, slope = silu(_read(local, at, mask))
            z += near
            tl.store(dlocal + at, (d * slope).to(dlocal.dtype.element_ty), mask)
        if out is not None:
            tl.store(out + at, z.to(out.dtype.element_ty), mask)
        tl.store(du + at, dlogit.to(du.dtype.element_ty), mask)
        d *= gate
        dw += d * x
        db += d
        d *= w[None, :]
        along = tl.sum(d * x, 1)[:, None] / DIM
        d = (d - tl.sum(d, 1)[:, None] / DIM - x * along) * r
        tl.store(dy + at, d.to(dy.dtype.element_ty), mask)
    to = partial + program * DIM + col
    tl.store(to, tl.sum(dw, 0), col < DIM)
    tl.store(to + programs * DIM, tl.sum(db, 0), col < DIM)


@triton.jit(do_not_specialize=["programs"])
def _sum_partial(partial, dweight, dbias, programs, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the gradients of weight (program_id(1) = 0) and bias over programs."""
    col, which = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, programs, ROWS):
        row = first + tl.arange(0, ROWS)
        at = (which * programs + row)[:, None] * DIM + col[None, :]
        total += tl.load(partial + at, (row < programs)[:, None] & (col < DIM)[None, :], 0.0)
    out = tl.sum(total, 0)
    if which == 0:
        tl.store(dweight + col, out.to(dweight.dtype.element_ty), col < DIM)
    else:
        tl.store(dbias + col, out.to(dbias.dtype.element_ty), col < DIM)


def _plan(y: Tensor, eps: float) -> Launch:
    dim = y.shape[-1]
    rows, (height, block, warps) = y.numel() // dim, _tile(dim, *(NARROW if dim <= 512 else WIDE))
    return Launch(
        _norm_gate, (cdiv(rows, height),), rows=rows, eps=eps, DIM=dim, ROWS=height, BLOCK=block, num_warps=warps
    )


def norm_gate(
    y: Tensor, u: Tensor, weight: Tensor, bias: Tensor, local: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gated norm of y, plus SiLU(local), in y's dtype, and the rows' mean and 1 / standard deviation."""
    y, u, local = y.contiguous(), u.contiguous(), None if local is None else local.contiguous()
    weight, bias = weight.contiguous(), bias.contiguous()
    dtypes = (y.dtype, u.dtype, weight.dtype, bias.dtype, None if local is None else local.dtype)
    launch = remembered(("norm_gate", y.device, dtypes, y.shape, eps), lambda: _plan(y, eps))
    out = torch.empty_like(y)
    mean, rstd = (y.new_empty(y.shape[:-1], dtype=torch.float32) for _ in range(2))
    launch(y, u, weight, bias, local, out, mean, rstd)
    return out, mean, rstd


def backward_plan(kernel: Any, y: Tensor) -> tuple[Launch, Launch, int]:
    """Return the launches of a kernel that leaves sums over rows of each program, and of the sum of these, and the
    number of programs."""
    dim = y.shape[-1]
    elements, warps, programs, stages = BACKWARD if dim <= 512 else WIDE_BACKWARD
    rows, (height, block, warps) = y.numel() // dim, _tile(dim, elements, warps)
    programs = min(programs, cdiv(rows, height))
    sizes = {"rows": rows, "DIM": dim, "ROWS": height, "BLOCK": block, "STAGES": stages}
    launch = Launch(kernel, (programs,), **sizes, num_warps=warps)
    add = Launch(_sum_partial, (cdiv(dim, 32), 2), programs=programs, DIM=dim, ROWS=128, BLOCK=32, num_warps=8)
    return launch, add, programs


def norm_gate_backward(
    dout: Tensor,
    y: Tensor,
    u: Tensor,
    weight: Tensor,
    bias: Tensor,
    local: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    again: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return gradients of y, u, weight, bias, local; and the output, if wanted `again`, in the memory of dout. Same
    bits at every call: partial sums, no atomics."""
    dout, y, u = dout.contiguous(), y.contiguous(), u.contiguous()
    weight, bias = weight.contiguous(), bias.contiguous()
    local = None if local is None else local.contiguous()
    more = None if local is None else local.dtype
    dtypes = (dout.dtype, y.dtype, u.dtype, weight.dtype, bias.dtype, more)
    key = ("norm_gate_backward", y.device, dtypes, y.shape, again)
    launch, add, programs = remembered(key, lambda: backward_plan(_norm_gate_backward, y))
    dy, du = torch.empty_like(y), torch.empty_like(u)
    partial = y.new_empty((2, programs, y.shape[-1]), dtype=torch.float32)
    dlocal = None if local is None else torch.empty_like(local)
    out = dout if again else None
    launch(dout, y, u, weight, bias, local, mean, rstd, dy, du, dlocal, out, partial)
    dweight, dbias = torch.empty_like(weight), torch.empty_like(bias)
    add(partial, dweight, dbias)
    return dy, du, dweight, dbias, dlocal, out
