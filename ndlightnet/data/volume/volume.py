"""Medical volumes on disk: NIfTI, NRRD and MetaImage files and DICOM series in, NIfTI label maps
out.

Everything keeps the grid of the file that it came from: `load_case` gives the voxels as they are
stored, with the affine from voxel indices to RAS millimetres, and `save_labels` writes onto that
same grid.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import nibabel
import numpy as np
import torch
from monai.data.meta_tensor import MetaTensor
from monai.transforms.spatial.array import ResampleToMatch
from nibabel import io_orientation, orientations
from numpy.typing import NDArray
from torch import Tensor

from ndlightnet.data.errors import DataError, readable, whole_file
from ndlightnet.data.volume.dicom import open_series
from ndlightnet.data.volume.formats import (
    ITK_ENDINGS,
    NIFTI_ENDINGS,
    SLAB,
    Stored,
    label_array,
    nifti_image,
    open_itk,
    open_nifti,
)
from ndlightnet.data.volume.formats import Case as Case

# Two grids are one when no corner is off by more than this share of the smallest voxel edge.
# Headers round: a qform holds a rotation as three float32, good to 3e-4 rad: 0.04 mm at 150 mm.
SAME_GRID = 0.1
T = TypeVar("T")


def check_cases(
    cases: Iterable[Case], num_classes: int, channels: int | None = None, *, progress: bool = True
) -> None:
    """Opens every file before a test starts, so that it does not fail hours later. Raises DataError
    as `load_checked`."""
    in_threads(
        lambda case: bool(load_checked(case, num_classes, channels)),  # nothing is kept
        list(cases), "checking volumes", progress,
    )  # fmt: skip


def in_threads(
    look: Callable[[Case], T], cases: Sequence[Case], title: str, progress: bool, workers: int = 4
) -> list[T]:
    """What `look` makes of each case, with a progress bar. An error ends it without the rest."""
    from rich.progress import track

    # inflating gzip, most of the work, releases the interpreter
    pool = ThreadPoolExecutor(max(1, workers))
    try:
        done = pool.map(look, cases)
        return list(track(done, title, total=len(cases), disable=not progress))
    finally:
        pool.shutdown(cancel_futures=True)


def load_checked(case: Case, num_classes: int, channels: int | None = None) -> dict[str, Any]:
    """`load_case`. Raises DataError, naming the file, for all that it refuses, for a label map with
    values outside 0..num_classes-1, and for another number of channels."""
    loaded = load_case(case)
    found = len(loaded["image"])
    if channels not in (None, found):
        raise DataError(f"{case.images[0]}: has {found} channels, expected {channels}")
    label = loaded.get("label", torch.zeros(1))
    low, high = int(label.min()), int(label.max())
    if low < 0 or high >= num_classes:
        expected = f"expected 0..{num_classes - 1}"
        raise DataError(f"{case.label}: has label values {low}..{high}, {expected}")
    return loaded


def load_case(case: Case) -> dict[str, Any]:
    """Reads one case: {"image", "label" (where there is one), "name", "notes"}.

    image: MetaTensor (channels, x, y, z), float32, in the file's own values (CT: Hounsfield units);
    the first file keeps its grid and the others are interpolated onto it, with their minimum where
    they do not reach. A file's fourth axis holds channels, a plane is one slice, and voxels that
    are NaN or infinite take the least finite value of their channel. label: MetaTensor
    (1, x, y, z), int16; a file with the same grid in another index order is turned. Both carry
    `.affine`, (4, 4) float64 from voxel indices to RAS mm. notes: tuple of str, a line for each
    thing that was decided for the user: "PATH: what".

    Raises DataError for a file that cannot be read, has an empty axis or another number of axes,
    an affine that cannot be inverted, voxel edges outside 0.001 to 100 mm, more than half of its
    voxels NaN or infinite, a label map off the first image's grid or with fractions, and a further
    image that lies wholly beside the first.

    While it reads, a file that is not compressed takes no more memory than its float32 voxels.
    """
    first, *others = (_open(path, case.slices) for path in case.images)
    label = None if case.label is None else _open(case.label)
    turns = None if label is None else _turns(label, first)
    image, notes = _voxels(first)
    channels = [image]
    for other in others:
        if not _overlap(first, other):
            raise DataError(f"{other.path}: does not overlap {first.path}")
        image, more = _voxels(other)
        notes += more
        channels.append(image if _same_grid(other, first) else _onto(image, other, first))
    affine = torch.from_numpy(first.affine)
    meta = {"original_affine": affine.clone(), "spatial_shape": first.shape[:3]}
    whole = channels[0] if len(channels) == 1 else torch.cat(channels)
    loaded: dict[str, Any] = {"name": case.name}
    loaded["image"] = MetaTensor(whole, affine=affine, meta=dict(meta))
    if label is not None:
        turned = orientations.apply_orientation(_labels(label)[0], turns)  # type: ignore[no-untyped-call]
        numbers = torch.from_numpy(np.ascontiguousarray(turned)[None])
        loaded["label"] = MetaTensor(numbers, affine=affine, meta=dict(meta))
        notes += label.notes
    return {**loaded, "notes": tuple(notes)}


def _open(path: Path, slices: Sequence[Path] = ()) -> Stored:
    with readable(path):
        if path.is_dir():
            return open_series(path, slices)
        is_itk = path.name.lower().endswith(ITK_ENDINGS)
        return open_itk(path) if is_itk else open_nifti(path)


def _voxels(stored: Stored) -> tuple[Tensor, list[str]]:
    """(channels, x, y, z) float32 without NaN or infinity; notes."""
    *space, channels = stored.shape
    with readable(stored.path), np.errstate(over="ignore"):  # beyond float32 is infinite: below
        voxels = np.empty((channels, *space), np.float32)
        for channel, z, part in stored.slabs():
            voxels[channel, :, :, z] = part
    notes = list(stored.notes)
    for values in voxels.reshape(channels, -1):
        bad, least = 0, np.inf
        parts = [values[low : low + SLAB] for low in range(0, len(values), SLAB)]
        for part in parts:
            finite = np.isfinite(part)
            bad += len(part) - int(finite.sum())
            least = min(least, float(part.min(where=finite, initial=np.inf)))
        if bad > len(values) / 2:
            raise DataError(f"{stored.path}: has {bad} voxels that are NaN or infinite, over half")
        if bad:
            notes.append(f"{stored.path}: {bad} voxels are NaN or infinite, taken as {least:.6g}")
            for part in parts:
                part[~np.isfinite(part)] = least
    return torch.from_numpy(voxels), notes


def _labels(stored: Stored) -> NDArray[np.int16]:
    """(1, x, y, z)."""
    with readable(stored.path), np.errstate(invalid="ignore"):
        numbers = np.empty((1, *stored.shape[:3]), np.int16)
        for _, z, part in stored.slabs():
            if not np.isfinite(part).all():
                raise DataError(f"{stored.path}: has labels that are NaN or infinite")
            numbers[0, :, :, z] = part
            if not np.array_equal(numbers[0, :, :, z], part):
                wrong = "has labels that are not whole numbers below 32768"
                raise DataError(f"{stored.path}: {wrong}")
    return numbers


def _same_grid(one: Stored, other: Stored) -> bool:
    return one.shape[:3] == other.shape[:3] and _apart(one, other) <= SAME_GRID * other.edges.min()


def _apart(one: Stored, other: Stored) -> float:
    return float(np.linalg.norm(one.corners - other.corners, axis=1).max())


def _turns(label: Stored, image: Stored) -> Any:
    """What brings the label's index axes into the order and the direction of the image's, for
    nibabel: the NIfTI and the DICOM of a scan may differ in them. DataError for another grid."""
    if label.shape[3] > 1:
        raise DataError(f"{label.path}: a label should have 3 axes, has shape {label.shape}")
    if _same_grid(label, image):  # where axes lie between two directions rounding may turn one
        return np.array([[axis, 1] for axis in range(3)])
    to, at = io_orientation(image.affine), io_orientation(label.affine)  # type: ignore[no-untyped-call]
    turns = orientations.ornt_transform(at, to)  # type: ignore[no-untyped-call]
    back = orientations.inv_ornt_aff(turns, label.shape[:3])  # type: ignore[no-untyped-call]
    shape = [label.shape[axis] for axis in np.argsort(turns[:, 0])]
    if _same_grid(replace(label, shape=(*shape, 1), affine=label.affine @ back), image):
        return turns
    if label.shape[:3] != image.shape[:3]:
        raise DataError(
            f"{label.path}: has shape {label.shape[:3]}, "
            f"its image {image.path.name} has {image.shape[:3]}"
        )
    raise DataError(
        f"{label.path}: has another affine than its image {image.path.name}; "
        f"corners are {_apart(label, image):.3g} mm apart"
    )


def _overlap(first: Stored, other: Stored) -> bool:
    """Whether the boxes around two volumes, on `other`'s index axes, have a part in common."""
    inside = first.corners @ np.linalg.inv(other.affine).T
    low, high = inside[:, :3].min(0), inside[:, :3].max(0)
    return bool((high >= -0.5).all() and (low <= np.array(other.shape[:3]) - 0.5).all())


