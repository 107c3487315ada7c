"""The average of the weights, step by step."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn

from ndlightnet.training import AveragedWeights


@pytest.mark.parametrize("warmup", [False, True])
def test_the_decay_begins_low_with_a_warmup_only(warmup):
    """Weights 1, 2, 3, ... after the first update, which copies."""
    callback, net = AveragedWeights(0.5, warmup=warmup), L.LightningModule()
    net.weight = nn.Parameter(torch.zeros(()))
    callback.setup(SimpleNamespace(), net, "fit")
    expected = 0.0
    for n in range(20):
        nn.init.constant_(net.weight, n + 1.0)
        step = SimpleNamespace(global_step=n + 1)
        callback.on_train_batch_end(step, net, None, None, n)
        decay = min(0.5, (1 + n) / (10 + n)) if warmup else 0.5
        expected = n + 1.0 if n == 0 else decay * expected + (1 - decay) * (n + 1)
        found = callback._average_model.module.weight.item()
        assert found == pytest.approx(expected)
