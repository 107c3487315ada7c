"""Output stage of a LightNet layer: a normalised output times a sigmoid gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ndlightnet.ops._operator import Operator
from ndlightnet.ops.dispatch import Impl, resolve


def norm_gate(
    y: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6, impl: Impl = "auto"
) -> Tensor:
    """Return (LayerNorm(y) * weight + bias) * sigmoid(gate).

    y, gate: (..., dim); weight, bias: (dim,). Statistics are float32 or wider. With Triton the
    result has y's dtype, with torch that of its layer_norm (float32 under autocast).
    """
    if y.shape != gate.shape:
        raise ValueError(f"gate {tuple(gate.shape)}: expected the shape of y, {tuple(y.shape)}")
    if resolve("norm_gate", impl, y) == "triton":
        out: Tensor = _norm_gate(y, gate, weight, bias, eps)[0]
        return out
    return torch.nn.functional.layer_norm(y, y.shape[-1:], weight, bias, eps) * gate.sigmoid()


def _forward(y: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Any:
    from ndlightnet_kernels import gate as kernels

    return kernels.norm_gate(y, gate, weight, bias, eps)


def _fake(y: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Any:
    mean = y.new_empty(y.shape[:-1], dtype=torch.float32)
    return y.new_empty(y.shape), mean, torch.empty_like(mean)


def _gradients(
    dout: Tensor, y: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> Any:
    from ndlightnet_kernels import gate as kernels

    return kernels.norm_gate_backward(dout, y, gate, weight, bias, mean, rstd)


def _gradients_fake(dout: Tensor, *inputs: Tensor) -> Any:
    return tuple(x.new_empty(x.shape) for x in inputs[:4])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:4], *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # else zeros are written as gradients of mean and rstd


def _backward(ctx: Any, dout: Tensor, *_: Tensor) -> Any:
    return *_norm_gate_backward(dout, *ctx.saved_tensors), None


_norm_gate_backward = Operator(
    "norm_gate_backward(Tensor dout, Tensor y, Tensor gate, Tensor weight, Tensor bias, "
    "Tensor mean, Tensor rstd) -> (Tensor, Tensor, Tensor, Tensor)",
    _gradients, _gradients_fake,
)  # fmt: skip
_norm_gate = Operator(
    "norm_gate(Tensor y, Tensor gate, Tensor weight, Tensor bias, float eps) "
    "-> (Tensor, Tensor, Tensor)",
    _forward, _fake, _save, _backward,
)  # fmt: skip
