"""Choice of the implementation that runs an operation, and the reason where one cannot.

"torch" is plain torch, "triton" our kernels, "fla" those of flash-linear-attention, "reference" the
specification, token by token; "auto" takes kernels where there are some for the given tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ndlightnet.ops.limits import unlimited
from ndlightnet.ops.plain import transformed
from ndlightnet_kernels import device_reason

Impl = Literal["auto", "torch", "triton", "reference", "fla"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TRANSFORMED = "torch.func or forward-mode AD, which cannot differentiate a kernel"


class Operation(NamedTuple):
    """What an operation declares: its implementations, and `limits(x, v, *others, position=)`, the reason why its
    kernels cannot run tensors on a device and in dtypes that they support; empty if they can."""

    implementations: tuple[str, ...]
    limits: Callable[..., str] = unlimited


OPERATIONS: dict[str, Operation] = {}  # filled by the modules that define them


@dataclass(frozen=True)
class Support:
    """Answer whether there is a kernel: true, or false with the reason."""

    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason


def resolve(operation: str, impl: Impl, x: Tensor, *others: Tensor | None, position: Any = None) -> str:
    """Return the implementation that runs: "torch", "triton", "fla" or "reference".

    x, others, position: as in `supported`, or keys, values and log decays of operations with "fla".
    Raises ValueError with the reason where an explicit `impl` cannot run. It is never replaced by
    another one, except that "torch" replaces "triton" for empty tensors: no kernel is launched.
    """
    has, limits = OPERATIONS[operation]
    if impl != "auto" and impl not in has:
        *some, last = (repr(name) for name in ("auto", *has))
        raise ValueError(f"impl={impl!r}: expected {', '.join(some)} or {last} for {operation}")
    if impl in ("torch", "reference"):
        return impl
    if "fla" in has:
        reason = limits(x, *others)
        if impl == "fla" and reason:
            raise ValueError(f"impl='fla': no {operation} for {reason}")
        return "torch" if reason else "fla"
    if impl == "auto" and (not x.is_cuda or "triton" not in has):
        return "torch"
    support = supported(operation, x, *others, position=position)
    if impl == "triton" and not support:
        raise ValueError(f"impl='triton': no kernel for {operation} with {support.reason}")
    if not support or any(y is not None and y.numel() == 0 for y in (x, *others)):
        return "torch"
    return "triton"


def supported(
    operation: str, x: Tensor, v: Tensor | None = None, *others: Tensor | None, position: Any = None
) -> Support:
    """Return whether `operation` has a Triton kernel for these tensors.

    x: queries or keys (batch, length, heads, dim), or tokens (batch, *grid, dim) for "axis_scan" and "local_mixing",
    (..., dim) for "add_norm", "norm_gate" and "swiglu", (rows, classes) for "cross_entropy", (batch, channels, *space)
    for "instance_norm_silu". v: values, for "rotate" the table of cosines. position: a Position.
    others: further inputs (queries, a State, the weight (taps, dim) of "local_mixing"). Where any
    input needs a gradient, the kernel must have a backward. A Support is true, or false with a `reason`.
    """
    if operation not in OPERATIONS or "triton" not in OPERATIONS[operation].implementations:
        operations = sorted(name for name, has in OPERATIONS.items() if "triton" in has.implementations)
        raise ValueError(f"operation={operation!r}: expected one of {', '.join(operations)}")
    if reason := device_reason(x.device):
        return Support(reason)
    if transformed():
        return Support(TRANSFORMED)
    if x.dtype not in DTYPES or (v is not None and v.dtype != x.dtype):
        dtypes = {x.dtype} | ({v.dtype} if v is not None else set())
        names = " and ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        return Support(f"{names}: expected bfloat16, float16 or float32, the same for all")
    return Support(OPERATIONS[operation].limits(x, v, *others, position=position))
