"""Prepared volumes, in memory or in a folder, for training and validation."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from monai.data.meta_tensor import MetaTensor
from torch import Tensor
from torch.utils.data import Dataset

from ndlightnet.data.errors import atomic_write, readable
from ndlightnet.data.threads import in_threads
from ndlightnet.data.volume.file_grid import Case
from ndlightnet.data.volume.formats import companions
from ndlightnet.data.volume.transforms import Prepare
from ndlightnet.data.volume.volume import Volume

KEPT_PER_CLASS = 20_000  # crop centres stored for every class of a volume; they are held in memory
FORM = 4  # to be raised when what a cache folder holds changes, so that old files are not used


class CachedVolumes(Dataset[dict[str, Any]]):
    """Dataset of prepared cases. held: the dictionary of each case, or the file that has it."""

    def __init__(self, held: Sequence[dict[str, Any] | Path]) -> None:
        self.held = list(held)

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, number: int) -> dict[str, Any]:
        data = self.held[number]
        if isinstance(data, Path):
            with readable(data):  # mapped: a crop reads its part of the file, not the whole
                data = torch.load(data, mmap=True, weights_only=True)
        affine = data["affine"]
        return {**data, **{key: MetaTensor(data[key], affine) for key in ("image", "label")}}


# MONAI's datasets are not used: they turn an error in a transform into a RuntimeError without our
# message, and the dataset that writes files returns other types than it was given.
def cached_volumes(
    cases: Sequence[Case],
    prepare: Prepare,
    classes: int,
    patch: Sequence[int] | None = None,
    workers: int = 2,
    folder: str | None = None,
) -> CachedVolumes:
    """Prepare all labelled cases before returning, with `workers` threads: held in memory or, with `folder`, in a file
    for each case, which later runs find and any number of folds share.

    Each has: "image", MetaTensor (channels, x, y, z) float32, "label", MetaTensor (1, x, y, z) uint8 or int16,
    "affine", "name", and "value_units" of the files' channels. (A series over time has its frames before x.) With
    `patch`, for Crops, they are padded to it and have "places": for each of `classes` but the background the flat
    indices of up to KEPT_PER_CLASS voxels, int64. Raises DataError as `Volume.read` and `prepare` do.
    """

    def made(case: Case) -> dict[str, Any]:
        volume = Volume.read(case, classes, len(prepare.intensities))
        data = {**prepare(volume), "value_units": volume.value_units}
        del volume
        if patch is not None:
            data = {**data, **{key: padded(data[key], patch) for key in ("image", "label")}}
            flat = data["label"].as_tensor().flatten()
            data["places"] = [_some(flat == number) for number in range(1, classes)]
        affine = data["image"].affine
        return {**data, **{k: data[k].as_tensor() for k in ("image", "label")}, "affine": affine}

    def held(case: Case) -> dict[str, Any] | Path:
        if folder is None:
            return made(case)
        file = Path(folder) / f"{case.name}.{_key(case, prepare, classes, patch)}.pt"
        if not file.exists():
            content = made(case)
            with atomic_write(file) as draft, draft.open("wb") as file_object:
                torch.save(content, file_object)
        return file

    return CachedVolumes(in_threads(held, cases, "preparing volumes", workers=workers))


def padded(volume: Any, patch: Sequence[int]) -> Any:
    """Pad a MetaTensor (channels, [frames,] x, y, z) with zeros on both sides of each axis that is shorter than
    `patch`. (MONAI's transform takes no frames.)"""
    missing = [max(0, size - n) for n, size in zip(volume.shape[1:], patch, strict=True)]
    if not any(missing):
        return volume
    before = [n // 2 for n in missing]
    sides = [(low, n - low) for low, n in zip(before, missing, strict=True)]
    cells = torch.nn.functional.pad(volume.as_tensor(), [n for side in sides[::-1] for n in side])
    affine = volume.affine.clone()
    affine[:3, 3] -= affine[:3, :3] @ affine.new_tensor(before[-3:])
    return MetaTensor(cells, affine)


def _some(mask: Tensor) -> Tensor:
    """Return flat indices of up to KEPT_PER_CLASS cells of a mask, spread evenly over all."""
    places = mask.nonzero()[:, 0]
    return places[:: max(1, -(-len(places) // KEPT_PER_CLASS))].clone()


def _key(case: Case, prepare: Prepare, classes: int, patch: Sequence[int] | None) -> str:
    """Return a hash that differs for every way to prepare and every state of the files."""
    paths = [path for path in (*case.images, case.label) if path is not None]
    files = [
        file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path, *companions(path)])
    ]
    existing = [f for f in files if f.is_file()]  # a link may lead nowhere
    states = [(str(f.resolve()), f.stat().st_mtime_ns, f.stat().st_size) for f in existing]
    preparation = (prepare.intensities, prepare.spacing, prepare.channels, classes, patch, case.over_time)
    return hashlib.sha256(repr((FORM, preparation, states)).encode()).hexdigest()[:16]
