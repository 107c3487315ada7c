"""Classification of images of any sizes, from class folders, and of drawn digits."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ndlightnet.data.errors import DataError
from ndlightnet.data.folders import class_names
from ndlightnet.data.image import image_transforms
from ndlightnet.data.image.image_folder import FolderImages, ImageFiles, collate, find_images, list_images, note_dark
from ndlightnet.data.image.image_transforms import MEAN, STD, Interpolation, RandAugment, mixing, seeded
from ndlightnet.data.made.digits import make_coloured_digits
from ndlightnet.data.made.pathfinder import make_pathfinder
from ndlightnet.training.core.data_module import LabelledData, held_out, limited
from ndlightnet.training.core.options import check
from ndlightnet.training.report.results import log_rank_zero


class ImageFolders(LabelledData):
    """`train/CLASS/*`, `test/CLASS/*` and perhaps `val/CLASS/*` under `root`: PNG, JPEG, WebP, BMP and TIFF files of
    any sizes, at any depth. Names of arguments are those of torchvision and timm.

    Workers decode the files and send bytes; normalisation and mixing are done on the device. Order and random draws
    follow from the seed and the number of a visit, with any number of workers.

    Args:
        root: the folder. The classes have the names of their folders.
        size: height and width of the network's input, one number or [height, width].
        channels: 3: RGB, 1: grey. ndlightnet.data.image.image_folder.read_image tells what becomes of palettes, alpha
            channels, CMYK, 16 bits and EXIF tags.
        batch_size: images per batch and process.
        scale: least and largest area of the random crop of a training image (fractions), as in torchvision's
            RandomResizedCrop; null: the middle, as large as it can be.
        ratio: its least and largest width / height.
        padding: above 0: random crops of the middle, padded by so many pixels, in place of `scale`.
        hflip: probability that a training image is mirrored. 0.5 where left and right do not matter to the classes.
        randaugment: {num_ops, magnitude, num_magnitude_bins} of torchvision's RandAugment.
        color_jitter: largest change of brightness, contrast and saturation (a fraction).
        random_erasing: probability that a rectangle of a training image becomes the mean colour.
        mixup: alpha of torchvision's MixUp of a training batch; 0: none.
        cutmix: alpha of its CutMix; 0: none. With both, each batch gets one of them at random.
        interpolation: nearest, bilinear or bicubic.
        crop_pct: the central fraction of the short side that validation, test and prediction see.
        mean: of pixels from 0 to 1, one number per channel; default: ImageNet's, for grey the mean of the three.
        std: standard deviations, likewise.
        validation: fraction of each class of `train` that chooses the best checkpoint, where there is no folder `val`;
            0: none. `test` is not used for this.
        train_limit: train on so many of the images that are left for it, evenly spaced; default: all.
        workers: processes that decode images.
        input: for predict: a file, or a folder of files at any depth.

    A file that cannot be read is named by a line: in training the next good file replaces it, elsewhere it is left out.

    After `setup`: classes, space (height, width), channels.
    """

    def __init__(
        self,
        root: str,
        size: int | list[int],
        channels: Literal[1, 3] = 3,
        batch_size: int = 128,
        scale: tuple[float, float] | None = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        padding: int = 0,
        hflip: float = 0.0,
        randaugment: RandAugment | None = None,
        color_jitter: float = 0.0,
        random_erasing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        interpolation: Interpolation = "bicubic",
        crop_pct: float = 0.875,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        validation: float = 0.1,
        train_limit: int | None = None,
        workers: int = 2,
        input: str | None = None,
    ) -> None:
        super().__init__(root, batch_size, workers, input)
        space = [size, size] if isinstance(size, int) else list(size)
        check("data.size", size, len(space) == 2 and min(space) > 0, "one or two numbers above 0")
        self.space: tuple[int, ...] = tuple(space)
        check("data.channels", channels, channels in (1, 3), "3 (RGB) or 1 (grey)")
        self.channels = channels
        for name, value in (("hflip", hflip), ("random_erasing", random_erasing), ("validation", validation)):
            check(f"data.{name}", value, 0 <= value <= 1, "a fraction from 0 to 1")
        for name, value in (("mixup", mixup), ("cutmix", cutmix), ("color_jitter", color_jitter)):
            check(f"data.{name}", value, value >= 0, "0 or more")
        check("data.padding", padding, padding >= 0, "0 or more pixels")
        check("data.crop_pct", crop_pct, 0 < crop_pct <= 1, "a fraction above 0, at most 1")
        good = scale is None or 0 < scale[0] <= scale[1] <= 1
        check("data.scale", scale, good, "two fractions above 0, the smaller one first")
        check("data.ratio", ratio, 0 < ratio[0] <= ratio[1], "two numbers, the smaller one first")
        if randaugment is not None:
            most = randaugment.num_magnitude_bins - 1
            good = 0 <= randaugment.magnitude <= most and randaugment.num_ops >= 0
            check("data.randaugment", randaugment, good, f"num_ops 0 or more, magnitude 0 to {most}")
        grey = channels == 1
        self.mean = mean or ([sum(MEAN) / 3] if grey else [*MEAN])
        self.std = std or ([sum(STD) / 3] if grey else [*STD])
        good = len(self.mean) == len(self.std) == channels and min(self.std) > 0
        check("data.mean, data.std", (mean, std), good, f"{channels} for each, std above 0")
        self.mixup, self.cutmix, self.validation = mixup, cutmix, validation
        self.padding, self.hflip, self.random_erasing = padding, hflip, random_erasing
        self.train_limit, self.interpolation = train_limit, interpolation
        self.only_flips = crop_pct == 1 and not (scale or padding or randaugment or color_jitter or random_erasing)
        height, width = self.space
        self.collate = partial(collate, space=self.space, channels=channels)
        self.evaluate = image_transforms.evaluation((height, width), crop_pct, interpolation)
        crop: Any = {"scale": None if padding else scale, "ratio": ratio, "padding": padding, "hflip": hflip}
        colours: Any = {"randaugment": randaugment, "color_jitter": color_jitter, "random_erasing": random_erasing}
        fill = [round(255 * value) for value in self.mean]
        self.augment = image_transforms.training((height, width), interpolation, **crop, **colours, fill=fill)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "predict":
            return  # the classes' names come with the checkpoint
        if not self.root.is_dir():
            raise DataError(f"{self.root}: no such folder, expected one with train/CLASS/ in it")
        notes: list[str] = []
        train, val, test = (self.root / name for name in ("train", "val", "test"))
        # to test, the training images need not be here
        self.classes = class_names(train if train.is_dir() or stage != "test" else test)
        if stage == "test":
            self.test_set = self._images(list_images(test, self.classes, notes))
        else:
            files = list_images(train, self.classes, notes)
            if val.is_dir():
                held = list_images(val, self.classes, notes)
            else:
                files, held = _split(files, self.validation)
            few = files.pick(limited(self, files.labels.tolist()))
            note_dark(few, notes)
            self.val_set = self._images(held)
            self.train_set = FolderImages(few, self.channels, self.augment, train=True)
            self.mixing = mixing(self.mixup, self.cutmix, len(self.classes))
        log_rank_zero(notes)

    def _images(self, files: ImageFiles) -> FolderImages:
        return FolderImages(files, self.channels, self.evaluate)

    def plain_train_dataloader(self) -> Any:
        return self.still_loader(self._images(self.train_set.files))

    def predict_dataloader(self) -> Any:
        notes: list[str] = []
        files = find_images(self.check_input("an image or a folder to predict", bool(self.classes)), notes)
        log_rank_zero(notes)
        self.test_set = self._images(files)
        return self.still_loader(self.test_set)

    def sample_name(self, number: int) -> str:
        return str(self.test_set.files.path(number))

    def picture(self, number: int) -> Tensor:
        """Return an image of the test or prediction as the network sees it: (channels, *space) uint8."""
        image = self.test_set[number].image
        assert image is not None  # it was read before
        return image

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return (images float32, labels, numbers): normalised, and in training mixed, when labels are (batch,
        classes) floats. Files that could not be read are named."""
        images, labels, numbers, draw, problems = batch
        if self.trainer is not None and (self.trainer.testing or self.trainer.predicting):
            task: Any = self.trainer.lightning_module
            task.failures += problems
        else:
            self.report_skipped(problems, "left out")
        if draw is not None and not len(images):
            raise DataError(f"{self.root}: a whole batch cannot be read, such as {problems[-1]}")
        images = self.from_pixels(images) if images.dtype == torch.uint8 else images  # or latents
        if draw is not None and self.mixing is not None:
            images, labels = seeded(self.mixing, draw, images, labels)
        return images, labels, numbers

    def to_pixels(self, x: Tensor) -> Tensor:
        """Undo the normalisation: (batch, channels, *space) floats -> uint8 of that shape."""
        pixels = (x.float() * self._each(self.std, x) + self._each(self.mean, x)) * 255
        return pixels.round().clamp(0, 255).to(torch.uint8)

    def from_pixels(self, pixels: Tensor) -> Tensor:
        mean, std = self._each(self.mean, pixels), self._each(self.std, pixels)
        return pixels.float().mul_(1 / (255 * std)).sub_(mean / std)

    def _each(self, values: list[float], images: Tensor) -> Tensor:
        return torch.tensor(values, device=images.device).view(-1, *[1] * len(self.space))


