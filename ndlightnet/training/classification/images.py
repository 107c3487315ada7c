"""Classification of images and volumes; data of grey ones of one size, which fit into memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics.classification import BinaryAUROC

from ndlightnet.data.errors import DataError, one_line
from ndlightnet.data.folders import find_root
from ndlightnet.data.image.image_sets import (
    Batches,
    ImageSet,
    SeededBatches,
    ShuffledBatches,
    mean_and_std,
    moved,
    read_images,
)
from ndlightnet.data.made.digits import still_digits
from ndlightnet.data.packing import token_count
from ndlightnet.data.sampling import linspace_indices, replica
from ndlightnet.data.volume.augment import Augment
from ndlightnet.inference import mirrorings
from ndlightnet.models.hub import Pretrained
from ndlightnet.training.classification.data import LabelledData, limited
from ndlightnet.training.classification.page import write_table
from ndlightnet.training.classification.pictures import save_gallery
from ndlightnet.training.classification.task import ClassificationTask
from ndlightnet.training.core.costs import latencies, training_costs
from ndlightnet.training.core.task import check


class ImageData(LabelledData):
    """A folder of IDX files or an npz file, as ndlightnet.data.image.image_sets reads them.

    Bytes are augmented and normalised on the device. Batches and augmentation depend on the seed
    alone, so that networks that are compared get the same.

    Args:
        root: the folder or file.
        classes: names of the classes; default: their numbers.
        batch_size: images per batch.
        shift: largest random shift of training images along every axis (cells).
        flips: axes along which training images are mirrored half the time.
        validation: fraction of the training images that chooses the best checkpoint, where the data
            have no validation part; 0: none. The test images are not used for this.
        train_limit: train on so many images, evenly spaced; default: all.
        augment: augmentation of training images after normalisation; replaces `shift` and `flips`,
            which it has, too.
    """

    channels = 1

    def __init__(
        self,
        root: str,
        classes: list[str] | None = None,
        batch_size: int = 128,
        shift: int = 0,
        flips: tuple[int, ...] = (),
        validation: float = 0.1,
        train_limit: int | None = None,
        augment: Augment | None = None,
    ) -> None:
        super().__init__()
        self.root, self.batch_size = find_root(root), batch_size
        self.shift, self.flips = shift, flips
        self.validation, self.train_limit = validation, train_limit
        self.classes, self.augment = tuple(classes or ()), augment

    def read(self) -> dict[str, ImageSet]:
        return read_images(self.root)

    def setup(self, stage: str) -> None:
        if stage == "predict":
            return  # the classes' names and the normalisation come with the checkpoint
        if self.augment and (self.shift or self.flips):
            raise DataError(f"shift={self.shift}, flips={self.flips}: with augment, say them there")
        self.seed = torch.initial_seed()
        parts = self.read()
        train, self.test_set = parts["train"], parts["test"]
        self.space = tuple(train.images.shape[1:])
        if any(not 0 <= axis < len(self.space) for axis in self.flips):
            raise DataError(f"{self.root}: flips={self.flips}: axes are 0 to {len(self.space) - 1}")
        most = max(int(part.labels.max()) for part in parts.values())
        self.classes = self.classes or tuple(str(label) for label in range(most + 1))
        if most >= len(self.classes) or min(int(p.labels.min()) for p in parts.values()) < 0:
            raise DataError(f"{self.root}: labels up to {most}: classes are {list(self.classes)}")
        self.mean, self.std = mean_and_std(train.images)
        held = linspace_indices(round(self.validation * len(train)), len(train))
        self.val_set = parts.get("val", train.pick(held))
        if "val" not in parts:
            train = train.pick(sorted(set(range(len(train))) - set(held)))
        self.train_set = train.pick(limited(self, train.labels.tolist()))

    def train_dataloader(self) -> Any:
        kind = SeededBatches if self.augment else ShuffledBatches
        return kind(self.train_set, self.batch_size, replica(), shift=self.shift, flips=self.flips, seed=self.seed)

    def plain_train_dataloader(self) -> Any:
        return Batches(self.train_set, self.batch_size, replica())

    def val_dataloader(self) -> Any:
        here = len(self.val_set) > 0
        return Batches(self.val_set, self.batch_size, replica()) if here else []

    def test_dataloader(self) -> Any:
        return Batches(self.test_set, self.batch_size, replica())

    def predict_dataloader(self) -> Any:
        raise DataError(f"{self.root}: predict reads files, with ImageFolders or VolumeFolders, not ImageData")

    def picture(self, number: int) -> Tensor:
        """Return an image of the test or prediction: (channels, *space) uint8."""
        return self.test_set.images[number][None]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Normalise uint8 images to mean 0 and std 1; those of training batches are shifted and
        mirrored, or augmented, as the rest of the batch says."""
        images, labels, numbers, *moves = batch
        images = moved(images, *moves) if len(moves) == 2 else images
        images = self.from_pixels(images)
        if self.augment and len(moves) == 1:
            images, _ = self.augment(images, None, torch.Generator().manual_seed(moves[0]))
        return images, labels, numbers

    def to_pixels(self, x: Tensor) -> Tensor:
        return (x.float() * self.std + self.mean).round().clamp(0, 255).to(torch.uint8)

    def from_pixels(self, pixels: Tensor) -> Tensor:
        return (pixels.float() - self.mean) / self.std

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside the names, for `to_pixels` without the data."""
        return {"mean": self.mean, "std": self.std}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.mean, self.std = state_dict["mean"], state_dict["std"]


class HandwrittenDigits(ImageData):
    """Handwritten digits that scikit-learn brings along: 1,500 images to train with, 297 to test,
    in ten classes. Nothing is read or downloaded.

    Args:
        size: pixels of a side; the images have 8 and are enlarged.
        others: as in ImageData.
    """

    def __init__(self, size: int = 16, **kwargs: Any) -> None:
        super().__init__("handwritten digits", **kwargs)
        self.size = size

    def read(self) -> dict[str, ImageSet]:
        return {
            part: ImageSet(torch.from_numpy(images), torch.from_numpy(labels))
            for part, (images, labels) in still_digits(self.size).items()
        }


class ImageTask(ClassificationTask):
    """Trains `net`, images `(batch, channels, *space)` -> `(batch, classes)` logits, and measures
    it.

    Args:
        net: the network.
        mirror: axes of space; probabilities are means over all ways to mirror the image along them.
        others: as in ClassificationTask.
    """

    saved = (*ClassificationTask.saved, "cost")
    measures = "step"
    only_float32 = True
    samples = "images"

    def __init__(self, net: nn.Module, *, mirror: tuple[int, ...] = (), **kwargs: Any) -> None:
        super().__init__(net, **kwargs)
        self.mirror = mirror
        self.val_auc = BinaryAUROC()

    def setup(self, stage: str) -> None:
        dims = getattr(self.net, "dims", None)
        if dims is not None and any(not 0 <= axis < dims for axis in self.mirror):
            raise DataError(f"model.mirror={self.mirror}: axes are 0 to {dims - 1}")
        if stage == "predict":
            return  # classes and size come with the checkpoint
        data = self.data()
        self.expect(dims=len(data.space), in_chans=data.channels, num_classes=len(data.classes))

    def on_fit_start(self) -> None:
        self.try_network()
        super().on_fit_start()

    def on_test_start(self) -> None:
        self.try_network()

    def try_network(self) -> None:
        """Raise DataError if a network of another library cannot take the images, or gives other
        than a number for each class; for ours `setup` has compared the arguments."""
        if isinstance(self.net, Pretrained):
            return
        data, training, precision = self.data(), self.net.training, self.trainer.precision_plugin
        image = torch.zeros(1, data.channels, *data.space, device=self.device)
        name, size = type(self.net).__name__, tuple(image.shape[1:])
        try:
            with torch.no_grad(), precision.forward_context():
                found = self.net.eval()(precision.convert_input(image))
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            told = f"cannot take images of {size} ({one_line(error)})"
            raise DataError(f"model.net={name}: {told}") from error
        self.net.train(training)
        shape, wanted = tuple(getattr(found, "shape", ())), (1, len(data.classes))
        check(f"model.net={name}", f"output {shape} of an image", shape == wanted, f"{wanted}")

    def example_inputs(self) -> tuple[Tensor, ...]:
        data = self.data()
        return (torch.zeros(data.batch_size, data.channels, *data.space, device=self.device),)

    def probabilities(self, *inputs: Any) -> Tensor:
        (images,), answer = inputs, super().probabilities
        return torch.stack([answer(images.flip(way)) for way in mirrorings(self.mirror)]).mean(0)

    def log_validation(self, probabilities: Tensor, labels: Tensor) -> None:
        super().log_validation(probabilities, labels)
        if probabilities.shape[1] == 2:
            self.val_auc.update(probabilities[:, 1], labels)
            self.log("val_auc", self.val_auc, prog_bar=True)

    def on_validation_epoch_start(self) -> None:
        self.validated = 0

    def validation_step(self, batch: tuple[Any, ...], number: int) -> None:
        self.validated += len(batch[0])
        if len(batch[0]):  # 0: no file of the batch could be read
            super().validation_step(batch, number)

    def on_validation_epoch_end(self) -> None:
        if not self.validated:
            raise DataError(f"{self.data().root}: no file of the validation could be read")

    def on_test_epoch_start(self) -> None:
        super().on_test_epoch_start()
        self.timed: Tensor | None = None

    def test_step(self, batch: tuple[Any, ...], number: int) -> None:
        if not len(batch[0]):
            return
        self.timed = batch[0] if self.timed is None else self.timed
        super().test_step(batch, number)

    def on_test_epoch_end(self) -> None:
        self._gather_failures()
        super().on_test_epoch_end()

    def _gather_failures(self) -> None:
        self.failures = list(self.gathered({line: line for line in self.failures}))

    def more_metrics(self, probabilities: Tensor, labels: Tensor) -> dict[str, Any]:
        patch = getattr(getattr(self.net, "embed", None), "patch", None)
        return {
            "tokens": token_count(self.data().space, patch) if patch else None,
            **training_costs(self.net, self.cost),
            **({} if self.timed is None else latencies(self, self.timed)),
        }

    def sample(self, number: int) -> tuple[Tensor, Tensor]:
        picture = self.data().picture(number)
        return self.data().from_pixels(picture[None])[0], picture

    def save_samples(self, numbers: list[int], probabilities: Tensor, labels: Tensor) -> None:
        save_gallery(
            self.out() / "test_images.png",
            lambda row: self.data().picture(numbers[row]),
            probabilities,
            labels,
            self.figure_names(self.data().classes),
        )

    def on_predict_start(self) -> None:
        self.predicted: dict[int, list[float]] = {}

    def predict_step(self, batch: tuple[Tensor, ...], _: int) -> None:
        images, _labels, numbers = batch
        if len(images):
            answers = self.probabilities(images).tolist()
            self.predicted |= dict(zip(numbers.tolist(), answers, strict=True))

    def on_predict_end(self) -> None:
        """Write predictions.csv, a line for each image, its file, class and probabilities, and
        predictions.png, some of the images, the least certain first."""
        self._gather_failures()
        predicted, data = self.gathered(self.predicted), self.data()
        file = self.out() / "predictions.csv"
        if self.trainer.is_global_zero:
            odds = torch.tensor(list(predicted.values())).reshape(len(predicted), -1)
            files = [data.sample_name(number) for number in predicted]
            write_table(file, files, odds, None, data.classes)
            if predicted:
                shown = list(predicted)
                save_gallery(
                    self.out() / "predictions.png",
                    lambda row: data.picture(shown[row]),
                    odds,
                    None,
                    self.figure_names(data.classes),
                )
        self.summary = f"{len(predicted)} predictions are in {file}"
