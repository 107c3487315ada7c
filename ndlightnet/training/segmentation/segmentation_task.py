"""Segmentation: a network with Dice and cross-entropy, and results of tests and predictions."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from monai.losses.dice import DiceCELoss
from torch import Tensor, nn

from ndlightnet.data.errors import DataError, one_line
from ndlightnet.data.volume.file_grid import Case
from ndlightnet.data.volume.volume import upright
from ndlightnet.inference import Ensemble, Mirrored, OutOfCore, keep_largest, predict_labels, predict_volume
from ndlightnet.parallel import split_sizes
from ndlightnet.training.core.checkpoints import check_checkpoint
from ndlightnet.training.core.costs import Cost, Meter, case_costs
from ndlightnet.training.core.options import check
from ndlightnet.training.core.task import Task
from ndlightnet.training.report.results import write_metrics
from ndlightnet.training.segmentation.case_figure import save_case
from ndlightnet.training.segmentation.case_page import write_page
from ndlightnet.training.segmentation.metrics import dice_of, measure_case, metrics_of, write_cases
from ndlightnet.training.segmentation.slab_loss import dice_ce_of_slabs

MEMORY = 0.8  # weight of earlier validations in the score that chooses the best checkpoint


class SegmentationTask(Task):
    """Trains `net`, `(batch, channels, *space)` -> `(batch, classes, *space)` logits, or in training a list of them on
    coarser and coarser grids (deep supervision: each counts half of the one before).

    Args:
        net: the network.
        window: shape of the windows at prediction, as `data.patch`; None: each volume, or series over time, in one
            forward.
        overlap: fraction of a window that the next one overlaps.
        mirror_axes: test and predict with the mean over mirrored copies along these axes, numbered as those of
            `data.patch`.
        largest: of each class, keep only the largest connected component; in a series over time cells of neighbouring
            frames are connected, too.
        ensemble: more checkpoints (folds); test and predict average the logits of all networks.
        dicom_seg: predict writes DICOM-SEG, too, where the source is DICOM.
        lr, weight_decay: of AdamW, with warm-up and a cosine schedule.
        others: as in Task.
    """

    saved = (*Task.saved, "ema_dice")
    measures = "epoch"
    only_float32 = True
    monitor = "ema_dice"
    grid_parallel = True

    def __init__(
        self,
        net: nn.Module,
        window: list[int] | None = None,
        overlap: float = 0.5,
        mirror_axes: list[int] | None = None,
        largest: bool = False,
        ensemble: list[str] | None = None,
        dicom_seg: bool = False,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, lr=lr, weight_decay=weight_decay, **kwargs)
        good = window is None or (len(window) in (2, 3, 4) and min(window) > 0)
        expected = "3 sizes above 0, 4 for series over time, 2 for pictures"
        check("model.window", window, good, expected)
        check("model.overlap", overlap, 0 <= overlap < 1, "a fraction from 0 to below 1")
        axes, most = mirror_axes or [], getattr(net, "dims", 4)
        good = len({*axes} & {*range(most)}) == len(axes)
        check("model.mirror_axes", axes, good, f"different axes from 0 to {most - 1}")
        self.window, self.overlap = window, overlap
        self.mirror_axes, self.largest, self.ensemble = mirror_axes or [], largest, ensemble or []
        self.dicom_seg = dicom_seg
        self.loss = DiceCELoss(include_background=False, to_onehot_y=True, softmax=True, batch=True)
        self.ema_dice: float | None = None

    def setup(self, stage: str) -> None:
        data, dims = self.data(), getattr(self.net, "dims", None)
        axes = len(data.patch)
        good = self.window is None or len(self.window) == axes
        check("model.window", self.window, good, f"{axes} sizes, as data.patch: {data.patch}")
        good = max(self.mirror_axes, default=0) < axes
        check("model.mirror_axes", self.mirror_axes, good, f"axes from 0 to {axes - 1}")
        check("model.net", f"dims={dims}", dims in (None, axes), f"dims={axes} for data.patch: {data.patch}")
        check("model.dicom_seg", self.dicom_seg, not self.dicom_seg or axes == 3, "false but for volumes")
        if stage in ("test", "predict"):
            for path in self.ensemble:
                check_checkpoint(path, self, data)
        if stage != "predict":
            self.expect(in_channels=data.in_channels, out_channels=len(data.labels))

    def example_inputs(self) -> tuple[Tensor, ...]:
        data = self.data()
        shape = (data.batch_size, data.in_channels, *data.patch)
        return (torch.zeros(shape, device=self.device),)

    def on_train_start(self) -> None:
        # Lightning omits on_train_epoch_start where it resumes within or at the end of an epoch
        self.waited = self._waited()

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self.waited = self._waited()

    def on_train_epoch_end(self) -> None:
        if not self.trainer.is_last_batch:
            return  # cut off by max_steps: this epoch was not timed
        seconds = self.cost.seconds[-1]  # mean of a step of this epoch
        fraction = (self._waited() - self.waited) / (seconds * self.trainer.num_training_batches)
        self.log("waiting", fraction, sync_dist=True)

    def _waited(self) -> float:
        loader: Any = self.trainer.train_dataloader
        return float(loader.waited)

    def training_step(self, batch: tuple[Tensor, ...], _: int) -> Tensor:
        image, label, _numbers = batch
        outputs = self(image)
        outputs = [outputs] if isinstance(outputs, Tensor) else outputs
        losses = [self._loss(logits.float(), label, level) for level, logits in enumerate(outputs)]
        weights = [2.0**-level for level in range(len(outputs))]
        loss: Any = sum(weight / sum(weights) * x for weight, x in zip(weights, losses, strict=True))
        self.log("loss", loss, prog_bar=True, batch_size=len(image))
        return loss

    def _loss(self, logits: Tensor, label: Tensor, level: int) -> Tensor:
        """Return the loss of an output, on the grid of a level of the decoder."""
        if self.grid is None:
            loss: Tensor = self.loss(logits, _shrunk(label, logits.shape[2:]))
            return loss
        # the label is whole: it is shrunk as on one process
        net: Any = self.net
        space, axis = list(label.shape[2:]), self.grid.axis
        slabs = split_sizes(space[axis], self.grid.count, net.slab_multiples[axis])
        for step in net.strides[:level]:
            space = [-(-n // by) for n, by in zip(space, step, strict=True)]
            slabs = tuple(-(-n // step[axis]) for n in slabs)
        slab_label = _shrunk(label, torch.Size(space)).split(slabs, 2 + axis)[self.grid.rank]
        return dice_ce_of_slabs(logits, slab_label, self.grid)

    def grid_axis(self) -> int:
        patch, net = self.data().patch, self.net
        multiples: Any = net.slab_multiples
        return max(range(len(patch)), key=lambda axis: patch[axis] // multiples[axis])

    def validation_step(self, batch: dict[str, Any], _: int) -> None:
        image, label = (batch[key].as_tensor().to(self.device) for key in ("image", "label"))
        if self.data().plane:
            image, label = image.squeeze(-1), label.squeeze(-1)
        logits = predict_volume(self.predictor, image[None], self.window, self.overlap)
        labels = logits.argmax(1).to(self.device)
        dice = dice_of(labels, label.long(), len(self.data().labels))
        # a class that a case does not have has Dice NaN, which the mean must leave out
        self.val_dice[batch["name"]] = dice[dice.isfinite()].tolist()

    def on_validation_epoch_start(self) -> None:
        self.val_dice: dict[str, list[float]] = {}

    def on_validation_epoch_end(self) -> None:
        values = [dice for case in self.gathered(self.val_dice).values() for dice in case]
        mean = sum(values) / max(1, len(values))
        self.log("val_dice", mean, prog_bar=True)
        if not self.trainer.sanity_checking:
            earlier = mean if self.ema_dice is None else self.ema_dice
            self.ema_dice = MEMORY * earlier + (1 - MEMORY) * mean
            self.log("ema_dice", self.ema_dice)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["ema_dice"] = self.ema_dice

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.ema_dice = checkpoint["ema_dice"]

    def _start(self) -> None:
        """Prepare a test or a prediction: load the networks, and clear the results of cases."""
        nets, names = [self.predictor], self.data().names()
        for path in self.ensemble:
            saved = torch.load(path, map_location="cpu", weights_only=True)
            if saved["names"] != names:
                raise DataError(f"{path}: was trained on {saved['names']}, expected {names}")
            another = deepcopy(self.net)
            another.load_state_dict({key[4:]: x for key, x in saved["state_dict"].items() if key.startswith("net.")})
            nets.append(OutOfCore(another) if self.out_of_core else another)
        net = Ensemble(nets) if self.ensemble else self.predictor
        net = Mirrored(net, self.mirror_axes) if self.mirror_axes else net
        # not registered as a submodule: a checkpoint holds one network
        self.predict_labels = partial(predict_labels, net, window=self.window, overlap=self.overlap, device=self.device)
        self.rows: dict[str, list[dict[str, float]]] = {}
        self.spent: dict[str, Cost] = {}  # cost of the prediction of each case

    def _finish(self, folder: Path, title: str, summary: str) -> None:
        self.rows = self.gathered(self.rows)
        self.gather_lines()
        if self.trainer.is_global_zero and self.rows:
            names = self.data().labels
            write_cases(folder / "cases.csv", self.rows, names)
            write_page(folder / "index.html", self.rows, names, title, summary, self.failures)

    def _case(self, batch: dict[str, Any], folder: Path) -> None:
        """Predict a case, write its labels and its picture, and add its measures to `rows`."""
        if "error" in batch:
            raise DataError(batch["error"])
        volume, image, names = batch["volume"], batch.pop("image"), self.data().labels
        case: Case = volume.case
        self.notes += volume.notes
        meter = Meter(self.device)
        try:
            if self.data().plane:  # of one slice, and on its file's grid
                labels = self.predict_labels(image.squeeze(-1))[..., None]
            else:
                labels = self.predict_labels(image, onto=volume.onto(image))
        except ValueError as error:  # such as logits that are not numbers
            raise DataError(f"{case.images[0]}: {one_line(error)}") from error
        except torch.OutOfMemoryError as error:
            raise DataError(
                f"{case.images[0]}: does not fit into the device's memory as a whole; give --model.window, such as the "
                "training patch, or --model.out_of_core true"
            ) from error
        self.spent[case.name] = meter.read()
        del image  # before more memory is taken
        if self.largest:
            labels = keep_largest(labels)
        array = volume.from_ras(labels)
        ending = volume.grid.ending  # CASE.png is the picture of the case
        label_folder = folder if ending == ".nii.gz" else folder / "labels"
        volume.save_labels(array, label_folder / f"{case.name}{ending}")
        if self.dicom_seg and volume.grid.slices:
            volume.save_dicom_seg(array, folder / f"{case.name}.dcm", names)
        drawn = upright(volume.image[:1])
        truth = None if volume.label is None else upright(volume.label).as_tensor()[0]
        spacing, captions = drawn.pixdim.tolist(), self.figure_names(names)
        row = measure_case(labels, truth, len(names), spacing)
        dice = torch.tensor([measured["dice"] for measured in row]).nanmean()
        title = case.name if truth is None else f"{case.name}: Dice {dice:.3f}"
        panels, step = (drawn.as_tensor()[0], truth, labels), volume.grid.time_step
        save_case(folder / f"{case.name}.png", title, *panels, spacing, captions, step, self.data().plane)
        self.rows[case.name] = row

    def on_test_epoch_start(self) -> None:
        self._start()

    def test_step(self, batch: dict[str, Any], _: int) -> None:
        self._case(batch, self.out() / "test")

    def on_test_epoch_end(self) -> None:
        rows, spent, data = self.gathered(self.rows), self.gathered(self.spent), self.data()
        shape = (1, data.in_channels, *data.patch)
        metrics = {**metrics_of(rows, data.labels), **case_costs(self.net, self.cost, spent.values(), shape)}
        self.log("test_dice", metrics["mean_dice"], rank_zero_only=True)
        self.summary = f"held-out mean Dice {metrics['mean_dice']:.3f} over {len(rows)} cases"
        self._finish(self.out() / "test", f"{self.out().name}: test", self.summary)
        self.summary += f"; see {self.out() / 'test' / 'index.html'}"
        if self.trainer.is_global_zero:
            write_metrics(self.out(), metrics)

    def on_predict_epoch_start(self) -> None:
        self._start()

    def predict_step(self, batch: dict[str, Any], _: int) -> None:
        with self.one_input(batch["case"].images[0]):
            self._case(batch, self.out() / "predictions")

    def on_predict_epoch_end(self) -> None:
        folder = self.out() / "predictions"
        self._finish(folder, f"{self.out().name}: predictions", f"{len(self.rows)} cases")
        self.summary = f"predictions are in {folder}"


def _shrunk(label: Tensor, space: torch.Size) -> Tensor:
    """Resample labels (batch, 1, *space) to a coarser grid, by the nearest voxels. (Torch's interpolate takes three
    axes at most.)"""
    for axis, (n, few) in enumerate(zip(label.shape[2:], space, strict=True), start=2):
        if few != n:
            middles = (2 * torch.arange(few, device=label.device) + 1) * n // (2 * few)
            label = label.index_select(axis, middles)
    return label
