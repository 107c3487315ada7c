"""Cross-entropy of a linear head, without the logits of all tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ndlightnet.ops.dtypes import product_dtype

MOST, LEAST = 2**24, 1024  # logits of a chunk; fewer tokens would not fill a card


def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ignore_index: int = -100
) -> Tensor:
    """Return the mean cross-entropy of logits = x @ weight.T + bias, a float32 (float64 of float64) scalar.

    Equal to `cross_entropy(linear(x, weight, bias).float(), target)`, but chunk by chunk of tokens, whose gradients
    the forward computes at once: no logits are saved, only the gradients of x and of the head.

    Args:
        x: (..., dim), which autocast casts as it does those of a linear layer.
        weight, bias: (classes, dim), (classes,).
        target: (...) int64; where it is `ignore_index`, a token does not count. If none counts, the mean is NaN.
    """
    if target.shape != x.shape[:-1] or target.dtype != torch.int64:
        raise ValueError(f"target {tuple(target.shape)} {target.dtype}: expected {tuple(x.shape[:-1])} torch.int64")
    dtype = product_dtype(x)
    x, weight, bias = (y if y is None else y.to(dtype) for y in (x, weight, bias))  # type: ignore[assignment]
    if not torch.is_grad_enabled():  # no gradients are computed
        x, weight, bias = (y if y is None else y.detach() for y in (x, weight, bias))  # type: ignore[assignment]
    rows = x[None].flatten(0, -2)
    out: Tensor = _LinearCrossEntropy.apply(rows, weight, target.flatten(), bias, ignore_index)  # type: ignore
    return out


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        need_x, need_weight, _, need_bias, _ = ctx.needs_input_grad
        dx = torch.empty_like(x) if need_x else None
        dweight = torch.zeros_like(weight, dtype=exact) if need_weight else None
        dbias = torch.zeros_like(bias, dtype=exact) if need_bias else None  # type: ignore[arg-type]
        total = x.new_zeros((), dtype=exact)
        size = max(LEAST, MOST // len(weight))
        # a sum over a chunk could be above the largest number of float16
        scale = 2.0 ** -(size.bit_length() // 2) if x.dtype == torch.float16 else 1.0
        for start in range(0, len(x), size):
            rows, labels = x[start : start + size], target[start : start + size, None]
            counts = labels != ignore_index
            labels = labels.masked_fill(~counts, 0)
            logits = linear(rows, weight, bias).to(exact)
            norm = logits.logsumexp(1, keepdim=True)
            total += (norm - logits.gather(1, labels)).masked_fill(~counts, 0).sum()
            if not (need_x or need_weight or need_bias):
                continue
            # gradients of the sum: those of the mean could be too small for float16
            slope = logits.sub_(norm).exp_()
            slope.scatter_add_(1, labels, slope.new_full((), -1).expand_as(labels)).mul_(counts)
            if dbias is not None:
                dbias += slope.sum(0)
            slope = slope.to(x.dtype)
            if dx is not None:
                dx[start : start + size] = slope @ weight
            if dweight is not None:
                dweight.add_(slope.mT @ (rows if scale == 1 else rows * scale), alpha=1 / scale)
        count = (target != ignore_index).sum()
        ctx.save_for_backward(dx, dweight, dbias, count)
        ctx.dtype = x.dtype
        return total / count

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("linear_cross_entropy: no second derivative, its gradient is computed in the forward")
        dx, dweight, dbias, count = ctx.saved_tensors
        scale = dout / count
        dx, dweight, dbias = (y if y is None else (y * scale).to(ctx.dtype) for y in (dx, dweight, dbias))
        return dx, dweight, None, dbias, None
