"""Output stage of a LightNet layer: a normed output times a sigmoid gate, and a local branch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, silu

from ndlightnet.ops._operator import Operator
from ndlightnet.ops.dispatch import Impl, resolve


def norm_gate(
    y: Tensor,
    gate: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-6,
    impl: Impl = "auto",
    local: Tensor | None = None,
) -> Tensor:
    """Return (LayerNorm(y) * weight + bias) * sigmoid(gate), plus SiLU(local) if there is one.

    y, gate, local: (..., dim); weight, bias: (dim,). Statistics are float32 or wider. With Triton
    the result has y's dtype, with torch that of its layer_norm (float32 under autocast).
    """
    for name, x in (("gate", gate), ("local", local)):
        if x is not None and x.shape != y.shape:
            raise ValueError(f"{name} {tuple(x.shape)}: expected the shape of y, {tuple(y.shape)}")
    if resolve("norm_gate", impl, y) == "triton":
        out: Tensor = _norm_gate(y, gate, weight, bias, local, eps)[0]
        return out
    out = layer_norm(y, y.shape[-1:], weight, bias, eps) * gate.sigmoid()
    return out if local is None else out + silu(local)


def _forward(y: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, local: Tensor | None, eps: float) -> Any:
    from ndlightnet_kernels import gate as kernels

    return kernels.norm_gate(y, gate, weight, bias, local, eps)


def _fake(y: Tensor, *_: Any) -> Any:
    mean = y.new_empty(y.shape[:-1], dtype=torch.float32)
    return y.new_empty(y.shape), mean, torch.empty_like(mean)


def _gradients(
    dout: Tensor,
    y: Tensor,
    gate: Tensor,
    weight: Tensor,
    bias: Tensor,
    local: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
) -> Any:
    """Return gradients; that of local is empty where there is none."""
    from ndlightnet_kernels import gate as kernels

    *grads, dlocal = kernels.norm_gate_backward(dout, y, gate, weight, bias, local, mean, rstd)
    return *grads, y.new_empty(0) if dlocal is None else dlocal


def _gradients_fake(
    dout: Tensor, y: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, local: Tensor | None, *_: Tensor
) -> Any:
    grads = (x.new_empty(x.shape) for x in (y, gate, weight, bias))
    return *grads, y.new_empty(0) if local is None else local.new_empty(local.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:5], *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # else zeros are written as gradients of mean and rstd


def _backward(ctx: Any, dout: Tensor, *_: Tensor) -> Any:
    saved = ctx.saved_tensors  # read once: checkpointing allows it a single time
    *grads, dlocal = _norm_gate_backward(dout, *saved)
    return *grads, None if saved[4] is None else dlocal, None


_norm_gate_backward = Operator(
    "norm_gate_backward(Tensor dout, Tensor y, Tensor gate, Tensor weight, Tensor bias, "
    "Tensor? local, Tensor mean, Tensor rstd) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _gradients,
    _gradients_fake,
)
_norm_gate = Operator(
    "norm_gate(Tensor y, Tensor gate, Tensor weight, Tensor bias, Tensor? local, float eps) "
    "-> (Tensor, Tensor, Tensor)",
    _forward,
    _fake,
    _save,
    _backward,
)