def _onto(image: Tensor, grid: Stored, target: Stored) -> Tensor:
    volume = MetaTensor(image, affine=torch.from_numpy(grid.affine))
    like = MetaTensor(torch.empty(1, *target.shape[:3]), affine=torch.from_numpy(target.affine))
    # The resampler fills with zero, so zero is made to mean the minimum.
    least = image.amin((1, 2, 3), keepdim=True)
    resample: Any = ResampleToMatch(mode="bilinear", padding_mode="zeros", dtype=np.float64)
    shifted: Tensor = resample(volume - least, img_dst=like).as_tensor()
    return (shifted + least).float()


def save_labels(labels: Tensor | NDArray[Any], like: Case, path: str | Path) -> None:
    """Writes labels (x, y, z), whole numbers, as `.nii.gz` on the grid of `like`'s first image.

    uint8, or int16 where a label is above 255. The header (affine, spacing, sform and qform codes)
    is that of the NIfTI source; for any other source the affine is the one `load_case` gives. The
    file appears complete or not at all; its folder is made if needed.

    Raises ValueError for labels of another shape or kind, DataError when the source cannot be read
    or the file cannot be written.
    """
    path, source = Path(path), like.images[0]
    if not path.name.endswith(".nii.gz"):
        raise ValueError(f"labels are written as .nii.gz, got {path.name}")
    stored = _open(source, like.slices)
    array = label_array(labels, stored.shape[:3], source)
    volume: Any
    if source.name.lower().endswith(NIFTI_ENDINGS) and source.is_file():
        image = nifti_image(source)
        # Passing the header along with its own affine is what keeps both codes and transforms.
        volume = type(image)(array, image.affine, image.header)
    else:
        volume = nibabel.Nifti1Image(array, stored.affine)  # type: ignore[no-untyped-call]
        volume.set_sform(stored.affine, code=1)  # 1: the scanner's own space
        volume.header.set_xyzt_units("mm")
    volume.set_data_dtype(array.dtype)
    volume.header["cal_min"] = volume.header["cal_max"] = 0  # the image's display window
    with whole_file(path) as draft:
        nibabel.save(volume, draft)
