"""What follows the read of a LightNet layer: a normed output under a sigmoid gate."""

from __future__ import annotations

import torch
from torch import Tensor

from ndlightnet.ops import _registry, _triton_layers
from ndlightnet.ops._registry import Impl


def norm_gate(
    y: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6, impl: Impl = "auto"
) -> Tensor:
    """LayerNorm(y) * weight + bias, times sigmoid(gate). y, gate: (..., dim); weight, bias: (dim,).

    Statistics in float32. By Triton the result has y's dtype, by torch that of its layer_norm
    (float32 under autocast).
    """
    if y.shape != gate.shape:
        raise ValueError(f"gate {tuple(gate.shape)}: expected the shape of y, {tuple(y.shape)}")
    if _registry.choose(impl, "norm_gate", y) == "triton":
        out: Tensor = _triton_layers.triton_norm_gate(y, gate, weight, bias, eps)[0]
        return out
    return torch.nn.functional.layer_norm(y, y.shape[-1:], weight, bias, eps) * gate.sigmoid()
