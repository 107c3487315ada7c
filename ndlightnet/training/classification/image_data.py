"""Grey images and volumes of one size, which fit into memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ndlightnet.data.errors import DataError
from ndlightnet.data.image import image_sets
from ndlightnet.data.image.image_sets import ImageSet
from ndlightnet.data.made.digits import still_digits
from ndlightnet.data.sampling import linspace_indices, replica
from ndlightnet.data.volume.augment import Augment
from ndlightnet.training.core.data_module import LabelledData, limited


class ImageData(LabelledData):
    """A folder of IDX files or an npz file, as ndlightnet.data.image.image_sets reads them.

    Bytes are augmented and normalised on the device. Batches and augmentation depend on the seed alone, so that
    networks that are compared get the same.

    Args:
        root: the folder or file.
        classes: names of the classes; default: their numbers.
        batch_size: images per batch.
        shift: largest random shift of training images along every axis (cells).
        flips: axes along which training images are mirrored half the time.
        validation: fraction of the training images that chooses the best checkpoint, where the data have no validation
            part; 0: none. The test images are not used for this.
        train_limit: train on so many images, evenly spaced; default: all.
        augment: augmentation of training images after normalisation; replaces `shift` and `flips`, which it has, too.
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
        super().__init__(root, batch_size)
        self.shift, self.flips = shift, flips
        self.validation, self.train_limit = validation, train_limit
        self.classes, self.augment = tuple(classes or ()), augment

    def read(self) -> dict[str, ImageSet]:
        return image_sets.read_images(self.root)

    def setup(self, stage: str) -> None:
        if stage == "predict":
            return  # the classes' names and the normalisation come with the checkpoint
        if self.augment and (self.shift or self.flips):
            raise DataError(f"shift={self.shift}, flips={self.flips}: with augment, say them there")
        super().setup(stage)
        sets = self.read()
        train, self.test_set = sets["train"], sets["test"]
        self.space = tuple(train.images.shape[1:])
        if any(not 0 <= axis < len(self.space) for axis in self.flips):
            raise DataError(f"{self.root}: flips={self.flips}: axes are 0 to {len(self.space) - 1}")
        labels = torch.cat([images.labels for images in sets.values()])
        least, most = int(labels.min()), int(labels.max())
        self.classes = self.classes or tuple(str(label) for label in range(most + 1))
        if most >= len(self.classes) or least < 0:
            raise DataError(f"{self.root}: labels up to {most}: classes are {list(self.classes)}")
        self.mean, self.std = image_sets.mean_and_std(train.images)
        held = linspace_indices(round(self.validation * len(train)), len(train))
        self.val_set = sets.get("val", train.pick(held))
        if "val" not in sets:
            train = train.pick(sorted(set(range(len(train))) - set(held)))
        self.train_set = train.pick(limited(self, train.labels.tolist()))

    def train_dataloader(self) -> Any:
        kind = image_sets.SeededBatches if self.augment else image_sets.ShuffledBatches
        return kind(self.train_set, self.batch_size, replica(), shift=self.shift, flips=self.flips, seed=self.seed)

    def plain_train_dataloader(self) -> Any:
        return self.still_loader(self.train_set)

    def still_loader(self, samples: ImageSet) -> Any:
        return image_sets.Batches(samples, self.batch_size, replica())

    def predict_dataloader(self) -> Any:
        raise DataError(f"{self.root}: predict reads files, with ImageFolders or VolumeFolders, not ImageData")

    def picture(self, number: int) -> Tensor:
        """Return an image of the test or prediction: (channels, *space) uint8."""
        return self.test_set.images[number][None]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Normalise uint8 images to mean 0 and std 1; those of training batches are shifted and mirrored, or
        augmented, as the rest of the batch says."""
        images, labels, numbers, *moves = batch
        images = image_sets.moved(images, *moves) if len(moves) == 2 else images
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
    """Handwritten digits that scikit-learn brings along: 1,500 images to train with, 297 to test, in ten classes.
    Nothing is read or downloaded.

    Args:
        size: pixels of a side; the images have 8 and are enlarged.
        others: as in ImageData.
    """

    source = None

    def __init__(self, size: int = 16, **kwargs: Any) -> None:
        super().__init__("handwritten digits", **kwargs)
        self.size = size

    def read(self) -> dict[str, ImageSet]:
        return {
            name: ImageSet(torch.from_numpy(images), torch.from_numpy(labels))
            for name, (images, labels) in still_digits(self.size).items()
        }
