"""The optimizer and the schedule that all tasks share."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import torch
from torch import nn

from ndlightnet.data.errors import DataError
from ndlightnet.nn.block import undecayed_names

BEFORE = 99999.0  # timm's mark of parameters that belong to the layer before


def decayed_groups(net: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups: weight decay for matrices and filters only; not for norms, biases
    and the parameters of `undecayed_names`, such as decays and position codes."""
    undecayed = undecayed_names(net)
    plain = {id(p) for name, p in net.named_parameters() if p.ndim < 2 or name in undecayed}
    parameters = [p for p in net.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if id(p) not in plain], "weight_decay": weight_decay},
        {"params": [p for p in parameters if id(p) in plain], "weight_decay": 0.0},
    ]


def layer_numbers(net: nn.Module) -> dict[str, int]:
    """Return the layer of each parameter, from 0 for the embedding to the head, by the patterns of
    the network's `group_matcher`, as timm reads them. DataError for a network without one."""
    matcher: Any = getattr(net, "group_matcher", None)
    if matcher is None:
        raise DataError(
            f"model.layer_decay: {type(net).__name__} does not tell its layers, expected null or "
            "a network with a method group_matcher, such as NDLightNet or those of timm"
        )
    rules = [
        (pattern, float(number), last or ())
        for number, rule in enumerate(matcher(coarse=False).values())
        for pattern, last in ([(rule, None)] if isinstance(rule, str) else rule or [])
    ]

    def place(name: str) -> tuple[float, ...]:
        for pattern, number, last in rules:
            if match := re.match(pattern, name):
                return (number, *(float(n) for n in match.groups() if n is not None), *last)
        return (math.inf,)  # such as the head

    places = {name: place(name) for name, _ in net.named_parameters()}
    numbers: dict[tuple[float, ...], int] = {}
    for key in sorted({*places.values()}):
        last = max(numbers.values(), default=-1)
        numbers[key] = last if numbers and key[-1] == BEFORE else last + 1
    return {name: numbers[key] for name, key in places.items()}


def layered_groups(groups: list[dict[str, Any]], net: nn.Module, lr: float, layer_decay: float) -> list[dict[str, Any]]:
    """Split parameter groups by layer: the rate of the last layer is `lr`, that of the one before
    `layer_decay` times as high, and so on."""
    layers = layer_numbers(net)
    of = {id(parameter): layers[name] for name, parameter in net.named_parameters()}
    most = max(layers.values())
    return [
        {**group, "params": members, "lr": lr * layer_decay ** (most - layer)}
        for group in groups
        for layer in range(most + 1)
        if (members := [p for p in group["params"] if of[id(p)] == layer])
    ]


def warm_cosine(step: int, total: int, warmup: int | None = None, end: float = 0.01) -> float:
    """Return the learning rate of a step as a fraction of the highest: it rises linearly over the
    first `warmup` steps (default: 5 %), then falls on a cosine to the fraction `end`."""
    warmup = max(1, total // 20 if warmup is None else warmup)
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * done))


def adamw_with_cosine(task: Any, net: nn.Module) -> dict[str, Any]:
    """Return AdamW and the schedule of `warm_cosine` for a Task, which has the options, and its network.

    torch's CosineAnnealingLR is not used: its checkpoint holds the number of steps. A training that
    is resumed for more steps would reach its lowest rate at the old end, and rise again after it.
    """
    groups = decayed_groups(net, task.weight_decay)
    if task.layer_decay is not None:
        groups = layered_groups(groups, net, task.lr, task.layer_decay)
    optimizer = torch.optim.AdamW(groups, lr=task.lr, fused=True)  # one launch, not a dozen from Python
    # Lightning clips gradients of 16-mixed after GradScaler has unscaled them, and refuses optimizers that do it
    optimizer._step_supports_amp_scaling = False
    total, warmup = int(task.trainer.estimated_stepping_batches), None
    if task.warmup_epochs is not None:
        steps = task.trainer.num_training_batches / task.trainer.accumulate_grad_batches
        warmup = round(task.warmup_epochs * steps)
    end = 0.01 if task.min_lr is None else task.min_lr / task.lr
    rate = partial(warm_cosine, total=total, warmup=warmup, end=end)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
