"""Volumes to classify in folders, `train/CLASS/*`, `test/CLASS/*` and, if there, `val/CLASS/*`,
brought to one size as bytes.

A volume keeps its proportions and its size in millimetres: all are resampled to the same spacing
along RAS axes, and cut or filled with 0 about the middle. Its values become 0 to 255 between its
own percentiles 0.5 and 99.5: two CT scans are not on one scale of Hounsfield units.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from monai.transforms.croppad.array import ResizeWithPadOrCrop
from torch import Tensor

from ndlightnet.data.errors import DataError
from ndlightnet.data.folders import leave_out
from ndlightnet.data.images import ImageSet
from ndlightnet.data.volume.datasets import find_inputs
from ndlightnet.data.volume.grid import Case
from ndlightnet.data.volume.volume import Volume, upright

PERCENTILES = (0.5, 99.5)
THREADS = 4  # threads; inflating gzip, most of the work, releases the interpreter


def list_classes(
    root: str | Path, notes: list[str] | None = None
) -> tuple[tuple[str, ...], dict[str, list[tuple[Case, int]]]]:
    """The names of the classes, sorted, and of each part its (volume, number of the class).

    What a class's folder may hold is said by `find_inputs`, a line on what is left out in each is
    added to `notes`. DataError for a missing part, a single
    class, a class that train does not have, and a folder without a volume.
    """
    root = Path(root)
    classes = tuple(path.name for path in _folders(root / "train"))
    if len(classes) < 2:
        raise DataError(f"{root / 'train'}: has the classes {list(classes)}, expected two or more")
    parts: dict[str, list[tuple[Case, int]]] = {}
    for part in ("train", "val", "test"):
        if part == "val" and not (root / part).exists():
            continue
        parts[part] = found = []
        for folder in _folders(root / part):
            if folder.name not in classes:
                raise DataError(f"{folder}: a class that train lacks, it has {list(classes)}")
            label = classes.index(folder.name)
            found += [(case, label) for case in find_inputs(folder, notes=notes)]
        if not found:
            raise DataError(f"{root / part}: has no class's folder")
        beside = [path for path in (root / part).iterdir() if not path.is_dir()]
        leave_out(beside, root / part, "a folder for each class", notes)
    return classes, parts


def _folders(path: Path) -> list[Path]:
    if not path.is_dir():
        raise DataError(f"{path}: no such folder")
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def load_upright(case: Case) -> Any:
    """A MetaTensor (1, x, y, z), float32, along RAS axes; DataError for more channels than one."""
    return upright(Volume.read(case, channels=1).image)


def largest_extent(cases: Sequence[Case]) -> list[float]:
    """The most mm that any of the volumes takes along x, y and z; all of them are read."""

    def extent(case: Case) -> np.ndarray:
        image = load_upright(case)
        return np.array(image.shape[1:]) * image.pixdim.numpy()

    with ThreadPoolExecutor(THREADS) as pool:
        return np.max(list(pool.map(extent, cases)), axis=0).tolist()


def read_volume(case: Case, size: Sequence[int], spacing: Sequence[float]) -> Tensor:
    """(*size) uint8, cells of `spacing` mm: means along axes where cells get larger, linear along
    the others.

    DataError where `Volume.read` refuses it, for more channels than one and for one value only.
    """
    image = load_upright(case)
    edges, values = image.pixdim.tolist(), image.as_tensor()
    low, high = np.percentile(values.numpy(), PERCENTILES)
    if low == high:  # a small mask
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


def read_part(
    cases: Sequence[tuple[Case, int]], size: Sequence[int], spacing: Sequence[float]
) -> ImageSet:
    """All of a part in memory; the first that cannot be used raises its DataError."""
    with ThreadPoolExecutor(THREADS) as pool:
        images = list(pool.map(lambda each: read_volume(each[0], size, spacing), cases))
    return ImageSet(torch.stack(images), torch.tensor([label for _, label in cases]))
