"""Which of the two sets of weights in a checkpoint a training, and which a test loads."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from ndlightnet.training import AveragedWeights


@pytest.mark.parametrize(
    ("stage", "loaded"),
    [(TrainerFn.FITTING, 2.0), (TrainerFn.TESTING, 1.0), (TrainerFn.VALIDATING, 1.0), (TrainerFn.PREDICTING, 1.0)],
)
def test_only_a_training_goes_on_with_weights_that_are_not_averaged(stage, loaded):
    """Whether or not the trainer has trained before."""
    net = L.LightningModule()
    net.weight = nn.Parameter(torch.zeros(1))
    averaged = AveragedWeights(0.5)
    averaged.setup(SimpleNamespace(), net, "fit")
    checkpoint = {
        "state_dict": {"weight": torch.tensor([1.0])},
        "current_model_state": {"weight": torch.tensor([2.0])},
        "averaging_state": {"n_averaged": torch.tensor(3)},
    }
    net.load_state_dict(checkpoint["state_dict"])  # as Lightning does in every stage
    averaged.on_load_checkpoint(SimpleNamespace(state=SimpleNamespace(fn=stage)), net, checkpoint)
    assert net.weight == loaded
