"""What kernels of several operations cannot run: the reason in words, empty if they can."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ndlightnet.layout.abstract import exporting

MOST_AXES = 8


def device_reason(device: torch.device) -> str:
    """Return why Triton cannot run on a device, empty if it can."""
    return _device_reason_once(device)


# as torch.compiler.assume_constant_result does, but without importing torch._dynamo and Triton
device_reason._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _device_reason_once(device: torch.device) -> str:
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return "" if major >= 8 else f"compute capability {major}.{minor}: expected 8.0 or more"
    from ndlightnet_kernels import interpreted

    if device.type == "cpu" and interpreted():
        return ""
    return f"tensors on {device.type}: expected cuda"


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
