"""Cases, and the grids of their files in space: the types that all readers share."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ndlightnet.data.errors import DataError, file_name, one_line

EDGES = (0.001, 100.0)  # mm; outside this range a header is considered broken or in another unit
SLAB = 2**18  # voxels read at a time: 2 MB in float64
# bytes of this machine's memory, where the system tells
MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf
NO_SIDES = "left and right are not known"
# Units of length in mm; longer names are spelt as ITK and nibabel do.
MILLIMETRES = {"": 1.0, "mm": 1.0, "um": 1e-3, "nm": 1e-6, "cm": 10.0, "m": 1e3, "micron": 1e-3}
MILLIMETRES |= {"\u00b5m": 1e-3, "\u03bcm": 1e-3}  # the micro sign and the Greek letter
MILLIMETRES |= {"millimeter": 1.0, "micrometer": 1e-3, "nanometer": 1e-6, "centimeter": 10.0, "meter": 1e3}
SECONDS = {"s": 1.0, "sec": 1.0, "ms": 1e-3, "msec": 1e-3, "us": 1e-6, "usec": 1e-6}
# read(z, channel): the slices z as (x, y, n), rescaled, in the file's type or float64
Read = Callable[[slice, int], NDArray[Any]]


@dataclass(frozen=True)
class Case:
    """One patient: image files (each a file or a folder with a DICOM series), the first of which gives the grid, and
    the label file if there is one. slices: the files of the DICOM series, as the folder may hold others; empty: the
    folder's series with the most slices. over_time: the fourth axis of its files is time, not channels. The name is
    changed to a valid file name: results are named after it."""

    name: str
    images: tuple[Path, ...]
    label: Path | None
    slices: tuple[Path, ...] = ()
    over_time: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", file_name(self.name))

    def as_series(self, over_time: bool) -> Case:
        """Return the case with this `over_time`, and the name that it has."""
        case = copy(self)  # a new one would change the name again
        object.__setattr__(case, "over_time", over_time)
        return case


@dataclass(frozen=True)
class FileGrid:
    """The grid of a file, without its voxels.

    shape: (x, y, z, channels or frames). affine: (4, 4) float64, from voxel indices to RAS mm. notes: one line for each
    decision made for the user. slices: those of a DICOM series, in order of z. write: writes labels (x, y, z[,
    frames]) to a file in the format of this one; None: as NIfTI. ending: of the labels' file. time_step: seconds from
    one frame to the next, None if not known. unit: the file's unit of length, in mm. value_unit: of the voxels, as
    DICOM has it for PET (BQML, GML: SUV), "" if the file has none.

    Raises DataError for more voxels than the memory can hold as float32, and for an affine that cannot be inverted or
    has edges outside 0.001 to 100 mm (in units below 1 mm from 0.001 units).
    """

    path: Path
    shape: tuple[int, ...]
    affine: NDArray[np.float64]
    notes: tuple[str, ...] = ()
    slices: tuple[Any, ...] = ()
    time_step: float | None = None
    write: Callable[[NDArray[Any], Path], None] | None = None
    ending: str = ".nii.gz"
    unit: float = 1.0
    value_unit: str = ""

    def __post_init__(self) -> None:
        check_size(self.path, self.shape, 4, MEMORY, "this machine's memory")  # as float32
        lost = f"{self.path}: has an affine that does not place the voxels in space"
        if self.affine.shape != (4, 4) or not np.isfinite(self.affine).all():
            raise DataError(lost)
        low, high = self.edges.min(), self.edges.max()
        # Volume of a voxel against that of a box with its edges: 1 for right angles.
        if low == 0 or abs(np.linalg.det(self.affine)) < 1e-6 * self.edges.prod():
            raise DataError(lost)
        least, most = EDGES[0] * min(1.0, self.unit), EDGES[1]
        if low < least or high > most:
            unit = f" (1 of its units is {self.unit:g} mm)" if self.unit != 1 else ""
            raise DataError(
                f"{self.path}: has voxel edges of {low:.3g} to {high:.3g} mm{unit}, expected {least:g} to {most:g}"
            )

    @property
    def edges(self) -> NDArray[np.float64]:
        """Edges of a voxel in mm: (3,)."""
        return np.asarray(np.linalg.norm(self.affine[:3, :3], axis=0))

    @property
    def corners(self) -> NDArray[np.float64]:
        """Outermost voxel centres in mm, homogeneous: (8, 4)."""
        ends = np.array(np.meshgrid(*[(0, n - 1) for n in self.shape[:3]], [1], indexing="ij"))
        return np.asarray(ends.reshape(4, -1).T @ self.affine.T)

    @property
    def is_picture(self) -> bool:
        """Whether the file is a picture: one slice, whose pixels have no place in space."""
        return self.ending != FileGrid.ending

    def slabs(self, read: Read) -> Iterator[tuple[int, slice, NDArray[Any]]]:
        """Yield (channel, z, voxels (x, y, n)) in the order in which a file holds them."""
        x, y, z, channels = self.shape
        step = max(1, SLAB // (x * y))
        for channel in range(channels):
            for low in range(0, z, step):
                layers = slice(low, min(low + step, z))
                yield channel, layers, read(layers, channel)

    def checked_labels(self, labels: Tensor | NDArray[Any]) -> NDArray[np.uint8 | np.int16]:
        """Return labels (x, y, z), or (x, y, z, frames), on this grid, as `label_array` does. A series of one frame is
        a volume; a picture has no frames."""
        axes = 4 if labels.ndim == 4 and not self.is_picture else 3
        array = label_array(labels, self.shape[:axes], self.path)
        return array[..., 0] if array.shape[3:] == (1,) else array

    def write_labels(self, array: NDArray[np.uint8 | np.int16], path: Path) -> None:
        """Write what `checked_labels` returned."""
        if self.write is not None:
            self.write(array, path)
            return
        unit = 1e-3 if self.unit < 1 else 1.0
        affine = np.diag([1 / unit] * 3 + [1]) @ self.affine
        image = nibabel.Nifti1Image(array, affine)
        image.set_sform(affine, code=1)  # 1: scanner coordinates
        image.header.set_xyzt_units("micron" if unit < 1 else "mm")
        nibabel.save(image, path)


def four_axes(path: Path, shape: Sequence[int], dtype: Any) -> tuple[int, ...]:
    """Return (x, y, z, channels or frames). A plane is one slice; axes of length 1 at the end do not count."""
    if np.dtype(dtype).kind not in "biuf":
        raise DataError(f"{path}: voxels should be real numbers, are {dtype}")
    axes = tuple(int(n) for n in shape)
    while len(axes) > 3 and axes[-1] == 1:
        axes = axes[:-1]
    if any(n < 0 for n in axes):
        raise DataError(f"{path}: has a negative axis: shape {axes}")
    if 0 in axes:
        raise DataError(f"{path}: has an empty axis, no voxels: shape {axes}")
    if not 2 <= len(axes) <= 4:
        raise DataError(f"{path}: should have 3 axes (or 2, or 4 with channels or frames), has shape {axes}")
    return (*axes, 1, 1)[:4]


def millimetres(path: Path, unit: object, notes: list[str]) -> float:
    """Return a unit of length in mm; an unknown one is taken as mm, with a note."""
    name = str(unit).strip("\0 ?").lower().replace("metre", "meter").removesuffix("s")
    if name not in MILLIMETRES:
        notes.append(f"{path}: its unit of length is {one_line(unit)}, taken as mm")
    return MILLIMETRES.get(name, 1.0)


def seconds(step: float, unit: str) -> float | None:
    """Return the step between two frames in seconds; None without a step or a unit of time."""
    name = unit.lower()
    return step * SECONDS[name] if name in SECONDS and 0 < step < math.inf else None


def check_size(path: Path, shape: Sequence[int], itemsize: int, most: float, holder: str) -> None:
    """Raise DataError if a header claims more bytes than `most`, before they are allocated."""
    if (claimed := math.prod(shape) * itemsize) > most:
        sizes = " x ".join(map(str, shape))
        raise DataError(
            f"{path}: its header claims {sizes} voxels, {claimed / 1e9:.3g} GB, more than {holder} can hold"
        )


def label_array(labels: Tensor | NDArray[Any], shape: Sequence[int], path: Path) -> NDArray[np.uint8 | np.int16]:
    """Return labels as uint8, or int16 if one is above 255. Raises ValueError unless they are whole numbers in 0..32767
    on the grid (`shape`) of the image at `path`."""
    array = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if array.dtype.kind not in "biu":
        raise ValueError(f"labels should be whole numbers, got {array.dtype}")
    if array.shape != tuple(shape):
        raise ValueError(f"labels have shape {array.shape}, {path} has {tuple(shape)}")
    if array.min() < 0 or array.max() >= 2**15:
        raise ValueError(f"labels should be in 0..32767, are {array.min()}..{array.max()}")
    return array.astype(np.uint8 if array.max() < 256 else np.int16)
