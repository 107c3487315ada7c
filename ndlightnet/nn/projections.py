"""Several linear maps of the same tokens as one matrix product, of a norm of the residual stream too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet.layout.abstract import exporting
from ndlightnet.ops import add_norm
from ndlightnet.ops.recurrence.chunks import exact


def project(x: Tensor, *layers: nn.Linear) -> Sequence[Tensor]:
    """Map x (..., dim) by each layer to (..., out_features)."""
    if joins(x, *layers):
        return divided(joint_linear(x, *layers), *layers)
    return [layer(x) for layer in layers]


def divided(joint: Tensor, *layers: nn.Linear) -> Sequence[Tensor]:
    """Return views of each layer's part of a joint map."""
    return joint.split([layer.out_features for layer in layers], -1)


def joint_linear(x: Tensor, *layers: nn.Linear) -> Tensor:
    """Return the layers' maps of x, concatenated: (..., sum of their out_features)."""
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    return nn.functional.linear(x, joint_weight(*layers), torch.cat(biases) if biases else None)


def joint_weight(*layers: nn.Linear) -> Tensor:
    return torch.cat([layer.weight for layer in layers])


def residual_norm(x: Tensor, y: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the residual stream x + y, or x without y, and its norm: on a GPU of 16 bits under autocast."""
    if fuses(x, norm):
        return add_norm(x, y, *_parameters(norm))
    x = x if y is None else x + y
    return x, norm(x)


def exact_norm(x: Tensor, norm: nn.Module) -> Tensor:
    """Return the norm of x in the precision of x, also under autocast."""
    if not fuses(x, norm):
        out: Tensor = norm(x)
        return out
    with exact(x):
        return residual_norm(x, None, norm)[1]


def norm_linear(x: Tensor, y: Tensor | None, norm: nn.Module, *layers: nn.Linear) -> tuple[Tensor, Tensor]:
    """Return the residual stream and the joint map of its norm."""
    if fuses(x, norm) and layers[0].bias is None:
        return add_norm(x, y, *_parameters(norm), proj=joint_weight(*layers))
    x, normed = residual_norm(x, y, norm)
    return x, joint_linear(normed, *layers)


def fuses(x: Tensor, norm: Any) -> bool:
    """Return whether the residual add and a norm are one operator: on a GPU, of a LayerNorm of the last axis that has
    a weight, a bias and no hooks. Exported graphs keep operations that other programs know and compilers fuse."""
    if not x.is_cuda or exporting() or not _plain(norm, nn.LayerNorm):
        return False
    return norm.bias is not None and norm.weight.ndim == 1


def _parameters(norm: Any) -> tuple[Tensor, Tensor, float]:
    return norm.weight, norm.bias, norm.eps


def joins(x: Tensor, *layers: nn.Module) -> bool:
    """Return whether one joint product is best: on a GPU, in training. It reads x once and writes its gradient once,
    and this traffic bounds products of these sizes; without gradients, concatenating the weights costs as much as it
    saves. False for layers that are more than a weight and a bias (adapters, quantised or sharded weights, hooks)."""
    if not (x.is_cuda and torch.is_grad_enabled()):
        return False
    return all(_plain(layer, nn.Linear) for layer in layers) and len({layer.bias is None for layer in layers}) == 1


def _plain(layer: nn.Module, kind: type[nn.Module]) -> bool:
    if type(layer) is not kind or type(layer.weight) not in (nn.Parameter, Tensor):
        return False
    return not hooked(layer)


def hooked(layer: nn.Module) -> bool:
    """Return whether a call does more than the class's `forward`, whose weights may lie elsewhere until then."""
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    return any(hooks) or "forward" in vars(layer)  # that of accelerate's offloading
