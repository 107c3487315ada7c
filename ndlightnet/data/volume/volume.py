"""The volume of one case, read once from its files, and the way of labels back onto its grid."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data.meta_tensor import MetaTensor
from monai.transforms.spatial.array import Orientation, ResampleToMatch
from nibabel import io_orientation, orientations
from numpy.typing import NDArray
from torch import Tensor

from ndlightnet.data.errors import DataError, atomic_write, readable
from ndlightnet.data.volume.dicom import save_segmentation
from ndlightnet.data.volume.file_grid import Case, FileGrid, Read
from ndlightnet.data.volume.formats import open_file

# Two grids are the same if no corner is off by more than this fraction of the smallest voxel edge.
# Headers round: a qform holds a rotation as three float32, good to 3e-4 rad: 0.04 mm at 150 mm.
SAME_GRID = 0.1
# Labels that a slope and an intercept in float32 turn into numbers, such as 255 x 1/255, are off by
# at most the largest of them times the precision.
LABEL_ERROR = 2**15 * float(np.finfo(np.float32).eps)


@dataclass(frozen=True, eq=False)
class Volume:
    """Voxels of a case, for training, metrics and figures, and the grid to write its labels on.

    image: MetaTensor (channels, x, y, z), float32, in the file's units (CT: Hounsfield units).
    label: MetaTensor (1, x, y, z), int16, or None. A series over time has its frames before the axes of space:
    (channels, frames, x, y, z) and (1, frames, x, y, z). Both are in the index order of the first image and carry
    `.affine`, (4, 4) float64 from voxel indices to RAS mm. grid: of the first image.
    notes: a line "PATH: what" for each decision made for the user. value_units: see `FileGrid.value_unit`.
    """

    case: Case
    image: Any
    label: Any
    grid: FileGrid
    notes: tuple[str, ...]
    value_units: tuple[str, ...] = ()

    @classmethod
    def read(cls, case: Case, classes: int | None = None, channels: int | None = None) -> Volume:
        """Reads the voxels of every file of the case once.

        The first file gives the grid; the others are interpolated onto it, and take their minimum outside their extent.
        A file's fourth axis holds channels, or frames if the case is a series over time, where each channel is a file.
        A plane is one slice, and voxels that are NaN or infinite take the least finite value of their channel (and
        frame). A label map with the same grid in another index order is flipped and permuted.

        Raises DataError for a file that cannot be read, has an empty axis or another number of axes, an affine that
        cannot be inverted, voxel edges outside 0.001 to 100 mm, more than half of its voxels NaN or infinite, a label
        map off the first image's grid or with fractions, a further image that lies wholly beside the first, channels of
        a picture in different sizes, label values outside 0..classes-1, another number of channels than `channels`,
        and, of a series over time, files with different numbers of frames and DICOM.

        While it reads, a file that is not compressed takes no more memory than its float32 voxels.
        """
        opened = [open_file(path, case.slices) for path in case.images]
        label = None if case.label is None else open_file(case.label, label=True)
        first = opened[0][0]
        if case.over_time:
            if first.slices:
                expected = "a file over time, such as NIfTI, to which dcm2niix converts it"
                raise DataError(f"{first.path}: a DICOM series is read as one volume, expected {expected}")
            _check_frames(grid for grid, _ in [*opened, label or opened[0]])
        turns = None if label is None else _turns(label[0], first, case.over_time)
        images: list[Tensor] = []
        notes, units = [], []
        while opened:
            grid, read = opened.pop(0)  # the last reference to what is open
            if grid.is_picture and grid.shape[:2] != first.shape[:2]:
                (wide, high), (width, height) = grid.shape[:2], first.shape[:2]
                sizes = f"is {wide} x {high} pixels, {first.path} is {width} x {height}"
                # pixels have no place in space by which to interpolate
                raise DataError(f"{grid.path}: {sizes}; expected one size for all channels of a case")
            if not _overlap(first, grid):
                raise DataError(f"{grid.path}: does not overlap {first.path}")
            image, more = _voxels(grid, read)
            units += [grid.value_unit] * (1 if case.over_time else len(image))
            notes += more
            images.append(image if _same_grid(grid, first) else _onto(image, grid, first))
        voxels = images[0] if len(images) == 1 else torch.cat(images)
        del images, image, read
        if case.over_time:
            voxels = voxels.unflatten(0, (-1, first.shape[3]))
            if first.time_step is None:
                notes.append(f"{first.path}: its header tells no time step in seconds")
        if channels not in (None, len(voxels)):
            raise DataError(f"{first.path}: has {len(voxels)} channels, expected {channels}")
        affine, numbers = torch.from_numpy(first.affine), None
        if label is not None:
            numbers = torch.from_numpy(_labels(*label, turns, classes))
            numbers = MetaTensor(numbers[None] if case.over_time else numbers, affine=affine)
            notes += label[0].notes
        return cls(case, MetaTensor(voxels, affine=affine), numbers, first, tuple(notes), tuple(units))

    def onto(self, image: Any) -> tuple[tuple[int, ...], NDArray[np.float64]] | None:
        """Return the file's grid along RAS axes: its shape and the (4, 4) matrix from its voxel indices to those of
        `image`, a MetaTensor that `Prepare` has made of this volume; diagonal except for the offset. None if the two
        grids are the same. Those of a series over time begin with its frames: four sizes and a (5, 5) matrix."""
        turns, space = self._axes(), self.grid.shape[:3]
        shape = tuple(space[axis] for axis in np.argsort(turns[:, 0]))
        back = orientations.inv_ornt_aff(turns, space)
        matrix = np.linalg.inv(image.affine.numpy()) @ self.grid.affine @ back
        if shape == tuple(image.shape[-3:]) and np.allclose(matrix, np.eye(4), atol=1e-3):
            return None
        matrix[:3, :3] = np.diag(np.diag(matrix[:3, :3]))  # the rest is rounding
        frames = tuple(image.shape[1:-3])
        padded = np.eye(len(frames) + 4)
        padded[len(frames) :, len(frames) :] = matrix
        return (*frames, *shape), padded

    def from_ras(self, labels: Tensor) -> NDArray[Any]:
        """Return a view of labels ([frames,] x, y, z) on the grid of `onto` in the file's index order, (x, y, z[,
        frames])."""
        back = orientations.ornt_transform(orientations.axcodes2ornt("RAS"), self._axes())
        last = np.moveaxis(labels.numpy(), range(labels.ndim - 3), range(3, labels.ndim))
        return np.asarray(orientations.apply_orientation(last, back))

    def _axes(self) -> NDArray[np.float64]:
        """Return the orientation of the file's axes with respect to RAS, in nibabel's format."""
        return io_orientation(self.grid.affine)

    def save_labels(self, labels: Tensor | NDArray[Any], path: str | Path) -> None:
        """Writes labels (x, y, z[, frames]), whole numbers in the file's index order, as `.nii.gz`, those of a picture
        as `.png` or `.tif` (`grid.ending`).

        uint8, or int16 where a label is above 255. The header (affine, spacing, time step, sform and qform codes) is
        that of the NIfTI source; for any other source the affine is the grid's. The file appears complete or not at
        all; its folder is made if needed.

        Raises ValueError for labels of another shape or kind, DataError when it cannot be written.
        """
        path = Path(path)
        if not path.name.endswith(self.grid.ending):
            raise ValueError(f"labels are written as {self.grid.ending}, got {path.name}")
        array = self.grid.checked_labels(labels)
        with atomic_write(path) as draft:
            self.grid.write_labels(array, draft)

    def save_dicom_seg(self, labels: Tensor | NDArray[Any], path: str | Path, names: Sequence[str]) -> None:
        """Write labels as a DICOM-SEG, see `dicom.save_segmentation`."""
        save_segmentation(labels, self.grid, path, names)


def upright(volume: Any) -> Any:
    """Flip and permute a MetaTensor (channels, [frames,] x, y, z) to RAS axes; nothing is interpolated."""
    turn: Any = Orientation("RAS", labels=None)
    return in_space(turn, volume)


def in_space(transform: Callable[[Any], Any], volume: Any) -> Any:
    """Apply a transform of MONAI, which takes (channels, x, y, z), to a MetaTensor (channels, [frames,] x, y, z): to
    all frames alike."""
    before = volume.shape[:-3]
    return transform(volume.flatten(0, -4)).unflatten(0, before)


def _voxels(grid: FileGrid, read: Read) -> tuple[Tensor, list[str]]:
    """Return (channels or frames, x, y, z) float32 without NaN or infinity, and notes."""
    *space, channels = grid.shape
    with readable(grid.path), np.errstate(over="ignore"):  # overflow becomes infinite
        voxels = np.empty((channels, *space), np.float32)
        for channel, z, piece in grid.slabs(read):
            voxels[channel, :, :, z] = piece
    notes = list(grid.notes)
    for planes in voxels:
        count, least = 0, np.inf
        for plane in planes:
            finite = np.isfinite(plane)
            count += plane.size - int(finite.sum())
            least = min(least, float(plane.min(where=finite, initial=np.inf)))
        if count > planes.size / 2:
            raise DataError(f"{grid.path}: has {count} voxels that are NaN or infinite, over half")
        if count:
            notes.append(f"{grid.path}: {count} voxels are NaN or infinite, taken as {least:.6g}")
            for plane in planes:
                plane[~np.isfinite(plane)] = least
    return torch.from_numpy(voxels), notes


def _labels(grid: FileGrid, read: Read, turns: Any, classes: int | None) -> NDArray[np.int16]:
    """Return labels (1 or frames, x, y, z) with the axes of space permuted and flipped by `turns`."""
    with readable(grid.path), np.errstate(invalid="ignore"):
        numbers = np.empty((grid.shape[3], *grid.shape[:3]), np.int16)
        for frame, z, layers in grid.slabs(read):
            if not np.isfinite(layers).all():
                raise DataError(f"{grid.path}: has labels that are NaN or infinite")
            numbers[frame, :, :, z] = np.rint(layers)
            if np.abs(numbers[frame, :, :, z] - layers).max() > LABEL_ERROR:
                raise DataError(f"{grid.path}: has labels that are not whole numbers below 32768")
    low, high = numbers.min(), numbers.max()
    if classes is not None and (low < 0 or high >= classes):
        raise DataError(f"{grid.path}: has label values {low}..{high}, expected 0..{classes - 1}")
    turned = orientations.apply_orientation(np.moveaxis(numbers, 0, -1), turns)
    return np.ascontiguousarray(np.moveaxis(turned, -1, 0))  # copies only what was turned


def _check_frames(grids: Iterable[FileGrid]) -> None:
    """Raise DataError unless all files of a series have as many frames as the first."""
    first, *rest = grids
    for grid in rest:
        if grid.shape[3] != first.shape[3]:
            expected = f"should have {first.shape[3]} frames as {first.path.name}"
            raise DataError(f"{grid.path}: {expected}, has {grid.shape[3]}")


def _same_grid(a: FileGrid, b: FileGrid) -> bool:
    return a.shape[:3] == b.shape[:3] and _apart(a, b) <= SAME_GRID * b.edges.min()


def _apart(a: FileGrid, b: FileGrid) -> float:
    return float(np.linalg.norm(a.corners - b.corners, axis=1).max())


def _turns(label: FileGrid, image: FileGrid, over_time: bool) -> Any:
    """Return nibabel's orientation from the label's index axes to the order and direction of the image's: the NIfTI and
    the DICOM of a scan may differ in them. DataError for another grid."""
    if label.shape[3] > 1 and not over_time:
        raise DataError(f"{label.path}: a label should have 3 axes, has shape {label.shape}")
    if _same_grid(label, image):  # with oblique axes rounding may change the order
        return np.array([[axis, 1] for axis in range(3)])
    to, at = io_orientation(image.affine), io_orientation(label.affine)
    turns = orientations.ornt_transform(at, to)
    back = orientations.inv_ornt_aff(turns, label.shape[:3])
    shape = [label.shape[axis] for axis in np.argsort(turns[:, 0])]
    if _same_grid(replace(label, shape=(*shape, 1), affine=label.affine @ back), image):
        return turns
    if label.shape[:3] != image.shape[:3]:
        raise DataError(f"{label.path}: has shape {label.shape[:3]}, its image {image.path.name} has {image.shape[:3]}")
    distance = f"corners are {_apart(label, image):.3g} mm apart"
    raise DataError(f"{label.path}: has another affine than its image {image.path.name}; {distance}")


def _overlap(a: FileGrid, b: FileGrid) -> bool:
    """Return whether the boxes around two volumes, on the index axes of `b`, overlap."""
    inside = a.corners @ np.linalg.inv(b.affine).T
    low, high = inside[:, :3].min(0), inside[:, :3].max(0)
    return bool((high >= -0.5).all() and (low <= np.array(b.shape[:3]) - 0.5).all())


def _onto(image: Tensor, grid: FileGrid, target: FileGrid) -> Tensor:
    volume = MetaTensor(image, affine=torch.from_numpy(grid.affine))
    like = MetaTensor(torch.empty(1, *target.shape[:3]), affine=torch.from_numpy(target.affine))
    # The resampler fills with zero, so zero is made to mean the minimum.
    least = image.amin((1, 2, 3), keepdim=True)
    resample: Any = ResampleToMatch(mode="bilinear", padding_mode="zeros", dtype=np.float64)
    shifted: Tensor = resample(volume - least, img_dst=like).as_tensor()
    return (shifted + least).float()
