"""The average of the weights: what a step counts, and which weights of a checkpoint are loaded."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from ndlightnet.training import AveragedWeights


def network(averaged: AveragedWeights) -> L.LightningModule:
    net = L.LightningModule()
    net.weight = nn.Parameter(torch.zeros(1))
    averaged.setup(SimpleNamespace(), net, "fit")
    return net


@pytest.mark.parametrize("warmup", [False, True])
def test_a_step_counts_what_the_decay_leaves(warmup):
    """With a warm-up the first steps are soon forgotten."""
    averaged, values = AveragedWeights(0.75, warmup=warmup), [1.0, 2.0, 4.0]
    decays = [averaged.decay_of(step) for step in range(1, 20)]
    assert decays[0] == pytest.approx(1 - 2 ** (-2 / 3) if warmup else 0.75) and decays[-1] == 0.75
    assert decays == sorted(decays)
    net, expected = network(averaged), values[0]
    for step, value in enumerate(values):
        nn.init.constant_(net.weight, value)
        averaged.on_train_batch_end(SimpleNamespace(global_step=step + 1), net, None, None, step)
        expected = value if step == 0 else decays[step - 1] * expected + (1 - decays[step - 1]) * value
    assert averaged._average_model.module.weight.item() == pytest.approx(expected)
    assert averaged.should_update(step_idx=3) and not averaged.should_update(epoch_idx=3)
    with pytest.raises(ValueError, match="decay=2: expected a fraction"):
        AveragedWeights(2)


@pytest.mark.parametrize("stage", [TrainerFn.FITTING, TrainerFn.TESTING, TrainerFn.VALIDATING, TrainerFn.PREDICTING])
def test_only_a_training_goes_on_with_weights_that_are_not_averaged(stage):
    """Whether or not the trainer has trained before."""
    averaged = AveragedWeights(0.5)
    net = network(averaged)
    checkpoint = {
        "state_dict": {"weight": torch.tensor([1.0])},
        "current_model_state": {"weight": torch.tensor([2.0])},
        "averaging_state": {"n_averaged": torch.tensor(3)},
    }
    net.load_state_dict(checkpoint["state_dict"])  # as Lightning does in every stage
    averaged.on_load_checkpoint(SimpleNamespace(state=SimpleNamespace(fn=stage)), net, checkpoint)
    assert net.weight == (2.0 if stage == TrainerFn.FITTING else 1.0)
