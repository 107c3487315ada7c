"""Labelled grey images, volumes and signals of one size, which fit into memory as bytes, and their batches.

They come from a folder with the four IDX files of MNIST and similar sets, or from a file of MedMNIST, an npz with
`{train,val,test}_images` (n, *space) and `{..}_labels` (n, 1); `val` may be missing.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ndlightnet.data.errors import DataError, readable
from ndlightnet.data.sampling import mixed

IDX = {"train": "train", "test": "t10k"}  # names of the splits here, and in file names


@dataclass(frozen=True)
class ImageSet:
    """Labelled images: images (n, *space) uint8, one axis of space or more; labels (n,) int64."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def pick(self, numbers: Sequence[int]) -> ImageSet:
        at = torch.tensor(numbers, dtype=torch.int64)
        return ImageSet(self.images[at], self.labels[at])


def read_images(path: str | Path) -> dict[str, ImageSet]:
    """Read the splits "train", "test" and, if present, "val" of a folder of IDX files or an npz.

    DataError names the file that is missing, damaged, does not fit the others or holds images in colour.
    """
    path = Path(path)
    arrays = _read_idx_folder(path) if path.is_dir() else _read_npz(path)
    splits = {}
    for split, (images, labels) in arrays.items():
        fit = labels.dtype.kind in "iu" and labels.size > 0 and images.shape[:1] == (labels.size,)
        space = arrays["train"][0].shape[1:]
        if images.dtype != np.uint8 or images.ndim < 2 or images.shape[1:] != space or not fit:
            raise DataError(
                f"{path}: {split} has images {images.shape} {images.dtype} and labels "
                f"{labels.shape} {labels.dtype}: expected uint8 images of one size, with one or "
                "more axes, and a whole number for each"
            )
        if images.ndim > 3 and images.shape[-1] == 3:  # MedMNIST's colour images, (n, 28, 28, 3)
            raise DataError(
                f"{path}: {split} has images {images.shape} with a last axis of 3, which is colour: "
                "expected grey images (n, *space)"
            )
        splits[split] = ImageSet(torch.from_numpy(images), torch.from_numpy(labels.reshape(-1).astype(np.int64)))
    return splits


def read_idx(path: Path) -> np.ndarray:
    """Read a file of bytes in the IDX format, at `path` or, compressed, at `path`.gz: 0, 0, 8, the
    number of axes, their sizes as big-endian 32-bit numbers, and the bytes.

    torchvision's reader is not used: for a damaged file it raises an AssertionError without a name.
    """
    compressed = path.with_name(path.name + ".gz")
    file = path if path.is_file() else compressed
    if not file.is_file():
        raise DataError(f"{path}: no such file, nor {compressed.name}")
    with readable(file):
        content = file.read_bytes()
        content = gzip.decompress(content) if file == compressed else content
    axes = content[3] if content[:3] == b"\0\0\x08" and len(content) > 3 else 0
    start = 4 + 4 * axes
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4)]
    if not axes or len(content) != start + math.prod(shape):
        raise DataError(f"{file}: damaged, or not bytes in the IDX format")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()


def _read_idx_folder(folder: Path) -> dict[str, list[np.ndarray]]:
    files = ("images-idx3", "labels-idx1")
    return {split: [read_idx(folder / f"{name}-{kind}-ubyte") for kind in files] for split, name in IDX.items()}


def _read_npz(path: Path) -> dict[str, list[np.ndarray]]:
    if not path.is_file():
        raise DataError(f"{path}: no such file or folder")
    with readable(path), np.load(path, allow_pickle=False) as file:
        splits = ("train", "val", "test") if "val_images" in file else ("train", "test")
        return {split: [file[f"{split}_{kind}"] for kind in ("images", "labels")] for split in splits}


