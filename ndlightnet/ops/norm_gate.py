"""Output stage of a LightNet layer: a normed output times a sigmoid gate, and a local branch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, silu

from ndlightnet.ops._operator import Gradient, Operator, kernel
from ndlightnet.ops.dispatch import Impl, resolve

MOST_ROW = 4096  # channels of a token


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


def _fake(y: Tensor, *_: Any) -> Any:
    mean = y.new_empty(y.shape[:-1], dtype=torch.float32)
    return y.new_empty(y.shape), mean, torch.empty_like(mean)


def _limits(y: Tensor, *_: Any, **__: Any) -> str:
    return f"{y.shape[-1]} channels: expected {MOST_ROW} or fewer" if y.shape[-1] > MOST_ROW else ""


INPUTS = "Tensor y, Tensor gate, Tensor weight, Tensor bias, Tensor? local"
_norm_gate = Operator(
    f"norm_gate({INPUTS}, float eps) -> (Tensor out, Tensor mean, Tensor rstd)",
    kernel("gate", "norm_gate"),
    _fake,
    Gradient(
        f"norm_gate_backward(Tensor dout, {INPUTS}, Tensor mean, Tensor rstd) "
        "-> (Tensor dy, Tensor dgate, Tensor dweight, Tensor dbias, Tensor dlocal)",
        kernel("gate", "norm_gate_backward"),
    ),
    implementations=("torch", "triton", "reference"),  # the torch form is the specification
    limits=_limits,
)
