"""Choice of the implementation that runs an operation, and the reason where one cannot.

"torch" is plain torch, "triton" our kernels, "fla" those of flash-linear-attention, "reference" the
specification, token by token; "auto" takes kernels where there are some for the given tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ndlightnet.ops.plain import transformed

if TYPE_CHECKING:
    from ndlightnet.ops.position import Position

Impl = Literal["auto", "torch", "triton", "reference", "fla"]

KERNELS, FLA = ("torch", "triton", "reference"), ("torch", "fla", "reference")
# Implementations of each operation. The torch form of norm_gate is also its specification.
OPERATIONS: dict[str, tuple[str, ...]] = {
    "summarize": KERNELS,
    "read": KERNELS,
    "global_attention": KERNELS,
    "causal_attention": KERNELS,
    "axis_causal_attention": KERNELS,
    "attention_step": KERNELS,
    "sliding_merge": ("torch", "triton"),
    "axis_scan": KERNELS,
    "local_mixing": KERNELS,
    "norm_gate": KERNELS,
    "swiglu": ("torch", "triton"),
    "instance_norm_silu": ("torch", "triton"),
    "gated_linear_attention": FLA,
    "gated_delta_rule": FLA,
    # global, or causal along frames of more than one token
    "linear_attention": ("torch", "reference"),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TRANSFORMED = "torch.func or forward-mode AD, which cannot differentiate a kernel"
MOST_CHANNELS, MOST_ROW, MOST_AXES = 256, 4096, 8
MOST_CELLS = 2**31 - 2**26  # indices are 32 bits, and the last ones of a tile are beyond the row


@dataclass(frozen=True)
class Support:
    """Answer whether there is a kernel: true, or false with the reason."""

    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason


SUPPORTED = Support()


def resolve(operation: str, impl: Impl, x: Tensor, *others: Tensor | None, position: Position | None = None) -> str:
    """Return the implementation that runs: "torch", "triton", "fla" or "reference".

    x, others, position: as in `supported`, or keys, values and log decays of operations with "fla".
    Raises ValueError with the reason where an explicit `impl` cannot run. It is never replaced by
    another one, except that "torch" replaces "triton" for empty tensors: no kernel is launched.
    """
    has = OPERATIONS[operation]
    if impl != "auto" and impl not in has:
        *some, last = (repr(name) for name in ("auto", *has))
        raise ValueError(f"impl={impl!r}: expected {', '.join(some)} or {last} for {operation}")
    if impl in ("torch", "reference"):
        return impl
    if "fla" in has:
        from ndlightnet.ops import fla

        v, *rest = others
        assert v is not None
        support = fla.supports(operation, x, v, *rest)  # type: ignore[arg-type]
        if impl == "fla" and not support:
            raise ValueError(f"impl='fla': no {operation} for {support.reason}")
        return "fla" if support else "torch"
    if impl == "auto" and (not x.is_cuda or "triton" not in has):
        return "torch"
    support = supported(operation, x, *others, position=position)
    if impl == "triton" and not support:
        raise ValueError(f"impl='triton': no kernel for {operation} with {support.reason}")
    if not support or x.numel() == 0:
        return "torch"
    return "torch" if any(y is not None and y.numel() == 0 for y in others) else "triton"


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


def supported(
    operation: str, x: Tensor, v: Tensor | None = None, *others: Tensor | None, position: Position | None = None
) -> Support:
    """Return whether `operation`, a key of OPERATIONS, has a Triton kernel for these tensors.

    x: queries or keys (batch, length, heads, dim), or tokens (batch, *grid, dim) for "axis_scan"
    and "local_mixing", (..., dim) for "norm_gate" and "swiglu", (batch, channels, *space) for
    "instance_norm_silu". v: values. others: further inputs
    (queries, a State, the weight (taps, dim) of "local_mixing"). Where any input needs a gradient,
    the kernel must have a backward. A Support is true, or false with a `reason`.
    """
    if "triton" not in OPERATIONS.get(operation, ()):
        operations = (name for name, has in OPERATIONS.items() if "triton" in has)
        raise ValueError(f"operation={operation!r}: expected one of {', '.join(operations)}")
    if reason := device_reason(x.device):
        return Support(reason)
    if transformed():
        return Support(TRANSFORMED)
    if x.dtype not in DTYPES or (v is not None and v.dtype != x.dtype):
        dtypes = {x.dtype} | ({v.dtype} if v is not None else set())
        names = " and ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        return Support(f"{names}: expected bfloat16, float16 or float32, the same for all")
    on_grid = operation in ("axis_scan", "local_mixing")
    axes = x.ndim - 2 if on_grid else len(position.shape) if position else 1
    if axes > MOST_AXES:
        return Support(f"{axes} axes: expected {MOST_AXES} or fewer")
    if (
        (on_grid or operation == "instance_norm_silu")
        and torch.compiler.is_exporting()
        and any(isinstance(n, torch.SymInt) for n in x.shape)
    ):
        return Support("sizes that an exported graph leaves open: its programs depend on them")
    if operation == "swiglu":
        return SUPPORTED
    if operation == "instance_norm_silu":
        cells = x[:1, :1].numel()
        if cells > MOST_CELLS:
            return Support(f"{cells} cells: expected {MOST_CELLS} or fewer in a channel")
        return SUPPORTED
    if operation == "norm_gate":
        if x.shape[-1] > MOST_ROW:
            return Support(f"{x.shape[-1]} channels: expected {MOST_ROW} or fewer")
        return SUPPORTED
    if operation == "axis_scan":
        from ndlightnet_kernels import axis_scan

        return Support(axis_scan.supported(x))
    if operation == "local_mixing":
        from ndlightnet_kernels import local_mixing

        (weight,) = others or (None,)
        return Support(local_mixing.supported(0 if weight is None else weight.shape[0]))
    if operation == "attention_step" and torch.is_grad_enabled():
        given = (x, v, *others, position and position.theta)
        if any(one is not None and one.requires_grad for one in given):
            return Support("a gradient: the kernel of a step has no backward; use torch.no_grad()")
    head_dim = max(x.shape[-1], 0 if v is None else v.shape[-1])
    if head_dim > MOST_CHANNELS:
        return Support(f"{head_dim} channels a head: expected {MOST_CHANNELS} or fewer")
    if position is not None and position.kind == "rotary":
        if operation in ("causal_attention", "axis_causal_attention", "attention_step"):
            return Support(f"kind='rotary' in {operation}: expected 'cosine' or no position")
        if x.shape[-1] % 2:
            return Support(f"kind='rotary' and {x.shape[-1]} channels: expected an even number")
    return SUPPORTED
