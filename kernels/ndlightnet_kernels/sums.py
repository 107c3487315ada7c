"""Sums of what programs leave, in a fixed order: the same bits at every call."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ndlightnet_kernels.launch import Launch, remembered
from ndlightnet_kernels.tiles import cdiv, scratch

ROWS, COLUMNS, WARPS = 128, 32, 8


@triton.jit(do_not_specialize=["outer", "groups", "inner"])
def _sum_rows(x, out, outer, groups, inner, DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    group, col = tl.program_id(1), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, outer * inner, ROWS):
        row = first + tl.arange(0, ROWS)
        at = ((row // inner * groups + group).to(tl.int64) * inner + row % inner)[:, None] * DIM + col[None, :]
        total += tl.load(x + at, (row < outer * inner)[:, None] & (col < DIM)[None, :], 0.0)
    tl.store(out + group * DIM + col, tl.sum(total, 0), col < DIM)


def _plan(outer: int, groups: int, inner: int, dim: int) -> Launch:
    sizes = {"outer": outer, "groups": groups, "inner": inner, "DIM": dim}
    grid = (cdiv(dim, COLUMNS), groups)
    return Launch(_sum_rows, grid, **sizes, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS)


def sum_rows(x: Tensor) -> Tensor:
    """Sum a dense float32 tensor (outer, groups, inner, dim) over its first and third axis: (groups, dim)."""
    launch = remembered(("sum_rows", x.device, x.shape), lambda: _plan(*x.shape))
    out = torch.empty(x.shape[1], x.shape[3], dtype=x.dtype, device=x.device)
    launch(x, out)
    return out


def theta_grad(x: Tensor, partial: Tensor | None) -> Tensor:
    """Return the gradient of each head's angles, (heads, slots), from those of splits, tiles or chunks, (batch, heads,
    number, slots); None: without slots. x: (batch, length, heads, dim)."""
    return scratch(x, x.shape[2], 0) if partial is None else sum_rows(partial)
