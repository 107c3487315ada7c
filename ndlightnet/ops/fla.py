"""flash-linear-attention's kernels (the optional extra `fla`) behind our functions; the package is
imported when they are called, not before."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ndlightnet.ops._once_differentiable import once_differentiable_inputs
from ndlightnet.ops.dispatch import OPERATIONS, TRANSFORMED, Operation, Support
from ndlightnet.ops.plain import transformed

MOST_CHANNELS = 256


def declare(operation: str) -> None:
    """Declare an operation that these kernels run, beside plain torch and the specification."""

    def limits(*tensors: Any) -> str:
        return supports(operation, *tensors).reason

    OPERATIONS[operation] = Operation(("torch", "fla", "reference"), limits)


def supports(operation: str, k: Tensor, v: Tensor, decay: Tensor | None = None, *others: Tensor) -> Support:
    """Return whether flash-linear-attention runs `operation` on these keys, values and log decays,
    with the reason if not. others: further inputs, which may need a gradient."""
    if operation not in OPERATIONS or "fla" not in OPERATIONS[operation].implementations:
        return Support(f"{operation}: flash-linear-attention has none that fits")
    if not k.is_cuda:
        return Support(f"tensors on {k.device.type}: expected cuda")
    if transformed():
        return Support(TRANSFORMED)
    if find_spec("fla") is None or find_spec("triton") is None:
        return Support("flash-linear-attention is not installed: pip install 'ndlightnet[fla]'")
    if k.dtype not in (torch.bfloat16, torch.float16) or v.dtype != k.dtype:
        return Support(f"{k.dtype} and {v.dtype}: expected bfloat16 or float16 for both")
    if (head_dim := max(k.shape[-1], v.shape[-1])) > MOST_CHANNELS:
        return Support(f"{head_dim} channels a head: expected {MOST_CHANNELS} or fewer")
    one = decay is not None and decay.shape[-1] == 1
    inputs = (k, v, *others) if decay is None else (k, v, decay, *others)
    learnt = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if one and learnt and _wrong_gradients(k.device):
        return Support(
            "a gradient with one decay a head on a Hopper card with Triton 3.4 to 3.7.0, where it "
            "would be wrong (flash-linear-attention issue 640)"
        )
    return Support()


@cache
def _wrong_gradients(device: torch.device) -> bool:
    numbers = tuple(int(n) for n in version("triton").split("+")[0].split(".")[:3])
    return torch.cuda.get_device_capability(device)[0] == 9 and (3, 4) <= numbers < (3, 7, 1)


def _call(module: str, name: str, *args: Any, **more: Any) -> tuple[Tensor, Tensor]:
    operator = getattr(import_module(f"fla.ops.{module}"), name)
    y, last = operator(*args, scale=1.0, output_final_state=True, **more)
    return y, last


def gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    q, k, v, decay, state = once_differentiable_inputs(q, k, v, decay, state)
    q, k, v = (x.contiguous() for x in (q, k, v))
    if decay is None or decay.shape[-1] == 1:
        g = None if decay is None else decay[..., 0].contiguous()
        return _call("simple_gla", "chunk_simple_gla", q, k, v, g=g, initial_state=state)
    return _call("gla", "chunk_gla", q, k, v, g=decay.contiguous(), initial_state=state)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    q, k, v, beta, decay, state = once_differentiable_inputs(q, k, v, beta, decay, state)
    q, k, v, beta = (x.contiguous() for x in (q, k, v, beta))
    if decay is None:
        return _call("delta_rule", "chunk_delta_rule", q, k, v, beta=beta, initial_state=state)
    if decay.shape[-1] == 1:
        name, g = "gated_delta_rule", decay[..., 0].contiguous()
    else:
        name, g = "kda", decay.contiguous()
    return _call(name, f"chunk_{name}", q, k, v, g=g, beta=beta, initial_state=state)
