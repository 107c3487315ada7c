"""The optimizer and the schedule that all tasks share."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import nn

from ndlightnet.nn.block import undecayed_names


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


def warm_cosine(step: int, total: int) -> float:
    """Return the learning rate of a step as a fraction of the highest: it rises linearly over the
    first 5 % of the steps, then falls on a cosine to 1 %."""
    warmup = max(1, total // 20)
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))


def adamw_with_cosine(
    task: L.LightningModule, net: nn.Module, lr: float, weight_decay: float
) -> Any:
    """Return AdamW and the schedule of `warm_cosine`.

    torch's CosineAnnealingLR is not used: its checkpoint holds the number of steps. A training that
    is resumed for more steps would reach its lowest rate at the old end, and rise again after it.
    """
    optimizer = torch.optim.AdamW(decayed_groups(net, weight_decay), lr=lr)
    total = int(task.trainer.estimated_stepping_batches)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(warm_cosine, total=total))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
