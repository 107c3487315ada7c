"""Dtypes of sums and of intermediate results, and the check of the dtypes of inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def check_floats(**inputs: Any) -> None:
    """Raise TypeError unless each input, given by its name, is a torch.Tensor; ValueError unless it
    is of a floating-point dtype."""
    for name, x in inputs.items():
        if not (isinstance(x, Tensor) and x.is_floating_point()):
            check_tensors(**{name: x})
            raise ValueError(f"{name} {tuple(x.shape)} {x.dtype}: expected floats, such as {name}.float()")


def check_tensors(**inputs: Any) -> None:
    """Raise TypeError unless each input, given by its name, is a torch.Tensor."""
    for name, x in inputs.items():
        if not isinstance(x, Tensor):
            kind = type(x)
            full = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
            remedy = f", such as torch.from_numpy({name})" if kind.__module__ == "numpy" else ""
            raise TypeError(f"{name} of type {full}: expected a torch.Tensor{remedy}")


def check_not_wider(module: nn.Module, **inputs: Any) -> None:
    """Raise ValueError for an input in float64, given by its name, if no parameter is: numpy's
    default, which nothing casts. Other dtypes are left to autocast and to wrappers such as FSDP."""
    for name, x in inputs.items():
        if x.dtype == torch.float64:
            dtypes = {p.dtype for p in module.parameters()}
            if dtypes and torch.float64 not in dtypes:
                raise ValueError(
                    f"{name} {tuple(x.shape)} torch.float64: expected {_names(dtypes)}, the "
                    f"module's; {name}.float(), or the module's .double()"
                )


def _names(dtypes: set[torch.dtype]) -> str:
    return " or ".join(sorted(str(dtype) for dtype in dtypes if dtype.is_floating_point))


def accumulator(x: Tensor) -> torch.dtype:
    """Return float64 for float64 inputs, float32 for all others."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def finest(device: torch.device) -> torch.dtype:
    """Return float64, for values that need more digits than float32 has; float32 on MPS."""
    return torch.float32 if device.type == "mps" else torch.float64


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products with x: that of autocast, which leaves out float64, or x's own."""
    kind = x.device.type
    if kind == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)
