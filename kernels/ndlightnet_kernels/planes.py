"""Planes that are added to those at the edge of a slab: what its neighbours give to it.

Tensors are (outer, rows, dim) at any distances of samples and rows, with dense channels: planes along any axis of a
contiguous grid are.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ndlightnet_kernels.launch import Launch, remembered
from ndlightnet_kernels.sums import sum_rows
from ndlightnet_kernels.tiles import cdiv, form, power_of_2, scratch

NUMBERS, CHANNELS, WARPS = 2048, 128, 4  # a tile has so many numbers, of so many channels at most
PROGRAMS = 1056  # of the gradients, a constant, for the same bits on every card


@triton.jit
def _at(x, outer, row, col, OUTER, ROW):
    return x + (outer * OUTER + row * ROW)[:, None] + col[None, :]


@triton.jit(do_not_specialize=["count", "rows"])
def _add(
    x,
    weight,
    out,
    count,
    rows,
    x_outer,
    x_row,
    out_outer,
    out_row,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add x, or its product with a weight of each channel, to `out`. count: of all rows."""
    col, at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = (at < count)[:, None] & (col < DIM)[None, :]
    outer, row = (at // rows).to(tl.int64), (at % rows).to(tl.int64)
    value = tl.load(_at(x, outer, row, col, x_outer, x_row), valid, 0.0).to(tl.float32)
    if weight is not None:
        value *= tl.load(weight + col, col < DIM, 0.0)[None, :]
    to = _at(out, outer, row, col, out_outer, out_row)
    value += tl.load(to, valid, 0.0).to(tl.float32)
    tl.store(to, value.to(out.dtype.element_ty), valid)


@triton.jit(do_not_specialize=["count", "rows", "each"])
def _gradients(
    dout,
    x,
    weight,
    dx,
    partial,
    count,
    rows,
    each,
    dout_outer,
    dout_row,
    x_outer,
    x_row,
    dx_outer,
    dx_row,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    MORE: tl.constexpr,
):
    """Compute dout * weight and, over `each` successive tiles, the sum of dout * x. MORE: dx is added to what it is."""
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_dim = col < DIM
    factor = tl.load(weight + col, in_dim, 0.0)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    first = tl.program_id(0) * each
    for tile in range(first, tl.minimum(first + each, tl.cdiv(count, ROWS))):
        at = tile * ROWS + tl.arange(0, ROWS)
        valid = (at < count)[:, None] & in_dim[None, :]
        outer, row = (at // rows).to(tl.int64), (at % rows).to(tl.int64)
        grad = tl.load(_at(dout, outer, row, col, dout_outer, dout_row), valid, 0.0).to(tl.float32)
        total += grad * tl.load(_at(x, outer, row, col, x_outer, x_row), valid, 0.0).to(tl.float32)
        to, grad = _at(dx, outer, row, col, dx_outer, dx_row), grad * factor
        if MORE:
            grad += tl.load(to, valid, 0.0).to(tl.float32)
        tl.store(to, grad.to(dx.dtype.element_ty), valid)
    tl.store(partial + tl.program_id(0) * DIM + col, tl.sum(total, 0), in_dim)


def rows(x: Tensor, dim: int) -> Tensor:
    """Return planes along `dim` as (outer, rows, dim of a row), a view."""
    return x.view(math.prod(x.shape[:dim]), math.prod(x.shape[dim:-1]), x.shape[-1])


def _arguments(**tensors: Tensor) -> dict[str, Any]:
    """Return the arguments of a kernel that follow from its tensors (outer, rows, dim), without its grid."""
    x = tensors["x"]
    block = min(power_of_2(x.shape[2]), CHANNELS)
    steps = {f"{name}_outer": z.stride(0) for name, z in tensors.items()}
    steps |= {f"{name}_row": z.stride(1) for name, z in tensors.items()}
    sizes = {"count": x.shape[0] * x.shape[1], "rows": x.shape[1], "DIM": x.shape[2]}
    return {**sizes, **steps, "ROWS": NUMBERS // block, "BLOCK": block, "num_warps": WARPS}


def _plan(x: Tensor, out: Tensor) -> Launch:
    a = _arguments(x=x, out=out)
    return Launch(_add, (cdiv(a["count"], a["ROWS"]), cdiv(a["DIM"], a["BLOCK"])), **a)


def add(x: Tensor, out: Tensor, weight: Tensor | None = None) -> None:
    """Add x, or x times a weight (dim,), float32, to `out`."""
    launch = remembered(("add_planes", weight is None, *form(x, out)), lambda: _plan(x, out))
    launch(x, weight, out)


def _gradients_plan(dout: Tensor, x: Tensor, dx: Tensor, more: bool) -> tuple[Launch, int]:
    a = _arguments(dout=dout, x=x, dx=dx)
    tiles, blocks = cdiv(a["count"], a["ROWS"]), cdiv(a["DIM"], a["BLOCK"])
    each = cdiv(tiles, max(1, PROGRAMS // blocks))
    slots = cdiv(tiles, each)
    return Launch(_gradients, (slots, blocks), **a, each=each, MORE=more), slots


def gradients(dout: Tensor, x: Tensor, weight: Tensor, dx: Tensor, more: bool) -> Tensor:
    """Write the gradient of x of `add` into dx, or add it (more), and return that of weight, (1, dim) float32."""
    launch, slots = remembered(
        ("add_planes_gradients", more, *form(dout, x, dx)), lambda: _gradients_plan(dout, x, dx, more)
    )
    partial = scratch(x, 1, 1, slots, x.shape[2])
    launch(dout, x, weight, dx, partial)
    return sum_rows(partial)
