"""Segmentation: network + Dice and cross-entropy + Dice and Hausdorff distance + pictures."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from monai.losses.dice import DiceCELoss
from monai.metrics.hausdorff_distance import compute_hausdorff_distance
from monai.metrics.meandice import compute_dice
from monai.networks.utils import one_hot
from torch import Tensor, nn

from ndlightnet.data.errors import DataError
from ndlightnet.data.volume_transforms import invert
from ndlightnet.data.volumes import load_case, save_labels
from ndlightnet.inference import predict_volume
from ndlightnet.training.report import Panel, save_panels, write_json
from ndlightnet.training.task import Task


class SegmentationTask(Task):
    """Trains `net`, `(batch, channels, *space)` -> `(batch, classes, *space)` logits.

    Args:
        net: the network.
        window: shape of the windows at prediction; None: each volume in one forward.
        lr, weight_decay: of AdamW, with warm-up and a cosine.
    """

    monitor = "val_dice"  # chooses the best checkpoint

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

    def setup(self, stage: str) -> None:
        if stage == "predict":
            return
        outputs = getattr(self.net, "out_channels", None)
        if outputs not in (None, len(self.data().labels)):
            raise DataError(
                f"{self.data().root}: {len(self.data().labels)} labels, but the network has "
                f"out_channels={outputs}"
            )
        inputs, channels = getattr(self.net, "in_channels", None), len(self.data().modalities)
        if inputs not in (None, channels):
            raise DataError(
                f"{self.data().root}: {channels} channels, but the network has in_channels={inputs}"
            )

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        loss: Tensor = self.loss(self.net(batch["image"]).float(), batch["label"])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Any], _: int) -> None:
        logits = predict_volume(self.net, batch["image"].as_tensor(), self.window)
        dice = dice_of(logits.argmax(1), batch["label"].as_tensor()[:, 0].long(), logits.shape[1])
        # a case without foreground has no Dice; it must not make the mean of the others NaN
        self.val_dice += dice[dice.isfinite()].tolist()

    def on_validation_epoch_start(self) -> None:
        self.val_dice: list[float] = []

    def on_validation_epoch_end(self) -> None:
        mean = sum(self.val_dice) / max(1, len(self.val_dice))
        self.log("val_dice", mean, prog_bar=True, sync_dist=True)

    def on_test_epoch_start(self) -> None:
        self.tested: dict[str, tuple[dict[str, Any], float, Panel]] = {}

    def _predict(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Labels (x, y, z) on the file's grid, and on the prepared one."""
        image = batch["data"]["image"]
        logits = predict_volume(self.net, image.as_tensor()[None].to(self.device), self.window)[0]
        labels = invert(logits.cpu(), batch["data"]).argmax(0)
        return labels, logits.argmax(0).cpu()

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Volumes with their geometry stay on the host; `_predict` moves the voxels."""
        if isinstance(batch, dict) and "case" in batch:
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def test_step(self, batch: dict[str, Any], _: int) -> None:
        if "error" in batch:
            raise DataError(batch["error"])
        labels, prepared = self._predict(batch)
        case = batch["case"]
        truth = load_case(case)["label"]
        classes = len(self.data().labels)
        spacing = np.linalg.norm(truth.affine.numpy()[:3, :3], axis=0)
        truth = truth.as_tensor()[0].long()
        dice = dice_of(labels[None], truth[None], classes)[0]
        distance = hausdorff95(labels[None], truth[None], classes, spacing)[0]
        row = {"name": case.name, "dice": dice.tolist(), "hd95_mm": distance.tolist()}
        save_labels(labels, case, self.out() / "test" / f"{case.name}.nii.gz")
        mean = float(dice.nanmean())
        data = batch["data"]
        panel = Panel(
            f"{case.name}: Dice {mean:.3f}", data["image"].as_tensor()[0],
            data["label"].as_tensor()[0], prepared,
        )  # fmt: skip
        self.tested[case.name] = (row, mean, panel)

    def on_test_epoch_end(self) -> None:
        tested, names = list(self.gathered(self.tested).values()), self.data().labels
        rows = [row for row, _, _ in tested]
        table = {key: np.array([row[key] for row in rows]) for key in ("dice", "hd95_mm")}
        # a class that one of truth and prediction lacks has no distance: left out and counted
        table["hd95_mm"][~np.isfinite(table["hd95_mm"])] = np.nan
        means = {key: _column_means(values) for key, values in table.items()}
        mean_dice = float(np.nanmean(means["dice"]))
        spread = float(np.nanstd([np.nanmean(row) for row in table["dice"]]))
        metrics = {
            "mean_dice": mean_dice,
            "std_over_cases": spread,
            "mean_hd95_mm": float(np.nanmean(means["hd95_mm"])),
            "dice": dict(zip(names[1:], means["dice"], strict=True)),
            "hd95_mm": dict(zip(names[1:], means["hd95_mm"], strict=True)),
            "hd95_missing": int(np.isnan(table["hd95_mm"]).sum()),
            "parameters": sum(p.numel() for p in self.net.parameters()),
            "cases": rows,
        }
        self.log("test_dice", mean_dice, rank_zero_only=True)
        if not self.trainer.is_global_zero:
            return
        write_json(self.out() / "metrics.json", metrics)
        ranked = [panel for _, _, panel in sorted(tested, key=lambda item: item[1])]
        middle = sorted({0, len(ranked) // 2, len(ranked) - 1})
        save_panels(self.out() / "test_cases.png", [ranked[i] for i in middle], names)
        self.summary = (
            f"held-out mean Dice {mean_dice:.3f} over {len(rows)} cases; see {self.out()}"
        )

    def predict_step(self, batch: dict[str, Any], _: int) -> None:
        case = batch["case"]
        try:
            if "error" in batch:
                raise DataError(batch["error"])
            labels, prepared = self._predict(batch)
            save_labels(labels, case, self.out() / "predictions" / f"{case.name}.nii.gz")
            panel = Panel(case.name, batch["data"]["image"].as_tensor()[0], None, prepared)
            save_panels(
                self.out() / "predictions" / f"{case.name}.png", [panel], self.data().labels
            )
        except DataError as error:
            self.failures.append(str(error))
        except torch.OutOfMemoryError:
            self.failures.append(
                f"{case.images[0]}: does not fit into the device's memory as a whole; "
                "give --model.window, such as the training patch"
            )

    def on_predict_end(self) -> None:
        self.failures = list(self.gathered({line: line for line in self.failures}))
        self.summary = f"predictions are in {self.out() / 'predictions'}"


def dice_of(labels: Tensor, truth: Tensor, classes: int) -> Tensor:
    """Dice per case and foreground class, (batch, classes - 1); NaN where the truth has none."""
    a, b = (one_hot(x[:, None], classes, dim=1) for x in (labels, truth))
    out: Tensor = compute_dice(a, b, include_background=False)
    return out


def hausdorff95(labels: Tensor, truth: Tensor, classes: int, spacing: Any) -> Tensor:
    """95 % Hausdorff distance in the unit of `spacing`, (batch, classes - 1)."""
    a, b = (one_hot(x[:, None], classes, dim=1) for x in (labels, truth))
    return compute_hausdorff_distance(a, b, percentile=95, spacing=[float(s) for s in spacing])


def _column_means(values: Any) -> list[float]:
    return [float(np.nanmean(c)) if np.isfinite(c).any() else math.nan for c in values.T]
