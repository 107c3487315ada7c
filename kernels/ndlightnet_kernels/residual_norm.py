"""A branch is added to the residual stream, and the sum is normed: LayerNorm(x + y) * weight + bias, in one pass.

Tensors are (..., dim) of any float dtype, as a rule a stream x in float32 and a branch y in 16 bits, or none.
Arithmetic and statistics are in float32, with one rounding of each result. For the backward the norm before weight and
bias is kept, in the dtype of the normed tokens, and 1 / standard deviation: half the bytes of the stream. The width is
compiled in, the number of rows is not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ndlightnet_kernels.gate import NARROW, WIDE, _read, _tile, _tile_at, backward_plan
from ndlightnet_kernels.launch import Launch, remembered
from ndlightnet_kernels.tiles import cdiv


@triton.jit(do_not_specialize=["rows"])
def _add_norm(
    x,
    y,
    weight,
    bias,
    stream,
    normed,
    unit,
    rstd,
    rows,
    eps,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, col, at, mask = _tile_at(tl.program_id(0) * ROWS, rows, DIM, ROWS, BLOCK)
    a = _read(x, at, mask)
    if y is not None:
        a += _read(y, at, mask)
        tl.store(stream + at, a.to(stream.dtype.element_ty), mask)
    mu = tl.sum(a, 1) / DIM
    # add the mean of the deviations: the sum of a row far from 0 is rounded at the row's size
    mu += tl.sum(tl.where(mask, a - mu[:, None], 0.0), 1) / DIM
    a = tl.where(mask, a - mu[:, None], 0.0)
    r = tl.rsqrt(tl.sum(a * a, 1) / DIM + tl.cast(eps, tl.float32))
    a *= r[:, None]
    if unit is not None:
        tl.store(unit + at, a.to(unit.dtype.element_ty), mask)
        tl.store(rstd + row, r, row < rows)
    w, b = _read(weight, col, col < DIM), _read(bias, col, col < DIM)
    tl.store(normed + at, (a * w[None, :] + b[None, :]).to(normed.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows"])
def _add_norm_backward(
    dstream,
    dnormed,
    weight,
    bias,
    unit,
    rstd,
    dx,
    dy,
    normed,
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
        d, x, r = _read(dnormed, at, mask), _read(unit, at, mask), _read(rstd, row, row < rows)[:, None]
        if normed is not None:
            tl.store(normed + at, (x * w[None, :] + b[None, :]).to(normed.dtype.element_ty), mask)
        dw += d * x
        db += d
        d *= w[None, :]
        along = tl.sum(d * x, 1)[:, None] / DIM
        d = (d - tl.sum(d, 1)[:, None] / DIM - x * along) * r
        if dstream is not None:
            d += _read(dstream, at, mask)
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask)
        if dy is not None:
            tl.store(dy + at, d.to(dy.dtype.element_ty), mask)
    to = partial + program * DIM + col
    tl.store(to, tl.sum(dw, 0), col < DIM)
    tl.store(to + programs * DIM, tl.sum(db, 0), col < DIM)


def _plan(x: Tensor, eps: float) -> Launch:
    dim = x.shape[-1]
    rows, (height, block, warps) = x.numel() // dim, _tile(dim, *(NARROW if dim <= 512 else WIDE))
    return Launch(
        _add_norm, (cdiv(rows, height),), rows=rows, eps=eps, DIM=dim, ROWS=height, BLOCK=block, num_warps=warps
    )


def add_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype, learn: bool
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """Return x + y in x's dtype, None without y; its norm in `dtype`; and to `learn` from them what the backward needs:
    the norm before weight and bias, in `dtype`, and the rows' 1 / standard deviation."""
    x, y = x.contiguous(), None if y is None else y.contiguous()
    weight, bias = weight.contiguous(), bias.contiguous()
    dtypes = (x.dtype, None if y is None else y.dtype, weight.dtype, bias.dtype, dtype)
    launch = remembered(("add_norm", x.device, dtypes, x.shape, eps, learn), lambda: _plan(x, eps))
    normed, stream = torch.empty_like(x, dtype=dtype), None if y is None else torch.empty_like(x)
    unit = torch.empty_like(normed) if learn else None
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32) if learn else None
    launch(x, y, weight, bias, stream, normed, unit, rstd)
    return stream, normed, unit, rstd


def add_norm_backward(
    dstream: Tensor | None,
    dnormed: Tensor,
    weight: Tensor,
    bias: Tensor,
    unit: Tensor,
    rstd: Tensor,
    dtype: torch.dtype,
    branch: bool,
    again: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]:
    """Return gradients of x in `dtype`, of y in unit's dtype if there is a `branch`, of weight and bias; and the normed
    tokens, if wanted `again`, in the memory of dnormed. Same bits at every call: partial sums, no atomics."""
    dstream, dnormed = None if dstream is None else dstream.contiguous(), dnormed.contiguous()
    weight, bias = weight.contiguous(), bias.contiguous()
    dtypes = (None if dstream is None else dstream.dtype, dnormed.dtype, weight.dtype, bias.dtype, unit.dtype, dtype)
    key = ("add_norm_backward", unit.device, dtypes, unit.shape, branch, again)
    launch, add, programs = remembered(key, lambda: backward_plan(_add_norm_backward, unit))
    dx, dy = torch.empty_like(unit, dtype=dtype), torch.empty_like(unit) if branch else None
    normed = dnormed if again else None
    partial = unit.new_empty((2, programs, unit.shape[-1]), dtype=torch.float32)
    launch(dstream, dnormed, weight, bias, unit, rstd, dx, dy, normed, partial)
    dweight, dbias = torch.empty_like(weight), torch.empty_like(bias)
    add(partial, dweight, dbias)
    return dx, dy, dweight, dbias, normed
