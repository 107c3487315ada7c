"""What ndlightnet_kernels supports. It is imported when it is asked, not before."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from ndlightnet.ops.lrpe import Lrpe

OPERATIONS = (
    "summarize", "read", "global_attention", "causal_attention", "axis_causal_attention",
    "attention_step", "axis_scan", "norm_gate", "running",
)  # fmt: skip
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_CHANNELS, MOST_ROW, MOST_AXES = 256, 4096, 8


@dataclass(frozen=True)
class Support:
    """Whether there is a kernel; false with the reason why not."""

    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason


def _device_reason(device: torch.device) -> str:
    return _device_reason_once(device)


# what torch.compiler.assume_constant_result does, but without importing torch._dynamo and Triton
_device_reason._dynamo_marked_constant = True  # type: ignore[attr-defined]


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


def supported(
    operation: str, x: Tensor, v: Tensor | None = None, *others: Tensor, lrpe: Lrpe | None = None
) -> Support:
    """Whether `operation`, a name in ndlightnet.ops, has a Triton kernel for these tensors.

    x: queries or keys (batch, length, heads, dim), or tokens (batch, *grid, dim) for "axis_scan",
    (..., dim) for "norm_gate". v: values. others: what else goes in (queries, a State): where one
    of all needs a gradient, a kernel must have one. A Support is true, or false with a `reason`.
    """
    if operation not in OPERATIONS:  # "running" is what axis-causal attention does with States
        raise ValueError(f"operation={operation!r}: expected one of {', '.join(OPERATIONS)}")
    if reason := _device_reason(x.device):
        return Support(reason)
    dtypes = {x.dtype} | ({v.dtype} if v is not None else set())
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        names = " and ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        return Support(f"{names}: expected bfloat16, float16 or float32, the same for all")
    axes = x.ndim - 2 if operation == "axis_scan" else len(lrpe.shape) if lrpe else 1
    if axes > MOST_AXES:
        return Support(f"{axes} axes: expected {MOST_AXES} or fewer")
    if operation == "norm_gate":
        return Support(
            f"{x.shape[-1]} channels: expected {MOST_ROW} or fewer"
            if x.shape[-1] > MOST_ROW
            else ""
        )
    if operation == "axis_scan":
        from ndlightnet_kernels import axis_scan

        return Support(axis_scan.supported(x))
    if operation == "attention_step" and torch.is_grad_enabled():
        given = (x, v, *others, lrpe and lrpe.theta)
        if any(one is not None and one.requires_grad for one in given):
            return Support("a gradient: the kernel of a step has no backward; use torch.no_grad()")
    wide = max(x.shape[-1], 0 if v is None else v.shape[-1])
    if wide > MOST_CHANNELS:
        return Support(f"{wide} channels a head: expected {MOST_CHANNELS} or fewer")
    if lrpe is not None and lrpe.kind == "rotary":
        if operation in ("causal_attention", "axis_causal_attention", "attention_step"):
            return Support(f"kind='rotary' in {operation}: expected 'cosine' or no lrpe")
        if x.shape[-1] % 2:
            return Support(f"kind='rotary' and {x.shape[-1]} channels: expected an even number")
    return Support()
