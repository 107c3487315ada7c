"""Average of the weights that validation, checkpoints, tests and predictions use."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn


class AveragedWeights(WeightAveraging):
    """Exponential average of the weights: a step's weights count 1 - `decay`. All weights are
    averaged at once, where Lightning's EMAWeightAveraging averages one tensor after the other.

    warmup: the decay of step n is at most (1 + n) / (10 + n), for short trainings: otherwise the
    initial weights count for about 1 / (1 - decay) steps.

    The weights that are not averaged are loaded only to resume a training. Lightning also loads
    them for a test by the trainer that trained, and the test would measure them.
    """

    def __init__(self, decay: float = 0.999, warmup: bool = False) -> None:
        def average(averages: list[Tensor], weights: list[Tensor], number: Any) -> None:
            n = int(number)  # how often it was averaged
            get_ema_multi_avg_fn(min(decay, (1 + n) / (10 + n)))(averages, weights, number)

        super().__init__(multi_avg_fn=average if warmup else get_ema_multi_avg_fn(decay))

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
