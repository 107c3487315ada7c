"""Volumes to classify in folders, `train/CLASS/*`, `test/CLASS/*` and, optionally, `val/CLASS/*`, resampled to one size
as bytes.

A volume keeps its proportions and its size in millimetres: all are resampled to the same spacing along RAS axes, and
cropped or padded with 0 about the centre. Its values are scaled to 0 to 255 between its percentiles 0.5 and 99.5: two
CT scans are not on one scale of Hounsfield units.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from monai.transforms.croppad.array import ResizeWithPadOrCrop
from torch import Tensor

from ndlightnet.data.errors import DataError
from ndlightnet.data.folders import Notes, class_folders, class_names
from ndlightnet.data.image.image_sets import ImageSet
from ndlightnet.data.threads import in_threads
from ndlightnet.data.volume.datasets import find_inputs
from ndlightnet.data.volume.file_grid import Case
from ndlightnet.data.volume.volume import Volume, upright

PERCENTILES = (0.5, 99.5)


def list_classes(root: str | Path, notes: Notes = None) -> tuple[tuple[str, ...], dict[str, list[tuple[Case, int]]]]:
    """Return the sorted names of the classes, and for each split its (case, number of the class). `find_inputs` says
    what a class's folder may hold; a line on entries that are left out of each is added to `notes`. DataError as
    `class_folders` and `find_inputs`."""
    root = Path(root)
    classes = class_names(root / "train")
    splits = [name for name in ("train", "val", "test") if name != "val" or (root / name).exists()]
    return classes, {
        split: [
            (case, label)
            for folder, label in class_folders(root / split, classes, notes)
            for case in find_inputs(folder, notes=notes)
        ]
        for split in splits
    }


def load_upright(case: Case) -> Any:
    """Read a MetaTensor (1, x, y, z) float32 along RAS axes; DataError for several channels."""
    return upright(Volume.read(case, channels=1).image)


def largest_extent(cases: Sequence[Case]) -> list[float]:
    """Return the largest extent of the volumes in mm along x, y and z; all of them are read."""

    def extent(case: Case) -> np.ndarray:
        image = load_upright(case)
        return np.array(image.shape[1:]) * image.pixdim.numpy()

    return np.max(in_threads(extent, cases, "measuring volumes"), axis=0).tolist()


def read_volume(case: Case, size: Sequence[int], spacing: Sequence[float]) -> Tensor:
    """Read a volume as (*size) uint8, cells of `spacing` mm: averaged along axes where cells get larger, linearly
    interpolated along the others.

    DataError as `Volume.read`, and for more than one channel or a single value in all voxels.
    """
    image = load_upright(case)
    edges, values = image.pixdim.tolist(), image.as_tensor()
    low, high = np.percentile(values.numpy(), PERCENTILES)
    if low == high:  # such as a small mask
        low, high = float(values.min()), float(values.max())
    if low == high:
        raise DataError(f"{case.images[0]}: has the value {low:g} and no other")
    scaled = ((values.clamp(low, high) - low) / (high - low) * 255)[None]
    cells = list(zip(scaled.shape[2:], edges, spacing, strict=True))
    shape = [max(1, round(count * edge / mm)) for count, edge, mm in cells]
    smaller = [min(now, count) for now, (count, *_) in zip(shape, cells, strict=True)]
    means = F.interpolate(scaled, smaller, mode="area")
    fit: Any = ResizeWithPadOrCrop(size)
    fitted = fit(F.interpolate(means, shape, mode="trilinear")[0]).as_tensor()
    return torch.as_tensor(fitted[0].round().to(torch.uint8))


def read_part(cases: Sequence[tuple[Case, int]], size: Sequence[int], spacing: Sequence[float]) -> ImageSet:
    """Read a split into memory; the first case that cannot be used raises its DataError."""
    images = in_threads(lambda each: read_volume(each[0], size, spacing), cases, "reading volumes")
    return ImageSet(torch.stack(images), torch.tensor([label for _, label in cases]))
