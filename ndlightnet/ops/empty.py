"""Results without a number, of an empty batch or of no tokens."""

from __future__ import annotations

from torch import Tensor


def empty_result(y: Tensor, *inputs: Tensor | None) -> Tensor:
    """Return a copy of y that depends on `inputs`, of which it holds no number: their gradients are
    zeros and not missing, as DDP expects of parameters."""
    return y + sum(x.flatten()[:0].sum().real for x in inputs if x is not None)
