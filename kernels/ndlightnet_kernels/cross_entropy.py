"""Cross-entropy of rows of logits, and its slope, in two passes over a row, of which the second finds it in the L2.

logits (rows, classes), of any float dtype; arithmetic in float32. loss = log sum_c exp(x[c]) - x[label], slope[c] =
exp(x[c]) / sum exp - [c = label]. The number of classes is compiled in, that of rows is not. Bound by memory: each
logit is read and its slope written; torch's way, of a softmax in float32, moves several times as much.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ndlightnet_kernels.launch import Launch, remembered
from ndlightnet_kernels.tiles import power_of_2

BLOCK, WARPS = 8192, 8


@triton.jit
def _cross_entropy(logits, labels, losses, slope, CLASSES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * CLASSES
    label = tl.load(labels + row)
    top, total = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32)
    for start in range(0, CLASSES, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(logits + col, col < CLASSES, float("-inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(x))
        # before the first finite logit there is nothing to scale
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(x - safe))
        top = new
    norm = top + tl.log(total)
    # a label out of range gives NaN, and reads nothing
    loss = norm - tl.load(logits + label, (label >= 0) & (label < CLASSES), float("nan")).to(tl.float32)
    tl.store(losses + row, loss)
    if slope is not None:
        slope += row * CLASSES
        # p - 1 of the label from the loss: of p near 1 the difference would be rounding
        exponent = -loss
        right = tl.where(exponent > -1e-3, exponent * (1 + exponent * 0.5), tl.exp(exponent) - 1)
        for start in range(0, CLASSES, BLOCK):
            col = start + tl.arange(0, BLOCK)
            x = tl.load(logits + col, col < CLASSES, float("-inf")).to(tl.float32)
            y = tl.where(col == label, right, tl.exp(x - norm))
            tl.store(slope + col, y.to(slope.dtype.element_ty), col < CLASSES)


def cross_entropy(logits: Tensor, labels: Tensor, needs_slope: bool) -> tuple[Tensor, Tensor]:
    """Return the losses (rows,) float32 of logits (rows, classes) with labels (rows,) int64, and the slopes (rows,
    classes) in the dtype of the logits; these are empty unless needed."""
    logits, labels = logits.contiguous(), labels.contiguous()
    rows, classes = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    slope = torch.empty_like(logits) if needs_slope else None
    block = min(BLOCK, power_of_2(classes))
    remembered(
        ("cross_entropy", logits.device, logits.dtype, needs_slope, classes, rows),
        lambda: Launch(_cross_entropy, (rows,), CLASSES=classes, BLOCK=block, num_warps=WARPS),
    )(logits, labels, losses, slope)
    return losses, logits.new_empty(0) if slope is None else slope
