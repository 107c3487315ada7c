"""Several linear maps of the same tokens as one matrix product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def project(x: Tensor, *layers: nn.Linear) -> Sequence[Tensor]:
    """Map x (..., dim) by each layer to (..., out_features)."""
    if joins(x, *layers):
        widths = [layer.out_features for layer in layers]
        return joint_linear(x, *layers).split(widths, -1)
    return [layer(x) for layer in layers]


def joint_linear(x: Tensor, *layers: nn.Linear) -> Tensor:
    """Return the layers' maps of x, concatenated: (..., sum of their out_features)."""
    weight = torch.cat([layer.weight for layer in layers])
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    return nn.functional.linear(x, weight, torch.cat(biases) if biases else None)


def joins(x: Tensor, *layers: nn.Module) -> bool:
    """Return whether one joint product is best: on a GPU, in training. It reads x once and writes its gradient once,
    and this traffic bounds products of these sizes; without gradients, concatenating the weights costs as much as it
    saves. False for layers that are more than a weight and a bias (adapters, quantised or sharded weights, hooks)."""
    if not (x.is_cuda and torch.is_grad_enabled()):
        return False
    return all(map(_plain, layers)) and len({layer.bias is None for layer in layers}) == 1


def _plain(layer: nn.Module) -> bool:
    if type(layer) is not nn.Linear or type(layer.weight) not in (nn.Parameter, Tensor):
        return False
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks
    return not any(hooks) and not layer._backward_pre_hooks
