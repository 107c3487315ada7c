"""Segmentation: network + Dice and cross-entropy + measures, pictures and a page of cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from monai.losses.dice import DiceCELoss
from torch import Tensor, nn

from ndlightnet.data.errors import DataError
from ndlightnet.data.volume_transforms import invert
from ndlightnet.data.volumes import load_case, save_labels
from ndlightnet.inference import predict_volume
from ndlightnet.training.casebook import save_case
from ndlightnet.training.casepage import write_page
from ndlightnet.training.cases import dice_of, measure_case, metrics_of, of_known, write_cases
from ndlightnet.training.report import write_json
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
        truths = batch["label"].as_tensor()[:, 0].long()
        for labels, truth in zip(logits.argmax(1), truths, strict=True):
            dice = dice_of(labels, truth, logits.shape[1])
            # a class in neither has no Dice; it must not make the mean of the others NaN
            self.val_dice += dice[dice.isfinite()].tolist()

    def on_validation_epoch_start(self) -> None:
        self.val_dice: list[float] = []

    def on_validation_epoch_end(self) -> None:
        mean = sum(self.val_dice) / max(1, len(self.val_dice))
        self.log("val_dice", mean, prog_bar=True, sync_dist=True)

    def on_test_epoch_start(self) -> None:
        self.tested: dict[str, list[dict[str, float]]] = {}

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
        case, data, names = batch["case"], batch["data"], self.data().labels
        truth = load_case(case)["label"]
        row = measure_case(labels, truth.as_tensor()[0], len(names), _spacing(truth))
        folder = self.out() / "test"
        save_labels(labels, case, folder / f"{case.name}.nii.gz")
        mean = of_known(np.mean, [measured["dice"] for measured in row])
        image, prepared_truth = (data[key].as_tensor()[0] for key in ("image", "label"))
        save_case(folder / f"{case.name}.png", f"{case.name}: mean Dice {mean:.3f}", image,
                  prepared_truth, prepared, _spacing(data["image"]), names)  # fmt: skip
        self.tested[case.name] = row

    def on_test_epoch_end(self) -> None:
        rows, names, out = self.gathered(self.tested), self.data().labels, self.out()
        metrics = metrics_of(rows, names)
        metrics["parameters"] = sum(p.numel() for p in self.net.parameters())
        self.log("test_dice", metrics["mean_dice"], rank_zero_only=True)
        if not self.trainer.is_global_zero:
            return
        write_json(out / "metrics.json", metrics)
        write_cases(out / "test" / "cases.csv", rows, names)
        dice = f"held-out mean Dice {metrics['mean_dice']:.3f} over {len(rows)} cases"
        write_page(out / "test" / "index.html", rows, names, "Held-out cases", dice)
        self.summary = f"{dice}; see {out / 'test' / 'index.html'}"

    def predict_step(self, batch: dict[str, Any], _: int) -> None:
        case = batch["case"]
        try:
            if "error" in batch:
                raise DataError(batch["error"])
            labels, prepared = self._predict(batch)
            save_labels(labels, case, self.out() / "predictions" / f"{case.name}.nii.gz")
            image, names = batch["data"]["image"], self.data().labels
            path = self.out() / "predictions" / f"{case.name}.png"
            shown = image.as_tensor()[0]
            save_case(path, case.name, shown, None, prepared, _spacing(image), names)
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


def _spacing(volume: Any) -> list[float]:
    """mm along each axis of a MetaTensor."""
    return [float(s) for s in np.linalg.norm(volume.affine.numpy()[:3, :3], axis=0)]
