"""Volumes as they lie on disk: NIfTI by nibabel, NRRD and MetaImage by SimpleITK.

Each format gives a `Stored`: the grid at once, the voxels a few slices at a time, so that a volume
of gigabytes is never held twice. `data.dicom` gives the same for a series of DICOM slices.
"""

import gzip
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ndlightnet.data.errors import DataError, file_name

NIFTI_ENDINGS = (".nii.gz", ".nii")
ITK_ENDINGS = (".nrrd", ".mha", ".mhd")
ENDINGS = (*NIFTI_ENDINGS, *ITK_ENDINGS)
EDGES = (0.001, 100.0)  # mm; outside, a header is taken for broken or in another unit
SLAB = 2**18  # voxels read at a time: 2 MB in float64
DEFLATED = 1032  # times smaller, at most, that gzip makes a file
# bytes of this machine, where it tells
MEMORY = (
    os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf
)
NOT_KNOWN = "left and right are not known"


@dataclass(frozen=True)
class Case:
    """One patient: image files (a NIfTI, NRRD or MetaImage file or a folder with a DICOM series
    each), first the one that gives the grid, and the label file where there is one. slices: the
    files of the DICOM series, for the folder may hold others; none: all of the folder's. What is
    written of a case is called as it is: its name is changed to one that a file can have."""

    name: str
    images: tuple[Path, ...]
    label: Path | None
    slices: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", file_name(self.name))


