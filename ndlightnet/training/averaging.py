"""An average of the weights, which validation, checkpoints, tests and predictions use."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn


class AveragedWeights(EMAWeightAveraging):
    """Lightning's exponential average, which restores the weights in training only where training
    goes on. Lightning's also does so for a test by the trainer that trained, whose result would be
    that of the weights that were not averaged."""

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
