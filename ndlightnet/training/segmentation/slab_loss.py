"""Losses of slabs of samples, for training on several processes that share each sample."""

from __future__ import annotations

import torch
from torch import Tensor

from ndlightnet.parallel import Shard

SMOOTH = 1e-5  # of MONAI's DiceCELoss


def dice_ce_of_slabs(logits: Tensor, label: Tensor, grid: Shard) -> Tensor:
    """Return MONAI's DiceCELoss(include_background=False, to_onehot_y=True, softmax=True, batch=True) of whole samples,
    the same on all processes.

    logits: (batch, classes, *space) float32, label: (batch, 1, *space), both of this process's slab.
    """
    classes, target = logits.shape[1], label[:, 0].long()
    logs = logits.log_softmax(1)
    errors = torch.nn.functional.nll_loss(logs, target, reduction="sum")
    probs = logs.exp().transpose(0, 1).flatten(1)
    truth = target.flatten()
    both = torch.stack([probs[c][truth == c].sum() for c in range(classes)])
    counts = torch.bincount(truth, minlength=classes).to(probs.dtype)
    cells = errors.new_tensor([float(truth.numel())])
    total = grid.total(torch.cat([both, probs.sum(1), counts, errors[None], cells]))
    both, predicted, counts, rest = total.split([classes, classes, classes, 2])
    dice = 1 - (2 * both + SMOOTH) / (predicted + counts + SMOOTH)
    return dice[1:].mean() + rest[0] / rest[1]
