"""Instance norm with an affine map, an optional residual, and SiLU: SiLU(norm(x) * w + b + r).

Tensors are (batch, channels, *space) of any float dtype; a row is a channel of a sample. Arithmetic
and statistics in float32, one rounding at the end. A row is cut into `splits` chunks, one program
each; all that they sum is added in one order, so that results have the same bits at every call.
Of the forward only the input and the rows' statistics are needed for the backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ndlightnet_kernels.launch import Launch, remembered
from ndlightnet_kernels.tiles import cdiv, power_of_2, silu

# Elements of a tile at most, and warps. Programs that fill a card, and the most chunks of a row (a
# constant, so that the result has the same bits on every card).
TILE, WARPS = 2048, 4
PROGRAMS, MOST_SPLITS = 2048, 64


@triton.jit
def _chunk(row, split, size, chunk):
    """Return the offset of a row, and the first and the last cell but one of a chunk."""
    first = split * chunk
    return row.to(tl.int64) * size, first, tl.minimum(first + chunk, size)


@triton.jit
def _read(x, at, mask):
    return tl.load(x + at, mask, 0.0).to(tl.float32)


@triton.jit
def _moments(x, partial, size, chunk, BLOCK: tl.constexpr):
    """Write the mean of each chunk and the sum of its squared deviations (Welford, by lanes: a mean
    far from 0 costs no digits)."""
    row, split = tl.program_id(0), tl.program_id(1)
    base, first, last = _chunk(row, split, size, chunk)
    lane = tl.arange(0, BLOCK)
    mean = tl.zeros((BLOCK,), tl.float32)
    square = tl.zeros((BLOCK,), tl.float32)
    tiles = 0.0
    for start in range(first, last, BLOCK):
        tiles += 1.0
        mask = start + lane < last
        value = _read(x, base + start + lane, mask)
        delta = tl.where(mask, value - mean, 0.0)
        mean += delta * (1.0 / tiles)
        square += delta * (value - mean)
    count = ((last - first - lane + BLOCK - 1) // BLOCK).to(tl.float32)  # of a lane; 0 beyond
    origin = tl.load(x + base + first).to(tl.float32)  # of equal cells there is no rounding
    middle = origin + tl.sum(count * (mean - origin), 0) / (last - first)
    square += count * (mean - middle) * (mean - middle)
    to = partial + (row * tl.num_programs(1) + split) * 2
    tl.store(to, middle)
    tl.store(to + 1, tl.sum(square, 0))


@triton.jit
def _apply(
    x,
    weight,
    bias,
    residual,
    partial,
    out,
    mean,
    rstd,
    size,
    chunk,
    channels,
    eps,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    base, first, last = _chunk(row, split, size, chunk)
    if partial is None:  # they are known
        mu, r = tl.load(mean + row), tl.load(rstd + row)
    else:
        index = tl.arange(0, SPLITS)
        at, exists = partial + (row * splits + index) * 2, index < splits
        length = tl.where(exists, tl.minimum(chunk, size - index * chunk), 0).to(tl.float32)
        means = tl.load(at, exists, 0.0)
        origin = tl.load(partial + row * splits * 2)
        mu = origin + tl.sum(length * (means - origin), 0) / size
        off = means - mu
        r = tl.rsqrt(tl.sum(tl.load(at + 1, exists, 0.0) + length * off * off, 0) / size + tl.cast(eps, tl.float32))
        if split == 0:
            tl.store(mean + row, mu)
            tl.store(rstd + row, r)
    w = tl.load(weight + row % channels).to(tl.float32)
    b = tl.load(bias + row % channels).to(tl.float32)
    for start in range(first, last, BLOCK):
        lane = start + tl.arange(0, BLOCK)
        mask = lane < last
        y = (_read(x, base + lane, mask) - mu) * (r * w) + b
        if residual is not None:
            y += _read(residual, base + lane, mask)
        tl.store(out + base + lane, silu(y)[0].to(out.dtype.element_ty), mask)


@triton.jit
def _gradient(dout, x, residual, at, mask, mu, r, w, b):
    """Return the normed cells, and the gradient before SiLU."""
    normed = tl.where(mask, (_read(x, at, mask) - mu) * r, 0.0)
    y = normed * w + b
    if residual is not None:
        y += _read(residual, at, mask)
    return normed, _read(dout, at, mask) * silu(y)[1]


@triton.jit
def _row(weight, bias, mean, rstd, row, channels):
    w = tl.load(weight + row % channels).to(tl.float32)
    b = tl.load(bias + row % channels).to(tl.float32)
    return tl.load(mean + row), tl.load(rstd + row), w, b


@triton.jit
def _gradient_sums(dout, x, weight, bias, residual, mean, rstd, partial, size, chunk, channels, BLOCK: tl.constexpr):
    """Write the sums over each chunk of the gradient, and of its product with the normed cells."""
    row, split = tl.program_id(0), tl.program_id(1)
    base, first, last = _chunk(row, split, size, chunk)
    mu, r, w, b = _row(weight, bias, mean, rstd, row, channels)
    plain = tl.zeros((BLOCK,), tl.float32)
    along = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, last, BLOCK):
        lane = start + tl.arange(0, BLOCK)
        normed, d = _gradient(dout, x, residual, base + lane, lane < last, mu, r, w, b)
        plain += d
        along += d * normed
    to = partial + (row * tl.num_programs(1) + split) * 2
    tl.store(to, tl.sum(plain, 0))
    tl.store(to + 1, tl.sum(along, 0))


@triton.jit
def _gradient_apply(
    dout,
    x,
    weight,
    bias,
    residual,
    mean,
    rstd,
    partial,
    dx,
    dresidual,
    sums,
    size,
    chunk,
    channels,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    base, first, last = _chunk(row, split, size, chunk)
    mu, r, w, b = _row(weight, bias, mean, rstd, row, channels)
    index = tl.arange(0, SPLITS)
    at, exists = partial + (row * splits + index) * 2, index < splits
    plain = tl.sum(tl.load(at, exists, 0.0), 0)
    along = tl.sum(tl.load(at + 1, exists, 0.0), 0)
    for start in range(first, last, BLOCK):
        lane = start + tl.arange(0, BLOCK)
        mask = lane < last
        normed, d = _gradient(dout, x, residual, base + lane, mask, mu, r, w, b)
        if residual is not None:
            tl.store(dresidual + base + lane, d.to(dresidual.dtype.element_ty), mask)
        d = (d - plain / size - normed * (along / size)) * (r * w)
        tl.store(dx + base + lane, d.to(dx.dtype.element_ty), mask)
    if split == 0:
        tl.store(sums + row * 2, plain)
        tl.store(sums + row * 2 + 1, along)


def _cut(x: Tensor) -> tuple[tuple[int, int], dict[str, int], dict[str, int]]:
    """Return the grid of programs, rows and chunks of a row; the arguments of all kernels, sizes
    and how they are compiled."""
    rows, size = x.shape[0] * x.shape[1], x[0, 0].numel()
    block = min(TILE, max(128, power_of_2(size)))
    tiles = cdiv(size, block)
    chunk = cdiv(tiles, max(1, min(MOST_SPLITS, tiles, PROGRAMS // rows))) * block
    return (
        (rows, cdiv(size, chunk)),
        {"size": size, "chunk": chunk},
        {"BLOCK": block, "num_warps": WARPS if block == TILE else 1},
    )


def _plan(x: Tensor, eps: float) -> tuple[Launch, Launch, int]:
    grid, sizes, constants = _cut(x)
    moments = Launch(_moments, grid, **sizes, **constants)
    apply = Launch(_apply, grid, **sizes, channels=x.shape[1], eps=eps, SPLITS=power_of_2(grid[1]), **constants)
    return moments, apply, grid[1]


def instance_norm_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    eps: float,
    out: Tensor | None = None,
    of_whole: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return SiLU(norm(x) * weight + bias + residual) in x's dtype, and the rows' mean and 1 / standard deviation. out:
    where the first is written; it may be x, if contiguous. of_whole: maps the rows' means and sums of squared
    deviations (batch, channels) to the mean and variance to use, where rows are slabs of larger ones."""
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    weight, bias = weight.contiguous(), bias.contiguous()
    more = None if residual is None else residual.dtype
    key = ("instance_norm", x.device, x.dtype, weight.dtype, bias.dtype, more, x.shape, eps)
    moments, apply, splits = remembered(key, lambda: _plan(x, eps))
    out = torch.empty_like(x) if out is None else out
    partial = x.new_empty((*x.shape[:2], splits, 2), dtype=torch.float32)
    mean, rstd = (x.new_empty(x.shape[:2], dtype=torch.float32) for _ in range(2))
    moments(x, partial)
    if of_whole is not None:
        lengths = _lengths(x, splits)
        # in float64: products of counts and equal means are exact
        average = ((partial[..., 0].double() * lengths).sum(-1) / lengths.sum()).float()
        off = partial[..., 0] - average[..., None]
        squares = (partial[..., 1] + lengths * off * off).sum(-1)
        overall, variance = of_whole(average, squares)
        # as if each chunk had the statistics of all
        partial[..., 0] = overall[..., None]
        partial[..., 1] = variance[..., None] * lengths
    apply(x, weight, bias, residual, partial, out, mean, rstd)
    return out, mean, rstd


