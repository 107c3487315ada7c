"""SwiGLU: SiLU(gate) * up of one tensor that holds both, in one pass over it.

x (..., 2 * dim) is [gate, up], of any float dtype; arithmetic in float32, one rounding at the end.
The width is compiled in, the number of rows is not. Bound by memory: 3 dim values a row forward, 6 backward, which also
computes the product again, so that none is kept between the two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ndlightnet_kernels.launch import Launch, remembered
from ndlightnet_kernels.tiles import cdiv, power_of_2

ELEMENTS, WARPS = 2048, 4  # of a program's tile


@triton.jit
def _tile(rows, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return a program's indices in (rows, DIM) and in (rows, 2 * DIM), and their mask."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (col < DIM)[None, :]
    return row[:, None] * DIM + col[None, :], row[:, None] * (2 * DIM) + col[None, :], mask


@triton.jit(do_not_specialize=["rows"])
def _swiglu(x, out, rows, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    to, at, mask = _tile(rows, DIM, ROWS, BLOCK)
    gate, up = tl.load(x + at, mask, 0.0), tl.load(x + at + DIM, mask, 0.0)
    gate = gate.to(tl.float32)
    y = gate * tl.sigmoid(gate) * up.to(tl.float32)
    tl.store(out + to, y.to(out.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows"])
def _swiglu_backward(dout, x, dx, out, rows, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    of, at, mask = _tile(rows, DIM, ROWS, BLOCK)
    d = tl.load(dout + of, mask, 0.0).to(tl.float32)
    gate = tl.load(x + at, mask, 0.0).to(tl.float32)
    up = tl.load(x + at + DIM, mask, 0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    slope = s * (1 + gate * (1 - s))
    tl.store(dx + at, (d * up * slope).to(dx.dtype.element_ty), mask)
    tl.store(dx + at + DIM, (d * gate * s).to(dx.dtype.element_ty), mask)
    if out is not None:
        tl.store(out + of, (gate * s * up).to(out.dtype.element_ty), mask)


def _launch(kernel: object, dim: int, rows: int) -> Launch:
    block = min(power_of_2(dim), 1024)
    height = ELEMENTS // block
    return Launch(
        kernel, (cdiv(rows, height), cdiv(dim, block)), rows=rows, DIM=dim, ROWS=height, BLOCK=block, num_warps=WARPS
    )


def swiglu(x: Tensor) -> Tensor:
    """Return SiLU(gate) * up of x: (..., 2 * dim) -> (..., dim), in the same dtype."""
    x, dim = x.contiguous(), x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], dim, dtype=x.dtype, device=x.device)
    rows = out.numel() // max(1, dim)
    remembered(("swiglu", x.device, x.dtype, dim, rows), lambda: _launch(_swiglu, dim, rows))(x, out)
    return out


def swiglu_backward(dout: Tensor, x: Tensor, again: bool) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of x and, if wanted `again`, the product, in the memory of dout."""
    dout, x, dim = dout.contiguous(), x.contiguous(), x.shape[-1] // 2
    dx, out, rows = torch.empty_like(x), dout if again else None, dout.numel() // max(1, dim)
    remembered(
        ("swiglu_backward", x.device, x.dtype, dout.dtype, again, dim, rows),
        lambda: _launch(_swiglu_backward, dim, rows),
    )(dout, x, dx, out)
    return dx, out