def _split(files: ImageFiles, fraction: float) -> tuple[ImageFiles, ImageFiles]:
    """Return the files without and with an evenly spaced `fraction` of each class."""
    held: list[int] = []
    for label in range(int(files.labels.max()) + 1):
        members = (files.labels == label).nonzero()[0]
        chosen = held_out(fraction, len(members))
        if len(chosen) == len(members):
            raise DataError(f"{files.root}: validation={fraction} leaves no image of a class to train with")
        held += members[sorted(chosen)].tolist()
    rest = sorted({*range(len(files))} - {*held})
    return files.pick(rest), files.pick(held)


class ColouredDigits(ImageFolders):
    """Pictures of handwritten digits in colour on texture, 32 x 32 pixels, drawn under `root` if they do not exist yet,
    then read like any folder.

    images: number of training and of test pictures.
    """

    def __init__(self, root: str, size: int = 32, images: tuple[int, int] = (3000, 500), **kwargs: Any) -> None:
        super().__init__(root, size, **kwargs)
        self.images = images

    def make_data(self) -> None:
        make_coloured_digits(self.root, *self.images)


class Pathfinder(ImageFolders):
    """Grey pictures of dashed curves: whether one joins two dots. They are drawn under `root` if they do not exist yet,
    see ndlightnet.data.made.pathfinder, then read like any folder.

    images: number of training and of test pictures. dashes, others: of a long curve; number of shorter curves.
    """

    def __init__(
        self,
        root: str,
        size: int = 32,
        images: tuple[int, int] = (20000, 2000),
        dashes: int = 7,
        others: int = 4,
        **kwargs: Any,
    ) -> None:
        super().__init__(root, size, channels=1, crop_pct=1.0, scale=None, **kwargs)
        check("data.images", images, min(images) > 1, "2 or more of each")
        check("data.dashes, data.others", (dashes, others), dashes > 1 and others >= 0, "2 or more, and 0 or more")
        self.drawn = *images, size, dashes, others

    def make_data(self) -> None:
        make_pathfinder(self.root, *self.drawn, workers=self.workers)