def apply_statistics(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, mean: Tensor, rstd: Tensor
) -> Tensor:
    """Return SiLU(norm(x) * weight + bias + residual) with the rows' statistics that `instance_norm_silu` returned, to
    the same bits."""
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    weight, bias = weight.contiguous(), bias.contiguous()
    more = None if residual is None else residual.dtype
    key = ("instance_norm_again", x.device, x.dtype, weight.dtype, bias.dtype, more, x.shape)
    apply = remembered(key, lambda: _plan(x, 0.0)[1])
    out = torch.empty_like(x)
    apply(x, weight, bias, residual, None, out, mean, rstd)
    return out


def _lengths(x: Tensor, splits: int) -> Tensor:
    """Return the number of cells of each chunk of a row, float32."""
    size, chunk = x[0, 0].numel(), _cut(x)[1]["chunk"]
    first = torch.arange(splits, device=x.device, dtype=torch.float32) * chunk
    return (size - first).clamp(max=chunk)


def _backward_plan(x: Tensor) -> tuple[Launch, Launch, int]:
    grid, sizes, constants = _cut(x)
    add = Launch(_gradient_sums, grid, **sizes, channels=x.shape[1], **constants)
    apply = Launch(_gradient_apply, grid, **sizes, channels=x.shape[1], SPLITS=power_of_2(grid[1]), **constants)
    return add, apply, grid[1]


