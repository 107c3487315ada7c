"""Outputs on coarser and coarser grids: each counts half of the one before it, and all add up to one."""

import pytest
import torch
from torch import nn

from ndlightnet.training import SegmentationTask


def loss_of(monkeypatch: pytest.MonkeyPatch, outputs: list[torch.Tensor] | torch.Tensor, label: torch.Tensor) -> float:
    task = SegmentationTask(nn.Identity())
    monkeypatch.setattr(task, "log", lambda *_, **__: None)
    monkeypatch.setattr(task.net, "forward", lambda image: outputs)
    return task.training_step((label, label, torch.zeros(2)), 0).item()


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_weights_of_the_levels(monkeypatch, levels):
    """All labels are alike, so that each grid has the same ones; the loss is that of the outputs alone."""
    label = torch.ones(2, 1, 8, 8, 8)
    outputs = [torch.randn(2, 3, *[8 >> level] * 3) for level in range(levels)]
    alone = [loss_of(monkeypatch, logits, label[..., : 8 >> n, : 8 >> n, : 8 >> n]) for n, logits in enumerate(outputs)]
    weights = {1: [1.0], 2: [2 / 3, 1 / 3], 3: [4 / 7, 2 / 7, 1 / 7]}[levels]
    expected = sum(weight * loss for weight, loss in zip(weights, alone, strict=True))
    assert len(set(alone)) == levels
    assert loss_of(monkeypatch, outputs, label) == pytest.approx(expected, rel=1e-5)
