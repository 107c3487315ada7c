"""Folders of images of any sizes, a folder for each class: which files there are, and their pixels.

Nothing is decoded before a batch needs it, so a million files are listed in seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from ndlightnet.data.errors import TRIES, DataError, readable
from ndlightnet.data.folders import Notes, class_folders, list_files
from ndlightnet.data.image.image_files import decode, has_deep_colours, largest_of, open_image
from ndlightnet.data.sampling import linspace_indices

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
WHITE = (255, 255, 255, 255)
LOOKED_AT = 16  # images of a training set that are looked at for their range
DARK = 16  # what the largest number of 12 bits becomes when 16 are scaled to 8


@dataclass(frozen=True)
class ImageFiles:
    """Image files below `root` and the numbers of their classes, in arrays: worker processes would
    copy a list of a million objects just by counting references to them.

    names: paths from `root`, as bytes (n,). labels: (n,) int64.
    """

    root: Path
    names: NDArray[np.bytes_]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.names)

    def path(self, number: int) -> Path:
        return self.root / os.fsdecode(self.names[number])

    def pick(self, numbers: Sequence[int]) -> ImageFiles:
        at = np.array(numbers, np.int64)
        return ImageFiles(self.root, self.names[at], self.labels[at])


def list_images(split: Path, classes: Sequence[str], notes: Notes = None) -> ImageFiles:
    """Return the images in `split/CLASS`, at any depth, with the numbers of their classes. A line on other files of
    each folder is added to `notes`. DataError as `class_folders`, and for a class folder without an image."""
    names: list[bytes] = []
    labels: list[int] = []
    for folder, label in class_folders(split, classes, notes):
        files = list_files(folder, ENDINGS, notes)
        names += _names(split, files)
        labels += [label] * len(files)
    return ImageFiles(split, np.array(names, np.bytes_), np.array(labels, np.int64))


def find_images(path: str | Path, notes: Notes = None) -> ImageFiles:
    """Return a file, or the images of a folder at any depth, with labels 0; DataError if none."""
    path = Path(path)
    files = list_files(path, ENDINGS, notes)
    root = path.parent if path.is_file() else path
    return ImageFiles(root, np.array(_names(root, files), np.bytes_), np.zeros(len(files), np.int64))


def _names(root: Path, files: Sequence[str]) -> list[bytes]:
    """Return the paths of files below `root`, from there."""
    start = len(os.path.join(root, ""))
    return [os.fsencode(file[start:]) for file in files]


def read_image(path: Path, channels: int) -> Image.Image:
    """Read an image as RGB (channels=3) or grey (1) of 8 bits, upright as its EXIF tag says.

    A palette gives its colours, what is transparent lies over white, and CMYK becomes RGB. 16 bits
    are scaled to 8, 0 to 65,535 to 0 to 255 (of grey with fewer bits that count, as the sBIT chunk
    of a PNG says, their range), and floats from 0 to 1 to 0 to 255. DataError for a damaged file,
    other ranges of numbers, and what `ndlightnet.data.image.image_files.open_image` refuses.
    """
    with readable(path), open_image(path) as file:
        image = decode(file)
        if image.mode in ("I", "F") or image.mode.startswith("I;16"):
            cells = np.asarray(image)
            image = _of_8_bits(cells, 1 if image.mode == "F" else largest_of(file, path, cells), path)
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, WHITE), image)
        return image.convert("RGB" if channels == 3 else "L")


def _of_8_bits(cells: NDArray[Any], most: int, path: Path) -> Image.Image:
    """Return a grey image of more than 8 bits as one of 8: Pillow would cut it off at 255."""
    if not (cells.min() >= 0 and cells.max() <= most):  # or not a number
        raise DataError(f"{path}: has values {cells.min()} to {cells.max()}, expected 0 to {most}")
    return Image.fromarray((cells * (255 / most)).round().astype(np.uint8))


def note_dark(files: ImageFiles, notes: list[str]) -> None:
    """Add a line to `notes` if images of 16 bits, in a sample of the files, use next to nothing of
    their range, as with 12 bits in a file of 16: few grey levels are left of 8 bits."""
    brightest = []
    for number in linspace_indices(min(LOOKED_AT, len(files)), len(files)):
        path = files.path(number)
        with suppress(DataError):  # it is named when it is used
            with readable(path), open_image(path) as file:
                deep = file.mode.startswith("I") or has_deep_colours(file)
            if deep:
                brightest.append(int(np.asarray(read_image(path, 3)).max()))
    if brightest and max(brightest) <= DARK:
        notes.append(
            f"{files.root}: the brightest pixel of {len(brightest)} 16-bit images becomes "
            f"{max(brightest)} of 255 in 8 bits, few grey levels are left: scale their values to 0 "
            "to 65,535, or write an sBIT chunk into grey PNG files"
        )


@dataclass(frozen=True)
class Sample:
    """What a worker sends of a file. image: (channels, height, width) uint8, None if unreadable.
    number: of the file. draw: a random number, in training. problems: a line for each bad file."""

    image: Tensor | None
    label: int
    number: int
    draw: int | None
    problems: list[str]


class FolderImages(Dataset[Sample]):
    """Dataset that reads `files` and transforms them.

    train: a file that cannot be read is replaced by the next good one, and the sample draws a
    number from torch's global generator, which `ndlightnet.data.sampling.SeededSamples` seeds.
    """

    def __init__(
        self, files: ImageFiles, channels: int, transform: Callable[[Image.Image], Tensor], train: bool = False
    ) -> None:
        self.files, self.channels, self.transform = files, channels, transform
        self.train = train

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        image, problems = None, []
        for number in range(index, index + (TRIES if self.train else 1)):
            number %= len(self)
            try:
                image = self.transform(read_image(self.files.path(number), self.channels))
                break
            except DataError as error:
                problems.append(str(error))
        draw = int(torch.randint(2**62, ())) if self.train else None
        return Sample(image, int(self.files.labels[number]), number, draw, problems)


def collate(samples: Sequence[Sample], space: Sequence[int], channels: int) -> tuple[Any, ...]:
    """Return a batch: images (batch, channels, *space) uint8, labels and numbers (batch,) int64 of
    the samples that could be read, the draw of the first one, the problems of all."""
    good = [(sample.image, sample.label, sample.number) for sample in samples if sample.image is not None]
    empty = torch.empty(0, channels, *space, dtype=torch.uint8)
    images = torch.stack([image for image, _, _ in good]) if good else empty
    labels = torch.tensor([label for _, label, _ in good], dtype=torch.int64)
    numbers = torch.tensor([number for _, _, number in good], dtype=torch.int64)
    problems = [line for sample in samples for line in sample.problems]
    return images, labels, numbers, samples[0].draw, problems
