"""Instance norm, a residual and SiLU on a slab of a grid: the statistics are those of all slabs."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from ndlightnet.layout import Part
from ndlightnet.ops.dtypes import accumulator, finest
from ndlightnet.ops.instance_norm import by_autograd, kernel_runs

Memo = list[tuple[Tensor, Tensor]]


def instance_norm_silu_part(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, eps: float, layout: Part, memo: Memo | None = None
) -> Tensor:
    """Return `instance_norm_silu` of x (batch, channels, *space), a part of the grid. memo: an
    empty list takes the statistics; a later call with it uses them, and exchanges nothing."""
    memo = [] if memo is None else memo
    if kernel_runs(x):
        out: Tensor = _Kernels.apply(x, weight, bias, residual, eps, layout, memo)  # type: ignore
        return out
    return _by_torch(x, weight, bias, residual, eps, layout, memo)


def _by_torch(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, eps: float, layout: Part, memo: Memo
) -> Tensor:
    y = _normed(x, weight, bias, eps, layout, memo)
    return silu(y if residual is None else y + residual).to(x.dtype)


def instance_norm_part(x: Tensor, weight: Tensor, bias: Tensor, eps: float, layout: Part) -> Tensor:
    """Return `instance_norm` of x, a part of the grid."""
    return _normed(x, weight, bias, eps, layout, []).to(x.dtype)


def _normed(x: Tensor, weight: Tensor, bias: Tensor, eps: float, layout: Part, memo: Memo) -> Tensor:
    """Return norm(x) * weight + bias in torch, unrounded."""
    acc = accumulator(x)
    dims, exact = tuple(range(2, x.ndim)), x.to(acc)
    if not memo:
        cells = math.prod(x.shape[2:])
        square, mean = torch.var_mean(exact, dims, correction=0)
        memo.append(_of_whole(mean, square * cells, cells, layout))
    mean, variance = memo[0]
    shape = (*x.shape[:2], *[1] * len(dims))
    scale = torch.rsqrt(variance + eps) * weight.to(acc)
    return (exact - mean.view(shape)) * scale.view(shape) + bias.to(acc).view(1, *shape[1:])


def _of_whole(mean: Tensor, squares: Tensor, cells: int, layout: Part) -> tuple[Tensor, Tensor]:
    """Return mean and variance of all parts' cells, from the mean of this part's cells and the sum
    of their squared deviations. Sums of squares in float64: a mean far from 0 costs no digits."""
    exact = finest(mean.device)
    own, size = mean.to(exact), layout.whole.length
    total = layout.total(torch.stack([own * cells, squares.to(exact) + own * own * cells]))
    whole = total[0] / size
    variance = (total[1] / size - whole * whole).clamp(min=0)
    return whole.to(mean.dtype), variance.to(mean.dtype)


class _Kernels(torch.autograd.Function):
    """By the kernels of one process, with an exchange between sums and what is done with them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, eps: float, layout: Part, memo: Memo
    ) -> Tensor:
        out, mean, rstd = by_kernels(x, weight, bias, residual, eps, layout, memo=memo)
        ctx.save_for_backward(x, weight, bias, residual, mean, rstd)
        ctx.layout, ctx.eps = layout, eps
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        from ndlightnet_kernels import instance_norm as kernels

        saved = ctx.saved_tensors  # read once: checkpointing allows it a single time
        layout, cells = ctx.layout, math.prod(saved[0].shape[2:])
        if torch.is_grad_enabled():  # for a second derivative
            wants, again = ctx.needs_input_grad[:4], partial(_by_torch, layout=layout, memo=[])
            return *by_autograd(dout, saved[:4], ctx.eps, wants, True, again), None, None, None

        def of_whole(sums: Tensor) -> Tensor:
            return layout.total(sums) * (cells / layout.whole.length)

        inputs: tuple[Any, ...] = (dout, *saved, of_whole)
        grads = kernels.instance_norm_silu_backward(*inputs)
        return *grads, None, None, None


def by_kernels(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    eps: float,
    layout: Part,
    out: Tensor | None = None,
    memo: Memo | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, which may be written to `out`, and mean and 1 / deviation of the whole."""
    from ndlightnet_kernels import instance_norm as kernels

    cells = math.prod(x.shape[2:])

    def of_whole(mean: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
        found = memo[0] if memo else _of_whole(mean, squares, cells, layout)
        if memo == []:
            memo.append(found)
        return found

    how: Any = {"out": out, "of_whole": of_whole}
    return kernels.instance_norm_silu(x, weight, bias, residual, eps, **how)
