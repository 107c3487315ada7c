"""What kernels of several operations cannot run: the reason in words, empty if they can."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ndlightnet.layout.abstract import exporting

MOST_AXES = 8


def unlimited(*_: Any, **__: Any) -> str:
    """Return the limits of an operation whose kernels run all tensors."""
    return ""


def axes_reason(axes: int) -> str:
    """Return why kernels cannot run a grid of that many axes."""
    return f"{axes} axes: expected {MOST_AXES} or fewer" if axes > MOST_AXES else ""


def sizes_reason(x: Tensor) -> str:
    """Return why kernels whose programs depend on the sizes of x cannot be exported."""
    if exporting() and any(isinstance(n, torch.SymInt) for n in x.shape):
        return "sizes that an exported graph leaves open: its programs depend on them"
    return ""