def mean_and_std(images: Tensor) -> tuple[float, float]:
    """Return mean and standard deviation (1 if all values are equal) of a uint8 tensor."""
    counts = torch.bincount(images.flatten(), minlength=256).double()
    values = torch.arange(256, dtype=torch.float64)
    mean = (counts * values).sum() / counts.sum()
    std = ((counts * (values - mean).square()).sum() / counts.sum()).sqrt()
    return float(mean), float(std) or 1.0


def moved(images: Tensor, shifts: Tensor, flips: Tensor) -> Tensor:
    """Shift and mirror each image of a batch (batch, 1, *space) separately, on any device.

    shifts: (batch, axes) cells towards the end of each axis; cells that come in are 0. flips: bool
    (batch, axes): mirror along this axis, before the shift.
    """
    for axis, size in enumerate(images.shape[2:]):
        source = torch.arange(size, device=images.device) - shifts[:, axis, None]
        inside = (source >= 0) & (source < size)
        source = torch.where(flips[:, axis, None], size - 1 - source, source).clamp(0, size - 1)
        line = (len(images), *(size if i == axis + 2 else 1 for i in range(1, images.ndim)))
        images = images.gather(axis + 2, source.view(line).expand_as(images)) * inside.view(line)
    return images


class Batches:
    """A set in order: batches (images (batch, 1, *space) uint8, labels (batch,), numbers (batch,)).

    No worker processes are needed: a batch is one copy. replica: (rank, number of replicas).
    """

    def __init__(self, data: ImageSet, size: int, replica: tuple[int, int] = (0, 1)) -> None:
        self.data, self.size, self.replica = data, size, replica

    def __len__(self) -> int:
        count = len(range(self.replica[0], len(self.data), self.replica[1]))
        return -(-count // self.size)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        yield from map(self._batch, self._batches(torch.arange(len(self.data))))

    def _batches(self, order: Tensor) -> tuple[Tensor, ...]:
        return order[self.replica[0] :: self.replica[1]].split(self.size)[: len(self)]

    def _batch(self, numbers: Tensor) -> tuple[Tensor, ...]:
        images = self.data.images.index_select(0, numbers)[:, None]
        return images, self.data.labels.index_select(0, numbers), numbers


class ShuffledBatches(Batches):
    """Whole batches in a random order for each epoch, each with the shifts and flips for `moved`.

    The random draws depend on `seed`, epoch and replica alone, not on the network that is trained.

    Args:
        shift: largest shift in cells along every axis, either way. flips: axes to mirror, with probability 1/2.
    """

    def __init__(
        self,
        data: ImageSet,
        size: int,
        replica: tuple[int, int] = (0, 1),
        *,
        shift: int = 0,
        flips: Sequence[int] = (),
        seed: int = 0,
    ) -> None:
        super().__init__(data, size, replica)
        self.shift, self.seed, self.epoch = shift, seed, 0
        self.flips = torch.tensor([axis in flips for axis in range(data.images.ndim - 1)])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def sampler(self) -> ShuffledBatches:
        """Return this object: Lightning looks for `set_epoch` at `sampler`."""
        return self

    def __len__(self) -> int:
        # the same on every replica; a set smaller than a batch is one batch
        return max(1, len(self.data) // self.replica[1] // self.size)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        rng = torch.Generator().manual_seed(mixed(self.seed, self.epoch))
        order = torch.randperm(len(self.data), generator=rng)
        # different shifts and flips on each replica
        rng.manual_seed(mixed(self.seed, self.epoch, 1 + self.replica[0]))
        for numbers in self._batches(order):
            each = (len(numbers), len(self.flips))
            shifts = torch.randint(-self.shift, self.shift + 1, each, generator=rng)
            flips = (torch.rand(each, generator=rng) < 0.5) & self.flips
            yield *self._batch(numbers), shifts, flips


class SeededBatches(ShuffledBatches):
    """The batches of ShuffledBatches, each with a seed (an int) in place of shifts and flips."""

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        base = (self.seed, self.epoch, 1 + self.replica[0])
        for number, (*batch, _shifts, _flips) in enumerate(super().__iter__()):
            yield *batch, mixed(*base, number)
