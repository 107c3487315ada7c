"""Average of the weights that validation, checkpoints, tests and predictions use."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class AveragedWeights(WeightAveraging):
    """Exponential average of the weights: a step's weights count 1 - `decay`. All weights are
    averaged at once, where Lightning's EMAWeightAveraging averages one tensor after the other.

    warmup: begin with a lower decay, after n steps 1 - (1 + n)^(-2/3) as timm does, so that a short
    training forgets its first weights.

    The weights that are not averaged are loaded only to resume a training. Lightning also loads
    them for a test by the trainer that trained, and the test would measure them.
    """

    def __init__(self, decay: float = 0.999, warmup: bool = False) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"decay={decay}: expected a fraction from 0 to 1")
        super().__init__(multi_avg_fn=self._average)
        self.decay, self.warmup, self.step = decay, warmup, 0

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is None:
            return False
        self.step = step_idx  # on the host: the average's own count is on the device
        return True

    def decay_of(self, step: int) -> float:
        """Return the decay of a step, counted from 0."""
        return min(self.decay, 1 - (1 + step) ** (-2 / 3)) if self.warmup else self.decay

    def _average(self, *tensors: Any) -> None:
        get_ema_multi_avg_fn(self.decay_of(self.step))(*tensors)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
