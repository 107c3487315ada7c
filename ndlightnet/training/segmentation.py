"""Segmentation: network + Dice and cross-entropy, and what tests and predictions leave."""

from __future__ import annotations

import time
from typing import Any

import torch
from monai.losses.dice import DiceCELoss
from monai.metrics.meandice import compute_dice
from monai.networks.utils import one_hot
from torch import Tensor, nn

from ndlightnet.data.crops import generator_of
from ndlightnet.data.errors import DataError
from ndlightnet.inference import predict_volume
from ndlightnet.training.task import Task

MEMORY = (
    0.8  # of the Dice of earlier looks at the held-out cases, when the best checkpoint is chosen
)


class SegmentationTask(Task):
    """Trains `net`, `(batch, channels, *space)` -> `(batch, classes, *space)` logits, or in
    training a list of them on coarser and coarser grids (deep supervision: each counts half of the
    one before).

    Args:
        net: the network.
        window: shape of the windows at prediction; None: each volume in one forward.
        lr, weight_decay: of AdamW, with warm-up and a cosine.
    """

    monitor = "ema_dice"  # chooses the best checkpoint

    def __init__(
        self,
        net: nn.Module,
        window: list[int] | None = None,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__()
        self.net, self.window, self.lr, self.weight_decay = net, window, lr, weight_decay
        self.loss = DiceCELoss(include_background=False, to_onehot_y=True, softmax=True, batch=True)
        self.ema_dice: float | None = None

    def setup(self, stage: str) -> None:
        if stage == "predict":
            return
        outputs = getattr(self.net, "out_channels", None)
        if outputs not in (None, len(self.data().labels)):
            raise DataError(
                f"{self.data().root}: {len(self.data().labels)} labels, but the network has "
                f"out_channels={outputs}"
            )
        inputs, channels = getattr(self.net, "in_channels", None), self.data().in_channels
        if inputs not in (None, channels):
            raise DataError(
                f"{self.data().root}: {channels} channels, but the network has in_channels={inputs}"
            )

    def on_train_epoch_start(self) -> None:
        # so that a resumed training draws what an uninterrupted one does
        seed = generator_of(self.data().crops.seed, -self.current_epoch - 1).initial_seed()
        torch.manual_seed(seed)
        self.started, self.waited = time.perf_counter(), self._waited()

    def on_train_epoch_end(self) -> None:
        waited = self._waited() - self.waited
        self.log("waiting", waited / (time.perf_counter() - self.started), sync_dist=True)

    def _waited(self) -> float:
        loader: Any = self.trainer.train_dataloader
        return float(loader.waited)

    def training_step(self, batch: tuple[Tensor, ...], _: int) -> Tensor:
        image, label, _numbers = batch
        outputs = self.net(image)
        outputs = [outputs] if isinstance(outputs, Tensor) else outputs
        weights = [2.0**-place for place in range(len(outputs))]
        loss = sum(
            weight / sum(weights) * self.loss(logits.float(), _shrunk(label, logits.shape[2:]))
            for weight, logits in zip(weights, outputs, strict=True)
        )
        self.log("loss", loss, prog_bar=True, batch_size=len(image))
        assert isinstance(loss, Tensor)
        return loss

    def validation_step(self, batch: dict[str, Any], _: int) -> None:
        image, label = (batch[key].as_tensor().to(self.device) for key in ("image", "label"))
        labels = predict_volume(self.net, image[None], self.window).argmax(1)
        dice = dice_of(labels, label.long(), len(self.data().labels))
        # a case without foreground has no Dice; it must not make the mean of the others NaN
        self.val_dice += dice[dice.isfinite()].tolist()

    def on_validation_epoch_start(self) -> None:
        self.val_dice: list[float] = []

    def on_validation_epoch_end(self) -> None:
        mean = sum(self.val_dice) / max(1, len(self.val_dice))
        self.log("val_dice", mean, prog_bar=True, sync_dist=True)
        if self.trainer.sanity_checking:
            return
        before = mean if self.ema_dice is None else self.ema_dice
        self.ema_dice = MEMORY * before + (1 - MEMORY) * mean
        self.log("ema_dice", self.ema_dice, sync_dist=True)


def _shrunk(label: Tensor, space: torch.Size) -> Tensor:
    """Labels (batch, 1, *space) on a coarser grid: those of the nearest voxels."""
    if label.shape[2:] == space:
        return label
    return nn.functional.interpolate(label.float(), tuple(space), mode="nearest-exact")


def dice_of(labels: Tensor, truth: Tensor, classes: int) -> Tensor:
    """Dice per case and foreground class, (batch, classes - 1); NaN where the truth has none."""
    a, b = (one_hot(x[:, None], classes, dim=1) for x in (labels, truth))
    out: Tensor = compute_dice(a, b, include_background=False)
    return out
