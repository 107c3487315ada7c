"""The optimizer and the schedule that all tasks share."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from ndlightnet.data.errors import DataError
from ndlightnet.nn.block import undecayed_names

Schedule = Literal["cosine", "inverse_sqrt", "constant_decay"]
TICKS = 10_000  # steps that a schedule by the clock counts
DECAY = 0.2  # of the steps of a constant schedule, over which the rate falls at the end
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


def schedule_factor(
    step: int, total: int, schedule: Schedule = "cosine", warmup: int | None = None, end: float = 0.01
) -> float:
    """Return the learning rate of a step as a fraction of the highest. It rises linearly over the first `warmup` steps
    (default: 5 %). Then it falls on a cosine to the fraction `end` ("cosine"), as 1 / sqrt(step) ("inverse_sqrt"), or
    stays and falls linearly to `end` over the last fifth of the steps ("constant_decay")."""
    warmup = max(1, total // 20 if warmup is None else warmup)
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "inverse_sqrt":
        return math.sqrt(warmup / (step + 1))
    begin = warmup if schedule == "cosine" else max(warmup, round(total * (1 - DECAY)))
    done = min(1.0, max(0.0, (step - begin) / max(1, total - begin)))
    return end + (1 - end) * (0.5 * (1 + math.cos(math.pi * done)) if schedule == "cosine" else 1 - done)


def adamw(task: Any, net: nn.Module) -> dict[str, Any]:
    """Return AdamW and the schedule of `schedule_factor` for a Task, which has the options, and its network.

    torch's CosineAnnealingLR is not used: its checkpoint holds the number of steps. A training that
    is resumed for more steps would reach its lowest rate at the old end, and rise again after it.
    """
    groups = decayed_groups(net, task.weight_decay)
    if task.layer_decay is not None:
        groups = layered_groups(groups, net, task.lr, task.layer_decay)
    # fused: one launch, not a dozen from Python
    optimizer = torch.optim.AdamW(groups, lr=task.lr, betas=task.betas, fused=True)
    # Lightning clips gradients of 16-mixed after GradScaler has unscaled them, and refuses optimizers that do it
    optimizer._step_supports_amp_scaling = False
    timer = task.timer
    total = int(task.trainer.estimated_stepping_batches) if timer is None else TICKS
    warmup = None
    if task.warmup_epochs is not None:
        steps = task.trainer.num_training_batches / task.trainer.accumulate_grad_batches
        warmup = round(task.warmup_epochs * steps)
    end = 0.01 if task.min_lr is None else task.min_lr / task.lr
    factor = partial(schedule_factor, total=total, schedule=task.schedule, warmup=warmup, end=end)

    factors: dict[int, float] = {}

    def rate_by_clock(step: int) -> float:
        if step not in factors:  # the clock of the first process is read once for all groups
            factors.clear()
            used = task.trainer.strategy.broadcast(timer.time_elapsed() / (60 * task.minutes))
            factors[step] = factor(int(TICKS * used))
        return factors[step]

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor if timer is None else rate_by_clock)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
