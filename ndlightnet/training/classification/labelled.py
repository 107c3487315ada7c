"""What tasks share that name the class of a sample, whatever a sample is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet.training.core.measures import MeasuredTask


class LabelledTask(MeasuredTask):
    """Trains `net`, inputs -> `(batch, classes)` logits, and measures what its steps cost. Batches
    are `(*inputs, labels, numbers)`; the number of a sample tells it from the others.

    Args:
        net: the network.
        lr, weight_decay: of AdamW, with warm-up and a cosine.
        label_smoothing: of the cross-entropy.
    """

    monitor = "val_accuracy"

    def __init__(
        self,
        net: nn.Module,
        lr: float = 1e-3,
        weight_decay: float = 0.05,
        label_smoothing: float = 0.1,
    ) -> None:
        super().__init__()
        self.net, self.lr, self.weight_decay = net, lr, weight_decay
        self.loss = nn.CrossEntropyLoss(label_smoothing=label_smoothing)

    def training_step(self, batch: tuple[Any, ...], _: int) -> Tensor:
        *inputs, labels, _numbers = batch
        loss: Tensor = self.loss(self.net(*inputs).float(), labels)
        self.log("loss", loss, prog_bar=True, batch_size=len(labels))
        return loss

    def probabilities(self, *inputs: Any) -> Tensor:
        """(batch, classes) float32, as validation, test and prediction ask for them."""
        found: Tensor = self.net(*inputs).float().softmax(-1)
        return found

    def validation_step(self, batch: tuple[Any, ...], _: int) -> None:
        *inputs, labels, _numbers = batch
        right = (self.probabilities(*inputs).argmax(-1) == labels).float().mean()
        self.log("val_accuracy", right, prog_bar=True, batch_size=len(labels), sync_dist=True)

    def on_test_epoch_start(self) -> None:
        self.seen: dict[int, tuple[Tensor, int]] = {}  # probabilities and label of each sample

    def test_step(self, batch: tuple[Any, ...], _: int) -> None:
        *inputs, labels, numbers = batch
        answers = self.probabilities(*inputs).cpu()
        pairs = zip(answers, labels.tolist(), strict=True)
        self.seen |= dict(zip(numbers.tolist(), pairs, strict=True))

    def answers(self) -> tuple[list[int], Tensor, Tensor]:
        """Of the samples tested on all devices: numbers, probabilities (samples, classes), labels
        (samples,)."""
        seen = self.gathered(self.seen)
        probabilities = torch.stack([answer for answer, _ in seen.values()])
        return list(seen), probabilities, torch.tensor([label for _, label in seen.values()])
