"""Between `volumes.load_case` and a network: volumes are turned, resampled and scaled, and labels
find the way back.

A prepared volume lies along RAS axes (x to the right, y to the front, z to the head), whatever
index order its file has: left and right are not to be guessed. That is a flip and a permutation,
nothing is interpolated unless a spacing is asked for.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from monai.data.dataset import CacheDataset, PersistentDataset
from monai.transforms.compose import Compose
from monai.transforms.croppad.dictionary import SpatialPadd
from monai.transforms.spatial.array import Orientation, Spacing
from monai.transforms.transform import MapTransform, Transform
from monai.transforms.utility.dictionary import ClassesToIndicesd
from numpy.typing import NDArray
from torch import Tensor

from ndlightnet.data.errors import DataError
from ndlightnet.data.volumes import Case, load_case

KEPT_PER_CLASS = 20_000  # crop centres kept for every class of a volume; they are held in memory
SAMPLE = 1_000_000  # voxels that percentiles are taken of
MOST_VOXELS = 2**31  # a resampled volume of more is refused: the spacing is not meant


@dataclass(frozen=True)
class Intensity:
    """How a channel becomes numbers of order one: (clipped to low..high - mean) / deviation, in the
    file's own units (CT: Hounsfield units). Without numbers each volume is clipped to its own
    percentiles 0.5 and 99.5 and brought to mean 0 and deviation 1, for scanners without units
    (MRI)."""

    low: float | None = None
    high: float | None = None
    mean: float | None = None
    deviation: float | None = None

    def __post_init__(self) -> None:
        given = [value is not None for value in (self.low, self.high, self.mean, self.deviation)]
        if any(given) != all(given):
            raise ValueError(f"{self}: expected all four numbers or none")
        if all(given) and not (self.low < self.high and self.deviation > 0):  # type: ignore[operator]
            raise ValueError(f"{self}: expected low < high and deviation > 0")

    def scale_(self, x: Tensor) -> None:
        """In place: a volume is not held twice."""
        if self.mean is not None:
            x.clamp_(self.low, self.high).sub_(self.mean).div_(self.deviation)  # type: ignore[arg-type]
            return
        some = x.flatten()[:: max(1, x.numel() // SAMPLE)]
        low, high = torch.quantile(some[: 2 * SAMPLE], torch.tensor([0.005, 0.995])).tolist()
        x.clamp_(low, high).sub_(x.mean(dtype=torch.float64).float())
        x.div_(x.std(correction=0).clamp_min(1e-8))


class Prepare(Transform):
    """What `load_case` returns -> the same along RAS axes, at `spacing` (mm along x, y, z; None:
    the file's own), every channel scaled by its Intensity, and of these the `channels` by number
    (None: all). It takes the volumes out of the dictionary that it is given."""

    def __init__(
        self,
        intensities: Sequence[Intensity],
        spacing: Sequence[float] | None = None,
        channels: Sequence[int] | None = None,
    ) -> None:
        self.intensities, self.spacing = list(intensities), spacing
        self.channels = list(range(len(self.intensities)) if channels is None else channels)

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        image, label = data.pop("image"), data.pop("label", None)
        if len(image) != len(self.intensities):
            raise ValueError(f"{len(image)} channels for {len(self.intensities)} intensities")
        turn = Orientation("RAS", labels=None)
        if self.channels != list(range(len(image))):
            image = image[self.channels]
        prepared = {**data, "image": self._resampled(turn(image), "bilinear", data["name"])}
        del image
        for channel, number in zip(prepared["image"].as_tensor(), self.channels, strict=True):
            self.intensities[number].scale_(channel)
        if label is not None:
            whole = self._resampled(turn(label), "nearest", data["name"])
            prepared["label"] = whole.to(torch.uint8 if whole.max() < 256 else torch.int16)
        return prepared

    def _resampled(self, volume: Any, mode: str, name: str) -> Any:
        if self.spacing is None:
            return volume
        edges = [e * n for e, n in zip(volume.pixdim.tolist(), volume.shape[1:], strict=True)]
        shape = [max(1, round(e / s)) for e, s in zip(edges, self.spacing, strict=True)]
        if int(np.prod(shape, dtype=np.float64)) > MOST_VOXELS:
            raise DataError(
                f"{name}: resampled to {list(self.spacing)} mm it would have the shape {shape}"
            )
        return Spacing(tuple(self.spacing), mode=mode)(volume)


class ScaleChannelsd(MapTransform):
    """The last step of Prepare by itself, among MONAI's dictionary transforms: of an image
    (channels, *space) the `channels` by number (None: all), each scaled by its Intensity."""

    def __init__(
        self, keys: Any, intensities: Sequence[Intensity], channels: Sequence[int] | None = None
    ) -> None:
        super().__init__(keys)
        self.intensities = list(intensities)
        self.channels = list(range(len(self.intensities)) if channels is None else channels)

    def __call__(self, data: Mapping[Any, Any]) -> dict[Any, Any]:
        scaled = dict(data)
        for key in self.key_iterator(scaled):
            if len(scaled[key]) != len(self.intensities):
                raise ValueError(
                    f"{key}: {len(scaled[key])} channels, expected {len(self.intensities)}"
                )
            scaled[key] = scaled[key][self.channels]  # a copy
            for channel, number in zip(scaled[key].as_tensor(), self.channels, strict=True):
                self.intensities[number].scale_(channel)
        return scaled


def file_grid(prepared: dict[str, Any]) -> tuple[tuple[int, ...], NDArray[np.float64]] | None:
    """The file's grid along RAS axes: its shape and the (4, 4) matrix from its voxel indices to
    those of `prepared["image"]`, diagonal but for the offset. None: it is the same grid."""
    image = prepared["image"]
    turns, affine = _turns(image)
    shape = tuple(image.meta["spatial_shape"])
    ras = [0, 0, 0]
    for axis, (to, _) in enumerate(turns):
        ras[int(to)] = shape[axis]
    back = nibabel.orientations.inv_ornt_aff(turns, shape)  # type: ignore[no-untyped-call]
    matrix = np.linalg.inv(image.affine.numpy()) @ affine @ back
    if tuple(ras) == tuple(image.shape[1:]) and np.allclose(matrix, np.eye(4), atol=1e-3):
        return None
    matrix[:3, :3] = np.diag(np.diag(matrix[:3, :3]))  # what is beside is rounding
    return tuple(ras), matrix


def to_file(labels: Tensor, prepared: dict[str, Any]) -> NDArray[Any]:
    """Labels (x, y, z) on `file_grid` -> a view of them in the file's index order."""
    turns, _ = _turns(prepared["image"])
    ras = nibabel.orientations.axcodes2ornt("RAS")  # type: ignore[no-untyped-call]
    back = nibabel.orientations.ornt_transform(ras, turns)  # type: ignore[no-untyped-call]
    turned: NDArray[Any] = nibabel.orientations.apply_orientation(labels.numpy(), back)  # type: ignore[no-untyped-call]
    return turned


def _turns(image: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Where the file's axes go, as nibabel says it, and the file's affine."""
    affine = np.asarray(image.meta["original_affine"])
    return nibabel.io_orientation(affine), affine  # type: ignore[no-untyped-call]


class LoadCase(Transform):
    """`load_case` as a MONAI transform, so that the cache takes it for a deterministic one."""

    def __call__(self, data: Case) -> dict[str, Any]:
        return load_case(data)


def volume_dataset(
    cases: Sequence[Case],
    prepare: Prepare,
    patch: Sequence[int] | None = None,
    classes: int = 2,
    workers: int = 2,
    folder: str | None = None,
    progress: bool = True,
) -> Any:
    """Cases as a dataset that holds them prepared in memory, read with `workers` threads, or, with
    `folder`, on a disk, where the next run finds them.

    With `patch`, for Crops: padded to it, with "label_cls_indices" of `classes`.
    """
    steps: list[Transform] = [LoadCase(), prepare]
    if patch is not None:
        steps += [
            SpatialPadd(("image", "label"), patch),
            ClassesToIndicesd("label", num_classes=classes, max_samples_per_class=KEPT_PER_CLASS),
        ]
    if folder is not None:
        return PersistentDataset(list(cases), Compose(steps), _place(folder, cases, prepare, patch))
    return CacheDataset(list(cases), Compose(steps), num_workers=workers, progress=progress)


def _place(
    folder: str, cases: Sequence[Case], prepare: Prepare, patch: Sequence[int] | None
) -> Path:
    """A folder of its own for every way to prepare and every state of the files."""
    files = [file for case in cases for file in (*case.images, case.label) if file is not None]
    times = [(str(file), file.stat().st_mtime_ns) for file in files]
    said = repr((prepare.intensities, prepare.spacing, prepare.channels, patch, times))
    return Path(folder) / hashlib.sha256(said.encode()).hexdigest()[:16]