@dataclass(frozen=True)
class Stored:
    """A volume on disk. shape: (x, y, z, channels). affine: (4, 4) float64, from voxel indices to
    RAS mm. read(z, channel): the slices z as (x, y, n), rescaled, in the file's own type or
    float64. notes: one line for each thing that was decided for the user."""

    path: Path
    shape: tuple[int, ...]
    affine: NDArray[np.float64]
    read: Callable[[slice, int], NDArray[Any]]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_size(self.path, self.shape, 4, MEMORY, "this machine's memory")  # as float32
        lost = f"{self.path}: has an affine that does not place the voxels in space"
        if self.affine.shape != (4, 4) or not np.isfinite(self.affine).all():
            raise DataError(lost)
        low, high = self.edges.min(), self.edges.max()
        # Volume of a voxel against that of a box with its edges: 1 for right angles.
        if low == 0 or abs(np.linalg.det(self.affine)) < 1e-6 * self.edges.prod():
            raise DataError(lost)
        if low < EDGES[0] or high > EDGES[1]:
            raise DataError(
                f"{self.path}: has voxel edges of {low:.3g} to {high:.3g} mm, "
                f"expected {EDGES[0]:g} to {EDGES[1]:g}"
            )

    @property
    def edges(self) -> NDArray[np.float64]:
        """(3,): the voxel's edges in mm."""
        return np.asarray(np.linalg.norm(self.affine[:3, :3], axis=0))

    @property
    def corners(self) -> NDArray[np.float64]:
        """(8, 4): the outermost voxel centres in mm, homogeneous."""
        ends = np.array(np.meshgrid(*[(0, n - 1) for n in self.shape[:3]], [1], indexing="ij"))
        return np.asarray(ends.reshape(4, -1).T @ self.affine.T)

    def slabs(self) -> Iterator[tuple[int, slice, NDArray[Any]]]:
        """(channel, z, voxels (x, y, n)), in the order in which a file holds them."""
        x, y, z, channels = self.shape
        step = max(1, SLAB // (x * y))
        for channel in range(channels):
            for low in range(0, z, step):
                part = slice(low, min(low + step, z))
                yield channel, part, self.read(part, channel)


def stem(path: Path) -> str:
    """The name without the ending of a volume; the whole name of anything else."""
    ending = next((end for end in ENDINGS if path.name.lower().endswith(end)), "")
    return path.name[: len(path.name) - len(ending)]


def _four_axes(path: Path, shape: Sequence[int], dtype: Any) -> tuple[int, ...]:
    """(x, y, z, channels). A plane is one slice; further axes of length one are none."""
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
        raise DataError(f"{path}: should have 3 axes (or 2, or 4 with channels), has shape {axes}")
    return (*axes, 1, 1)[:4]


def check_size(path: Path, shape: Sequence[int], itemsize: int, most: float, holder: str) -> None:
    """DataError for a header that claims more bytes than `most`, before room is made for them."""
    if (claimed := math.prod(shape) * itemsize) > most:
        sizes = " x ".join(map(str, shape))
        raise DataError(
            f"{path}: its header claims {sizes} voxels, {claimed / 1e9:.3g} GB, more than "
            f"{holder} can hold"
        )


# MONAI's readers are not used: its NibabelReader rewrites an affine that disagrees with pixdim, and
# its PydicomReader leaves out slices that it cannot read, with a warning, and closes the gap.
def nifti_image(path: Path) -> Any:
    """The image as nibabel opens it; its voxels are read when they are asked for."""
    image: Any = nibabel.load(path, keep_file_open=True)
    if not isinstance(image, nibabel.Nifti1Image):
        raise DataError(f"{path}: is not a NIfTI file, but {type(image).__name__}")
    return image


def open_nifti(path: Path) -> Stored:
    image = nifti_image(path)
    # A stream of ours: nibabel stops at the last voxel, before the checksum that follows it, and
    # most flipped bits give other voxels, not a broken stream.
    stream = gzip.GzipFile(path) if path.name.lower().endswith(".gz") else None
    if stream is not None:
        image = type(image).from_stream(stream)
    dtype, held = image.get_data_dtype(), path.stat().st_size
    shape = _four_axes(path, image.shape, dtype)
    most = held if stream is None else held * DEFLATED
    check_size(path, shape, dtype.itemsize, most, f"a file of {held} bytes")
    voxels = image.dataobj.reshape(shape)

    def read(z: slice, channel: int) -> NDArray[Any]:
        part = np.asarray(voxels[:, :, z, channel])
        if stream is not None and (z.stop, channel + 1) == shape[2:]:
            while stream.read(2**20):
                pass  # the end raises if the checksum is wrong
        return part

    notes = []
    if image.header["sform_code"] == 0 and image.header["qform_code"] == 0:
        notes.append(f"{path}: has no affine (sform_code and qform_code are 0): {NOT_KNOWN}")
    return Stored(path, shape, image.affine, read, tuple(notes))


def open_itk(path: Path) -> Stored:
    import SimpleITK as sitk

    reader = sitk.ImageFileReader()
    reader.SetFileName(str(path))
    try:
        reader.ReadImageInformation()
        claimed = (*reader.GetSize(), reader.GetNumberOfComponents())
        check_size(path, claimed, 4, MEMORY, "this machine's memory")  # as float32
        image: Any = reader.Execute()
    except RuntimeError as error:  # begins with where in the source, for 100 characters or more
        raise RuntimeError(str(error).rpartition("ERROR: ")[2]) from error

    def voxels() -> NDArray[Any]:
        """A view (x, y, [z, [channels]]); not kept, for it does not keep the image alive."""
        view = sitk.GetArrayViewFromImage(image)
        if image.GetNumberOfComponentsPerPixel() > 1:
            view = np.moveaxis(view, -1, 0)
        return np.asarray(view.T)

    shape = _four_axes(path, voxels().shape, voxels().dtype)
    notes = []
    axes = min(image.GetDimension(), 3)
    spacing, origin, turn = np.ones(3), np.zeros(3), np.eye(3)
    spacing[:axes], origin[:axes] = image.GetSpacing()[:axes], image.GetOrigin()[:axes]
    turn[:axes, :axes] = np.reshape(image.GetDirection(), [image.GetDimension()] * 2)[:axes, :axes]
    affine = np.eye(4)
    affine[:3, :3], affine[:3, 3] = turn * spacing, origin
    affine[:2] *= -1  # ITK's millimetres run to the left and back
    if axes == 2:
        notes.append(f"{path}: is a plane, taken as one slice of 1 mm")
    if path.suffix.lower() == ".nrrd" and not image.HasMetaDataKey("NRRD_space"):
        notes.append(f"{path}: has no field 'space': {NOT_KNOWN}")
    return Stored(path, shape, affine, lambda z, c: voxels().reshape(shape)[:, :, z, c], (*notes,))


def label_array(
    labels: Tensor | NDArray[Any], shape: Sequence[int], path: Path
) -> NDArray[np.uint8 | np.int16]:
    """Labels as uint8, or int16 where one is above 255. Raises ValueError unless they are whole
    numbers in 0..32767 on the grid (`shape`) of the image at `path`."""
    array = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if array.dtype.kind not in "biu":
        raise ValueError(f"labels should be whole numbers, got {array.dtype}")
    if array.shape != tuple(shape):
        raise ValueError(f"labels have shape {array.shape}, {path} has {tuple(shape)}")
    if array.min() < 0 or array.max() >= 2**15:
        raise ValueError(f"labels should be in 0..32767, are {array.min()}..{array.max()}")
    return array.astype(np.uint8 if array.max() < 256 else np.int16)
