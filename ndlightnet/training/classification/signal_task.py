"""Classification of signals of different lengths, in batches with and without padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ndlightnet.layout import Packed
from ndlightnet.training.classification.classification_task import ClassificationTask


class SignalTask(ClassificationTask):
    """Trains `net`, packed or padded signals -> `(batch, classes)` logits, and measures it.

    Args: as in ClassificationTask.
    """

    saved = (*ClassificationTask.saved, "slots")
    samples = "recordings"
    tokens, slots = 0, 0  # over all training steps; `slots` with padding

    def setup(self, stage: str) -> None:
        data = self.data()
        self.expect(in_chans=data.channels, num_classes=len(data.classes))

    def on_train_batch_start(self, batch: tuple[Any, ...], _: int) -> None:
        if isinstance(batch[0], Packed):
            tokens = slots = batch[0].layout.length
        else:
            mask: Tensor = self.net.token_mask(batch[1])  # type: ignore[operator]
            tokens, slots = int(mask.sum()), mask.numel()
        self.tokens, self.slots = self.tokens + tokens, self.slots + slots

    def more_metrics(self, probabilities: Tensor, labels: Tensor) -> dict[str, Any]:
        padded = 1 - self.tokens / self.slots if self.slots else None
        return {**super().more_metrics(probabilities, labels), "padded_share": padded}

    def sample(self, number: int) -> tuple[Tensor, Tensor]:
        signal = self.data().test_set[number][0]
        low, high = signal.min(), signal.max()
        return signal, ((signal - low) / (high - low).clamp(min=1e-9) * 255).to(torch.uint8)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["slots"] = [self.tokens, self.slots]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.tokens, self.slots = checkpoint["slots"]
