"""The average of the weights: what a step counts, from the first one on."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn

from ndlightnet.training import AveragedWeights


def average_of(averaged: AveragedWeights, values: list[float]) -> float:
    """The average after steps whose weights have these values."""
    net = L.LightningModule()
    net.weight = nn.Parameter(torch.zeros(1))
    averaged.setup(SimpleNamespace(), net, "fit")
    for step, value in enumerate(values):
        nn.init.constant_(net.weight, value)
        averaged.on_train_batch_end(SimpleNamespace(global_step=step + 1), net, None, None, step)
    return averaged._average_model.module.weight.item()


def test_a_step_counts_what_is_left():
    assert average_of(AveragedWeights(0.75), [1.0, 2.0, 4.0]) == pytest.approx(0.75 * (0.75 * 1 + 0.25 * 2) + 0.25 * 4)


def test_with_a_warmup_the_first_steps_are_soon_forgotten():
    averaged = AveragedWeights(0.75, warmup=True)
    decays = [averaged.decay_of(step) for step in range(1, 20)]
    assert decays[0] == pytest.approx(1 - 2 ** (-2 / 3)) and decays[-1] == 0.75
    assert decays == sorted(decays)
    found, expected = average_of(averaged, [1.0, 2.0, 4.0]), 1.0
    for decay, value in zip(decays, (2.0, 4.0), strict=False):
        expected = decay * expected + (1 - decay) * value
    assert found == pytest.approx(expected) and found > average_of(AveragedWeights(0.75), [1, 2, 4])


def test_it_is_updated_after_steps_only():
    averaged = AveragedWeights()
    assert averaged.should_update(step_idx=3) and not averaged.should_update(epoch_idx=3)
    with pytest.raises(ValueError, match="decay=2: expected a fraction"):
        AveragedWeights(2)