def instance_norm_silu_backward(
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    of_whole: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return gradients of x, weight, bias, residual. of_whole: maps the rows' sums (batch,
    channels, 2) to sums over larger rows, for as many cells as these rows have."""
    dout, x = dout.contiguous(), x.contiguous()
    weight, bias = weight.contiguous(), bias.contiguous()
    residual = None if residual is None else residual.contiguous()
    more = None if residual is None else residual.dtype
    dtypes = (dout.dtype, x.dtype, weight.dtype, bias.dtype, more)
    key = ("instance_norm_backward", x.device, dtypes, x.shape)
    add, apply, splits = remembered(key, lambda: _backward_plan(x))
    dx = torch.empty_like(x)
    dresidual = None if residual is None else torch.empty_like(residual)
    partial = x.new_empty((*x.shape[:2], splits, 2), dtype=torch.float32)
    sums = x.new_empty((*x.shape[:2], 2), dtype=torch.float32)
    add(dout, x, weight, bias, residual, mean, rstd, partial)
    totals = None
    if of_whole is not None:
        totals = partial.sum(-2)
        partial.zero_()[..., 0, :] = of_whole(totals)
    apply(dout, x, weight, bias, residual, mean, rstd, partial, dx, dresidual, sums)
    sums = sums if totals is None else totals  # those of weight and bias are of these rows alone
    dbias, dweight = sums.sum(0).unbind(-1)
    # results of an operator have storages of their own
    return (dx, torch.empty_like(weight).copy_(dweight), torch.empty_like(bias).copy_(dbias), dresidual)
