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
from monai.data.meta_tensor import MetaTensor
from monai.transforms.croppad.dictionary import SpatialPadd
from monai.transforms.spatial.array import Orientation, Spacing
from monai.transforms.transform import MapTransform
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from ndlightnet.data.errors import DataError, readable, whole_file
from ndlightnet.data.volume.volume import Case, in_threads, load_checked

KEPT_PER_CLASS = 20_000  # crop centres kept for every class of a volume; they are held in memory
SAMPLE = 1_000_000  # voxels that percentiles are taken of
MOST_VOXELS = 2**31  # a resampled volume of more is refused: the spacing is not meant
KEPT_FORM = 1  # to be raised when what a cache folder holds changes, so that old files are not used


@dataclass(frozen=True)
class Intensity:
    """How a channel becomes numbers of order one: (clipped to low..high - mean) / deviation, in the
    file's own units (CT: Hounsfield units). Without numbers each volume is clipped to its own
    percentiles 0.5 and 99.5 and brought to mean 0 and deviation 1, for scanners without units
    (MRI). Raises DataError for some of the numbers without the others, and for an empty range."""

    low: float | None = None
    high: float | None = None
    mean: float | None = None
    deviation: float | None = None

    def __post_init__(self) -> None:
        given = [value is not None for value in (self.low, self.high, self.mean, self.deviation)]
        if any(given) != all(given):
            raise DataError(f"{self}: expected all four numbers or none")
        if all(given) and not (self.low < self.high and self.deviation > 0):  # type: ignore[operator]
            raise DataError(f"{self}: expected low < high and deviation > 0")

    def scale_(self, x: Tensor) -> None:
        """x (x, y, z) float32, in place: a volume is not held twice."""
        if self.mean is not None:
            x.clamp_(self.low, self.high).sub_(self.mean).div_(self.deviation)  # type: ignore[arg-type]
            return
        some = x
        if x.numel() > SAMPLE:  # every nth voxel may lie in few planes, and x need not be dense
            chance = torch.Generator().manual_seed(0)
            some = x[tuple(torch.randint(n, (SAMPLE,), generator=chance) for n in x.shape)]
        low, high = torch.quantile(some.flatten(), torch.tensor([0.005, 0.995])).tolist()
        # in one pass and in double; x.mean(dtype=float64) would make a copy of twice the size
        deviation, mean = torch.std_mean(x.clamp_(low, high), correction=0)
        x.sub_(mean).div_(deviation.clamp_min(1e-8))


class Prepare:
    """What `load_case` returns -> the same along RAS axes, at `spacing` (mm along x, y, z; None:
    the file's own), every channel scaled by its Intensity, and of these the `channels` by number
    (None: all). It takes the volumes out of the dictionary that it is given.

    Raises DataError for a spacing that is none, and for one at which a volume is far too large."""

    def __init__(
        self,
        intensities: Sequence[Intensity],
        spacing: Sequence[float] | None = None,
        channels: Sequence[int] | None = None,
    ) -> None:
        if spacing is not None and (len(spacing) != 3 or not all(0 < s < np.inf for s in spacing)):
            raise DataError(f"data.spacing: {list(spacing)}, expected three edges above 0 (mm)")
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
                f"data.spacing: {list(self.spacing)} mm, at which {name} would have the shape "
                f"{shape}: expected one of at most {MOST_VOXELS} voxels"
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


class Prepared(Dataset[dict[str, Any]]):
    """Cases made ready once. held: of each the dictionary, or the file that has it."""

    def __init__(self, held: Sequence[dict[str, Any] | Path]) -> None:
        self.held = list(held)

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, number: int) -> dict[str, Any]:
        data = self.held[number]
        if isinstance(data, Path):
            with readable(data):  # mapped: a crop reads its own part of the file, not the whole
                data = torch.load(data, mmap=True, weights_only=True)
        affine = data["affine"]
        return {**data, **{key: MetaTensor(data[key], affine) for key in ("image", "label")}}


# MONAI's datasets are not used: an error in a transform becomes a RuntimeError of theirs, without
# our line, and the one that keeps files gives other types than those that went in.
def volume_dataset(
    cases: Sequence[Case],
    prepare: Prepare,
    classes: int,
    patch: Sequence[int] | None = None,
    workers: int = 2,
    folder: str | None = None,
    progress: bool = True,
) -> Prepared:
    """Labelled cases, all prepared before this returns, with `workers` threads: held in memory, or,
    with `folder`, in a file for each case, which later runs find and any number of folds share.

    Of each: "image", MetaTensor (channels, x, y, z) float32, "label", MetaTensor (1, x, y, z) uint8
    or int16, "affine", "name", "notes". With `patch`, for Crops: padded to it, and "places", for
    each of `classes` but the background the flat indices of up to KEPT_PER_CLASS voxels, int64.
    Raises DataError as `load_checked`, and as `prepare`.
    """
    pad: Any = None if patch is None else SpatialPadd(("image", "label"), patch)

    def made(case: Case) -> dict[str, Any]:
        data = prepare(load_checked(case, classes, len(prepare.intensities)))
        if pad is not None:
            data = pad(data)
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
            with whole_file(file) as draft, draft.open("wb") as kept:
                torch.save(content, kept)
        return file

    return Prepared(in_threads(held, cases, "preparing volumes", progress, workers))


def _some(mask: Tensor) -> Tensor:
    """Flat indices of up to KEPT_PER_CLASS cells of a mask, spread evenly over all."""
    places = mask.nonzero()[:, 0]
    return places[:: max(1, -(-len(places) // KEPT_PER_CLASS))].clone()


def _key(case: Case, prepare: Prepare, classes: int, patch: Sequence[int] | None) -> str:
    """Another one for every way to prepare and every state of the files."""
    given = [path for path in (*case.images, case.label) if path is not None]
    files = [f for path in given for f in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    there = [f for f in files if f.is_file()]  # a link may lead nowhere
    states = [(str(f.resolve()), f.stat().st_mtime_ns, f.stat().st_size) for f in there]
    how = (prepare.intensities, prepare.spacing, prepare.channels, classes, patch)
    return hashlib.sha256(repr((KEPT_FORM, how, states)).encode()).hexdigest()[:16]
