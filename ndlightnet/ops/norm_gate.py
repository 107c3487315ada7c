"""Output stage of a LightNet layer: a normed output times a sigmoid gate, and a local branch; and the output map."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, silu

from ndlightnet.ops._operator import Gradient, Operator, kernel, weight_gradient
from ndlightnet.ops.dispatch import Impl, resolve
from ndlightnet.ops.dtypes import product_dtype

MOST_ROW = 4096  # channels of a token


def norm_gate(
    y: Tensor,
    gate: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-6,
    impl: Impl = "auto",
    local: Tensor | None = None,
    up: Tensor | None = None,
    proj: Tensor | None = None,
) -> Tensor:
    """Return (LayerNorm(y) * weight + bias) * sigmoid(gate), plus SiLU(local) if there is one, mapped by `proj`.

    y, gate, local: (..., dim); weight, bias: (dim,); proj: (out, dim). up: (dim, rank), a map of a gate (..., rank).
    Statistics are float32 or wider. With Triton the backward computes again what these maps give and take. The result
    has the dtype of products (16 bits under autocast); without `proj` that of y, with torch that of its layer_norm
    (float32 under autocast).
    """
    mapped = ("gate", gate.shape) if up is None else ("gate mapped by up", (*gate.shape[:-1], up.shape[0]))
    for name, shape in (mapped, ("local", y.shape if local is None else local.shape)):
        if shape != y.shape:
            raise ValueError(f"{name} {tuple(shape)}: expected the shape of y, {tuple(y.shape)}")
    if resolve("norm_gate", impl, y) == "triton":
        dtype = product_dtype(y) if proj is not None else y.dtype
        up, proj = (None if x is None else x.to(dtype) for x in (up, proj))
        gate = gate if up is None else gate.to(dtype)
        out: Tensor = _norm_gate(y.to(dtype), gate, weight, bias, local, up, proj, eps)[0]
        return out
    gate = gate if up is None else linear(gate, up)
    out = layer_norm(y, y.shape[-1:], weight, bias, eps) * gate.sigmoid()
    out = out if local is None else out + silu(local)
    return out if proj is None else linear(out, proj)


def forward(
    y: Tensor,
    gate: Tensor,
    weight: Tensor,
    bias: Tensor,
    local: Tensor | None,
    up: Tensor | None,
    proj: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    out, mean, rstd = _kernel(y, gate if up is None else linear(gate, up), weight, bias, local, eps)
    return out if proj is None else linear(out, proj), mean, rstd


def backward(
    dout: Tensor,
    y: Tensor,
    gate: Tensor,
    weight: Tensor,
    bias: Tensor,
    local: Tensor | None,
    up: Tensor | None,
    proj: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    needs_proj: bool,
    into: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients. into: where that of a gate that is mapped is written, rows at one distance."""
    logits, again = gate if up is None else linear(gate, up), needs_proj and proj is not None
    d = dout if proj is None else dout @ proj
    dy, dgate, *grads, out = _kernel_backward(d, y, logits, weight, bias, local, mean, rstd, again)
    dproj = weight_gradient(dout, out) if again else None
    if up is None:
        return dy, dgate, *grads, None, dproj
    rows = dgate.flatten(0, -2)
    low = (rows @ up).view(gate.shape) if into is None else torch.mm(rows, up, out=into.flatten(0, -2))
    return dy, low, *grads, weight_gradient(dgate, gate), dproj


def _fake(y: Tensor, gate: Any, weight: Any, bias: Any, local: Any, up: Any, proj: Any, _: float) -> Any:
    mean = y.new_empty(y.shape[:-1], dtype=torch.float32)
    out = y.new_empty(*y.shape[:-1], y.shape[-1] if proj is None else proj.shape[0])
    return out, mean, torch.empty_like(mean)


def flops(y: Any, gate: Any, up: Any, proj: Any, **_: Any) -> int:
    return 2 * math.prod(y) * ((0 if up is None else up[1]) + (0 if proj is None else proj[0]))


def _limits(y: Tensor, *_: Any, **__: Any) -> str:
    return f"{y.shape[-1]} channels: expected {MOST_ROW} or fewer" if y.shape[-1] > MOST_ROW else ""


INPUTS = "Tensor y, Tensor gate, Tensor weight, Tensor bias, Tensor? local, Tensor? up, Tensor? proj"
_kernel, _kernel_backward = kernel("gate", "norm_gate"), kernel("gate", "norm_gate_backward")
_norm_gate = Operator(
    f"norm_gate({INPUTS}, float eps) -> (Tensor out, Tensor mean, Tensor rstd)",
    forward,
    _fake,
    Gradient(
        f"norm_gate_backward(Tensor dout, {INPUTS}, Tensor mean, Tensor rstd, bool needs_proj) "
        "-> (Tensor dy, Tensor dgate, Tensor dweight, Tensor dbias, Tensor dlocal, Tensor dup, Tensor dproj)",
        backward,
    ),
    flops=flops,
    implementations=("torch", "triton", "reference"),  # the torch form is the specification
    limits=_limits,
)
