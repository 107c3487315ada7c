"""Reader of NIfTI files, by nibabel. MONAI's NibabelReader is not used: it rewrites an affine that
disagrees with pixdim."""

import gzip
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from nibabel.filebasedimages import ImageFileError
from numpy.typing import NDArray

from ndlightnet.data.volume.grid import NO_SIDES, FileGrid, Read, check_size, four_axes

DEFLATED = 1032  # largest compression ratio of gzip
SECONDS = {"sec": 1.0, "msec": 1e-3, "usec": 1e-6}  # NIfTI's units of time


def open_nifti(path: Path, _: Sequence[Path] = ()) -> tuple[FileGrid, Read]:
    """Open the file once. nibabel.load would open it a second time and stop at the last voxel,
    before gzip's checksum, which is needed: most flipped bits give other voxels, not a broken
    stream."""
    packed = path.name.lower().endswith(".gz")
    stream: Any = gzip.GzipFile(path) if packed else path.open("rb")
    image = _kind(stream).from_stream(stream)
    dtype, held = image.get_data_dtype(), path.stat().st_size
    shape = four_axes(path, image.shape, dtype)
    most = held * DEFLATED if packed else held
    check_size(path, shape, dtype.itemsize, most, f"a file of {held} bytes")
    voxels = image.dataobj.reshape(shape)

    def read(z: slice, channel: int) -> NDArray[Any]:
        part = np.asarray(voxels[:, :, z, channel])
        if (z.stop, channel + 1) == shape[2:]:
            while packed and stream.read(2**20):
                pass  # the end raises if the checksum is wrong
            stream.close()
        return part

    kind, affine, header = type(image), image.affine, image.header
    notes = []
    if header["sform_code"] == 0 and header["qform_code"] == 0:
        notes.append(f"{path}: has no affine (sform_code and qform_code are 0): {NO_SIDES}")
    # A header that is passed together with its affine keeps both codes and transforms.
    labels = lambda array: kind(array, affine, header)  # noqa: E731
    step = _time_step(header)
    return FileGrid(path, shape, affine, tuple(notes), labels=labels, time_step=step), read


def _time_step(header: Any) -> float | None:
    """Return the seconds between two frames; None where a header has none, or no unit of time."""
    step, unit = float(header["pixdim"][4]), header.get_xyzt_units()[1]
    return step * SECONDS[unit] if unit in SECONDS and 0 < step < math.inf else None


def _kind(stream: Any) -> Any:
    """Return nibabel's class for NIfTI-1 or NIfTI-2, by the first bytes."""
    start = stream.read(nibabel.Nifti2Header.sizeof_hdr)
    stream.seek(0)
    for kind in (nibabel.Nifti1Image, nibabel.Nifti2Image):
        if kind.header_class.may_contain_header(start):
            return kind
    raise ImageFileError("not a NIfTI file")
