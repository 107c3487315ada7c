"""Cross-entropy of a linear head, without the logits of all tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ndlightnet.ops._operator import Operator, kernel
from ndlightnet.ops.dispatch import Impl, resolve
from ndlightnet.ops.dtypes import product_dtype

IGNORED = -100  # a target that does not count, as in torch
MOST, LEAST = 2**24, 1024  # logits of a chunk; fewer tokens would not fill a card


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the mean cross-entropy of logits = x @ weight.T + bias, a float32 (float64 of float64) scalar.

    Equal to `cross_entropy(linear(x, weight, bias).float(), target)`, but chunk by chunk of tokens, whose gradients
    the forward computes at once: no logits are saved, only the gradients of x and of the head.

    Args:
        x: (..., dim), which autocast casts as it does those of a linear layer.
        weight, bias: (classes, dim), (classes,).
        target: (...) int64; where it is IGNORED, -100, a token does not count. If none counts, the mean is NaN.
    """
    if target.shape != x.shape[:-1] or target.dtype != torch.int64:
        raise ValueError(f"target {tuple(target.shape)} {target.dtype}: expected {tuple(x.shape[:-1])} torch.int64")
    dtype = product_dtype(x)
    x, weight, bias = (y if y is None else y.to(dtype) for y in (x, weight, bias))  # type: ignore[assignment]
    if not torch.is_grad_enabled():  # no gradients are computed
        x, weight, bias = (y if y is None else y.detach() for y in (x, weight, bias))  # type: ignore[assignment]
    rows = x[None].flatten(0, -2)
    out: Tensor = _LinearCrossEntropy.apply(rows, weight, target.flatten(), bias)  # type: ignore
    return out


def cross_entropy(logits: Tensor, labels: Tensor, needs_slope: bool, impl: Impl = "auto") -> tuple[Tensor, Tensor]:
    """Return the losses (rows,) of logits (rows, classes) with labels (rows,) int64, in float32 (float64 of float64),
    and the gradients of their sum, the slopes (rows, classes) in the dtype of the logits; these only if needed."""
    if resolve("cross_entropy", impl, logits) == "triton":
        return _kernel(logits, labels, needs_slope)
    # few passes over the logits, which are most of the time of a large vocabulary
    log_probs = logits.log_softmax(1, dtype=torch.promote_types(logits.dtype, torch.float32))
    losses = -log_probs.gather(1, labels[:, None])
    if not needs_slope:
        return losses[:, 0], logits.new_empty(0)
    slope = torch.exp(log_probs, out=torch.empty_like(logits))
    return losses[:, 0], slope.scatter_(1, labels[:, None], torch.expm1(-losses).to(logits.dtype))


_kernel = Operator(
    "cross_entropy(Tensor logits, Tensor labels, bool needs_slope) -> (Tensor losses, Tensor slope)",
    kernel("cross_entropy", "cross_entropy"),
    lambda logits, labels, needs_slope: (
        logits.new_empty(labels.shape, dtype=torch.float32),
        torch.empty_like(logits) if needs_slope else logits.new_empty(0),
    ),
    implementations=("torch", "triton"),
)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        need_x, need_weight, _, need_bias = ctx.needs_input_grad
        dx = torch.empty_like(x) if need_x else None
        dweight = torch.zeros_like(weight, dtype=exact) if need_weight else None
        dbias = torch.zeros_like(bias, dtype=exact) if need_bias else None  # type: ignore[arg-type]
        total = x.new_zeros((), dtype=exact)
        size = max(LEAST, MOST // len(weight))
        # a sum over a chunk could be above the largest number of float16
        scale = 2.0 ** -(size.bit_length() // 2) if x.dtype == torch.float16 else 1.0
        for start in range(0, len(x), size):
            rows, labels = x[start : start + size], target[start : start + size, None]
            counts = labels != IGNORED
            labels = labels.masked_fill(~counts, 0)
            needed = need_x or need_weight or need_bias
            losses, slope = cross_entropy(linear(rows, weight, bias), labels[:, 0], needed)
            total += losses.masked_fill(~counts[:, 0], 0).sum()
            if not needed:
                continue
            if dbias is not None:
                dbias += slope.mul(counts).sum(0, dtype=exact)
            if dx is not None:
                dx[start : start + size] = (slope @ weight).masked_fill_(~counts, 0)
            if dweight is not None:
                rows = (rows if scale == 1 else rows * scale).masked_fill(~counts, 0)
                dweight.add_(slope.mT @ rows, alpha=1 / scale)
        count = (target != IGNORED).sum()
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
        return dx, dweight, None, dbias
