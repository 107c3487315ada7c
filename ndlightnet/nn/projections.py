"""Several linear maps of the same tokens as one matrix product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def project(x: Tensor, *layers: nn.Linear) -> Sequence[Tensor]:
    """Each layer's map of x (..., dim) -> (..., its width)."""
    if joins(x, *layers):
        widths = [layer.out_features for layer in layers]
        return joint_linear(x, *layers).split(widths, -1)
    return [layer(x) for layer in layers]


def joint_linear(x: Tensor, *layers: nn.Linear) -> Tensor:
    """The layers' maps of x, end to end: (..., sum of their widths)."""
    weight = torch.cat([layer.weight for layer in layers])
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    return nn.functional.linear(x, weight, torch.cat(biases) if biases else None)


def joins(x: Tensor, *layers: nn.Module) -> bool:
    """Whether one product serves best: on a GPU, in training. It reads x once and writes its
    gradient once, which bound products of these sizes; without gradients, joining the weights costs
    as much. Not of layers that are more than a weight and a bias (adapters, quantised or sharded
    weights, hooks)."""
    if not (x.is_cuda and torch.is_grad_enabled()):
        return False
    return all(map(_plain, layers)) and len({layer.bias is None for layer in layers}) == 1


def _plain(layer: nn.Module) -> bool:
    if type(layer) is not nn.Linear or type(layer.weight) not in (nn.Parameter, Tensor):
        return False
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks
    return not any(hooks) and not layer._backward_pre_hooks
