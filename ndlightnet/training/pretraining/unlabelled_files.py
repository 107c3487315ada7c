"""Files without labels: images, videos or volumes of any sizes, in one folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from torch import Tensor
from torch.utils.data import Dataset

from ndlightnet.data.errors import DataError, first_good, fitting
from ndlightnet.data.image import image_transforms
from ndlightnet.data.image.image_folder import find_images, note_dark, read_image
from ndlightnet.data.sampling import SeededSamples
from ndlightnet.data.video.clips import open_for_clips
from ndlightnet.data.video.video_files import find_videos
from ndlightnet.data.video.video_transforms import Framing, denormalized, normalized, train_clip, training
from ndlightnet.data.volume.class_folders import read_volume
from ndlightnet.data.volume.datasets import find_inputs
from ndlightnet.training.core.data_module import LabelledData, train_and_held_out
from ndlightnet.training.core.options import check
from ndlightnet.training.report.results import log_rank_zero

Kind = Literal["images", "videos", "volumes"]
OFF: Any = {"randaugment": None, "color_jitter": 0, "random_erasing": 0}  # augmentation beside random crops


class UnlabelledFiles(LabelledData):
    """All files of one kind below `root`, for `pretrain`. They are read when a batch needs them.

    Args:
        root: the folder.
        kind: images (PNG, JPEG, WebP, BMP, TIFF) or videos (mp4, mkv and others), at any depth, or volumes (NIfTI,
            Analyze, NRRD, MetaImage files and DICOM series, at any depth).
        size: of the samples: height and width; frames, height and width, alike; or x, y and z.
        spacing: of volumes: mm per cell along x, y and z. Larger volumes are cropped to their
            middle, smaller ones are padded.
        batch_size: samples in a batch.
        scale: least and largest area of the random crop of an image or clip (fractions).
        hflip: mirror images and clips half of the time.
        repeats: random samples of each file in an epoch.
        validation: fraction of the files that measures what was learnt; 0: none.
        workers: processes that read.

    A file that cannot be read is named once, and the next good one takes its place.
    """

    def __init__(
        self,
        root: str,
        kind: Kind,
        size: list[int],
        spacing: list[float] | None = None,
        batch_size: int = 16,
        scale: tuple[float, float] = (0.3, 1.0),
        hflip: bool = True,
        repeats: int = 1,
        validation: float = 0.05,
        workers: int = 2,
    ) -> None:
        super().__init__(root, batch_size, workers)
        axes = 2 if kind == "images" else 3
        check("data.size", size, len(size) == axes and min(size) > 0, f"{axes} numbers above 0")
        square = kind != "videos" or size[1] == size[2]
        check("data.size", size, square, "frames, and two equal sides")
        good = (spacing is not None and len(spacing) == 3 and min(spacing) > 0) or kind != "volumes"
        check("data.spacing", spacing, good, "three numbers of mm above 0 for volumes")
        good = 0 < scale[0] <= scale[1] <= 1
        check("data.scale", scale, good, "two fractions above 0, the smaller one first")
        check("data.validation", validation, 0 <= validation < 1, "a fraction from 0, below 1")
        check("data.repeats", repeats, repeats > 0, "1 or more")
        self.kind, self.space, self.spacing = kind, tuple(size), spacing
        self.scale, self.hflip, self.repeats, self.validation = scale, hflip, repeats, validation

    @property
    def channels(self) -> int:
        return 1 if self.kind == "volumes" else 3

    def to_pixels(self, x: Tensor) -> Tensor:
        return denormalized(x)

    def from_pixels(self, pixels: Tensor) -> Tensor:
        return normalized(pixels)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        notes: list[str] = []
        files, read = getattr(self, f"_{self.kind}")(notes)
        log_rank_zero(notes)
        fitted, chosen = train_and_held_out(self.validation, files)
        if not fitted:
            raise DataError(f"{self.root}: {len(files)} files, expected some to train with")
        self.train_set = Samples(fitted, read)
        self.val_set = self.test_set = Samples(chosen, read)

    def _images(self, notes: list[str]) -> tuple[list[Any], Callable[[Any], Tensor]]:
        images = find_images(self.root, notes)
        note_dark(images, notes)
        height, width = self.space
        crops: Any = {"scale": self.scale, "ratio": (3 / 4, 4 / 3), "padding": 0, "hflip": 0.5 * self.hflip, "fill": []}
        transform = image_transforms.training((height, width), "bilinear", **crops, **OFF)
        paths = [images.path(number) for number in range(len(images))]
        return paths, partial(_image, transform=transform)

    def _videos(self, notes: list[str]) -> tuple[list[Any], Callable[[Any], Tensor]]:
        frames, size, _ = self.space
        transform = training(size, scale=self.scale, hflip=self.hflip, rotation=0, grayscale=0, **OFF)
        read = partial(_clip, frames=frames, framing=Framing(size, "squash"), transform=transform)
        return find_videos(self.root, notes), read

    def _volumes(self, notes: list[str]) -> tuple[list[Any], Callable[[Any], Tensor]]:
        spacing: Any = self.spacing
        return find_inputs(str(self.root), notes=notes), partial(_volume, size=self.space, spacing=spacing)

    def val_dataloader(self) -> Any:
        # the same random crops each time
        return self.still_loader(SeededSamples(self.val_set, 0)) if len(self.val_set) else []

    def test_dataloader(self) -> Any:
        return self.val_dataloader()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return (samples, numbers); files that could not be read are named."""
        x, numbers, problems = batch
        self.report_skipped(problems, "the next file replaces it")
        return x, numbers


class Samples(Dataset[tuple[Tensor, int, str]]):
    """Dataset of `read(file)`: (sample, number, problem). A file that cannot be read is replaced by
    the next good one; `problem`, else "", names it."""

    def __init__(self, files: list[Any], read: Callable[[Any], Tensor]) -> None:
        self.files, self.read = files, read

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int, str]:
        return first_good(lambda number: self.read(self.files[number]), index, len(self))


def _image(path: Any, transform: Callable[[Any], Tensor]) -> Tensor:
    return normalized(transform(read_image(path, 3)))


def _clip(path: Any, frames: int, framing: Framing, transform: Callable[[Tensor], Tensor]) -> Tensor:
    with fitting(path):
        return train_clip(open_for_clips(path, frames, framing), frames, transform)


def _volume(case: Any, size: tuple[int, ...], spacing: list[float]) -> Tensor:
    return normalized(read_volume(case, size, spacing)[None])
