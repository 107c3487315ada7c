"""Dtypes of sums and of intermediate results."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulator(x: Tensor) -> torch.dtype:
    """Return float64 for float64 inputs, float32 for all others."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def finest(device: torch.device) -> torch.dtype:
    """Return float64, for values that need more digits than float32 has; float32 on MPS."""
    return torch.float32 if device.type == "mps" else torch.float64
