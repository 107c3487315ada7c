"""Rotary position code: pairs of channels, j and j + dim / 2 of a head, turned by tables of cos and sin; the gradient.

x (batch, length, heads, dim) of any float dtype, tables (length, heads or 1, dim), which all samples share: a program
keeps those of a tile of tokens and goes over samples, over which it sums the tables' gradients. Arithmetic and sums in
float32. The width is compiled in. Bound by memory: x is read and written, backward dout and x are read, dx is written.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ndlightnet_kernels.launch import Launch, remembered
from ndlightnet_kernels.tiles import cdiv, power_of_2

PAIRS, WARPS = 1024, 4  # of a program's tile
PROGRAMS = 1024  # fill a card: samples are shared among so many
SIZES = ["batch", "length", "heads", "each"]  # another value of one compiles nothing


@triton.jit
def _tile(cos, sin, length, tt, th, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return a program's tokens, head and columns, their mask, and cos and sin of the first and second channels."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col, h = tl.arange(0, BLOCK)[None, :], tl.program_id(1).to(tl.int64)
    mask = (token < length) & (col < HALF)
    c1, c2 = _pair(cos + token * tt + h * th + col, mask, HALF)
    s1, s2 = _pair(sin + token * tt + h * th + col, mask, HALF)
    return token, h, col, mask, c1, c2, s1, s2


@triton.jit
def _pair(at, mask, HALF: tl.constexpr):
    return tl.load(at, mask, 0.0).to(tl.float32), tl.load(at + HALF, mask, 0.0).to(tl.float32)


@triton.jit
def _store(at, first, second, mask, HALF: tl.constexpr):
    tl.store(at, first.to(at.dtype.element_ty), mask)
    tl.store(at + HALF, second.to(at.dtype.element_ty), mask)


@triton.jit(do_not_specialize=SIZES)
def _rotate(
    x, cos, sin, out, batch, length, heads, size, each, tt, th, xb, xt, xh,
    HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, h, col, mask, c1, c2, s1, s2 = _tile(cos, sin, length, tt, th, HALF, ROWS, BLOCK)
    first = tl.program_id(2).to(tl.int64) * each
    x += first * xb + token * xt + h * xh + col
    out += ((first * length + token) * heads + h) * (2 * HALF) + col
    for _ in range(min(each, batch - first)):
        x1, x2 = _pair(x, mask, HALF)
        _store(out, x1 * c1 - x2 * s1, x2 * c2 + x1 * s2, mask, HALF)
        x, out = x + xb, out + size


@triton.jit(do_not_specialize=SIZES)
def _rotate_backward(
    dout, x, cos, sin, dx, dcos, dsin, batch, length, heads, size, each, tt, th, xb, xt, xh, db, dt, dh,
    HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, h, col, mask, c1, c2, s1, s2 = _tile(cos, sin, length, tt, th, HALF, ROWS, BLOCK)
    first, zero = tl.program_id(2).to(tl.int64) * each, tl.zeros((ROWS, BLOCK), tl.float32)
    dout += first * db + token * dt + h * dh + col
    x += first * xb + token * xt + h * xh + col
    dx += ((first * length + token) * heads + h) * (2 * HALF) + col
    dc1, dc2, ds1, ds2 = zero, zero, zero, zero
    for _ in range(min(each, batch - first)):
        d1, d2 = _pair(dout, mask, HALF)
        _store(dx, d1 * c1 + d2 * s2, d2 * c2 - d1 * s1, mask, HALF)
        if dcos is not None:
            x1, x2 = _pair(x, mask, HALF)
            dc1, dc2, ds1, ds2 = dc1 + d1 * x1, dc2 + d2 * x2, ds1 - d1 * x2, ds2 + d2 * x1
        dout, x, dx = dout + db, x + xb, dx + size
    if dcos is not None:
        at = ((tl.program_id(2).to(tl.int64) * length + token) * heads + h) * (2 * HALF) + col
        _store(dcos + at, dc1, dc2, mask, HALF)
        _store(dsin + at, ds1, ds2, mask, HALF)


def _plan(kernel: Any, x: Tensor, cos: Tensor, *strided: Tensor) -> tuple[Launch, int]:
    """Return the launch for x, with the strides of the table and of `strided`, and how many share the samples."""
    batch, length, heads, dim = x.shape
    block = power_of_2(dim // 2)
    rows = max(1, PAIRS // block)
    tiles = cdiv(length, rows) * heads
    each = cdiv(batch, max(1, min(batch, PROGRAMS // tiles)))
    names = (f"{y}{axis}" for y in "xd" for axis in "bth")
    strides = dict(zip(names, (step for y in strided for step in y.stride()[:3]), strict=False))
    sizes = {"batch": batch, "length": length, "heads": heads, "size": length * heads * dim, "each": each}
    sizes |= {"tt": cos.stride(0), "th": cos.stride(1)}
    grid = (cdiv(length, rows), heads, cdiv(batch, each))
    launch = Launch(kernel, grid, **sizes, **strides, HALF=dim // 2, ROWS=rows, BLOCK=block, num_warps=WARPS)
    return launch, grid[2]


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _tables(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return both with the strides of one, as views (length, heads, dim)."""
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos.expand(x.shape[1:]), sin.expand(x.shape[1:])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the turned x (batch, length, heads, dim)."""
    x, (cos, sin) = _dense(x), _tables(x, cos, sin)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    key = ("rotate", x.device, x.dtype, x.shape, x.stride(), cos.stride())
    remembered(key, lambda: _plan(_rotate, x, cos, x))[0](x, cos, sin, out)
    return out


def rotate_backward(
    dout: Tensor, x: Tensor, cos: Tensor, sin: Tensor, needs_cos: bool, needs_sin: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of x and, if needed, of the tables, which are given as (length, heads or 1, dim)."""
    shape, needs = cos.shape, needs_cos or needs_sin
    dout, x, (cos, sin) = _dense(dout), _dense(x), _tables(x, cos, sin)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    shared = shape[1] < x.shape[2]
    key = ("rotate_backward", x.device, x.dtype, dout.dtype, x.shape, x.stride(), dout.stride(), cos.stride())
    launch, shares = remembered((*key, needs, shared), lambda: _plan(_rotate_backward, x, cos, x, dout))
    # of parts that are summed, in float32
    dtype = torch.float32 if shares > 1 or shared else cos.dtype
    dcos, dsin = (x.new_empty(shares, *x.shape[1:], dtype=dtype) if needs else None for _ in range(2))
    launch(dout, x, cos, sin, dx, dcos, dsin)
    if dcos is None or dsin is None:
        return dx, None, None
    dcos, dsin = ((y[0] if shares == 1 else y.sum(0)).sum_to_size(shape).to(cos.dtype) for y in (dcos, dsin))
    return dx, dcos, dsin
