"""Reader of NIfTI and Analyze files, by nibabel. MONAI's NibabelReader is not used: it rewrites an affine that
disagrees with pixdim."""

import gzip
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from nibabel.filebasedimages import ImageFileError
from nibabel.fileholders import FileHolder
from nibabel.filename_parser import types_filenames
from nibabel.spm2analyze import Spm2AnalyzeImage
from numpy.typing import NDArray

from ndlightnet.data.errors import DataError
from ndlightnet.data.volume import file_grid
from ndlightnet.data.volume.file_grid import FileGrid, Read

DEFLATED = 1032  # largest compression ratio of gzip
SPACING_ERROR = 1e-3  # largest relative difference of two spacings of one header
# The codes of xyzt_units: three bits for space, the next three for time.
SPACE, TIME = {0: "", 1: "m", 2: "mm", 3: "um"}, {8: "s", 16: "ms", 24: "us"}
# What a label takes from the header of its scan. Other fields and extensions hold names and dates.
GRID_FIELDS = (
    "pixdim",
    "xyzt_units",
    "toffset",
    "qform_code",
    "sform_code",
    "quatern_b",
    "quatern_c",
    "quatern_d",
    "qoffset_x",
    "qoffset_y",
    "qoffset_z",
    "srow_x",
    "srow_y",
    "srow_z",
)


def open_nifti(path: Path, _: Sequence[Path] = ()) -> tuple[FileGrid, Read]:
    """Open a file of NIfTI-1 or NIfTI-2."""
    return _open(path, {"image": path}, (nibabel.Nifti1Image, nibabel.Nifti2Image))


def open_pair(path: Path, _: Sequence[Path] = ()) -> tuple[FileGrid, Read]:
    """Open a pair of a header (.hdr) and voxels (.img), NIfTI or Analyze, by the name of either. Analyze may have its
    affine in a third file (.mat), which SPM writes."""
    names = types_filenames(path, Spm2AnalyzeImage.files_types)
    files = {}
    for what, name in names.items():
        file = Path(name)
        shouted = file.with_suffix(file.suffix.upper())
        files[what] = shouted if shouted.exists() and not file.exists() else file
        if what == "image" and not files[what].exists():
            raise DataError(f"{path}: has no voxels beside it, expected {file.name}")
    return _open(path, files, (nibabel.Nifti1Pair, nibabel.Nifti2Pair, Spm2AnalyzeImage))


def is_header(path: Path) -> bool:
    """Return whether a .hdr is one of NIfTI or Analyze: other formats have files of that name."""
    start = b""
    with suppress(OSError, EOFError), (gzip.open if _packed(path) else open)(path, "rb") as file:
        start = file.read(4)
    return any(int.from_bytes(start, order) in (348, 540) for order in ("little", "big"))


def _packed(path: Path) -> bool:
    return path.name.lower().endswith(".gz")


def _open(path: Path, files: dict[str, Path], kinds: Sequence[Any]) -> tuple[FileGrid, Read]:
    """Open every file once. nibabel.load would open one a second time and stop at the last voxel, before gzip's
    checksum, which is needed: most flipped bits give other voxels, not a broken stream."""
    packed = _packed(path)
    streams: dict[str, Any] = {
        what: gzip.GzipFile(file) if packed else file.open("rb")
        for what, file in files.items()
        if what != "mat" or file.exists()
    }
    kind = _kind(streams.get("header", streams["image"]), kinds)
    holders = {what: FileHolder(str(files[what]), streams.get(what)) for what in files}
    image = kind.from_file_map(holders)
    dtype, held = image.get_data_dtype(), files["image"].stat().st_size
    shape = file_grid.four_axes(path, image.shape, dtype)
    most = held * DEFLATED if packed else held
    file_grid.check_size(path, shape, dtype.itemsize, most, f"a file of {held} bytes")
    voxels = image.dataobj.reshape(shape)

    def read(z: slice, channel: int) -> NDArray[Any]:
        layers = np.asarray(voxels[:, :, z, channel])
        if (z.stop, channel + 1) == shape[2:]:
            for stream in streams.values():
                while packed and stream.read(2**20):
                    pass  # the end raises if the checksum is wrong
                stream.close()
        return layers

    header, notes = image.header, []
    analyze = kind is Spm2AnalyzeImage
    if analyze and "mat" not in streams:
        notes.append(f"{path}: an Analyze header has no affine: {file_grid.NO_SIDES}")
    if not analyze and header["sform_code"] == 0 and header["qform_code"] == 0:
        notes.append(f"{path}: has no affine (sform_code and qform_code are 0): {file_grid.NO_SIDES}")
    if not analyze and header["sform_code"] > 0:
        axes = slice(min(image.ndim, 3))
        edges = np.linalg.norm(image.affine[:3, :3], axis=0)[axes]
        zooms = np.abs(header["pixdim"][1:4])[axes]
        if not np.allclose(edges, zooms, rtol=SPACING_ERROR, atol=0):
            edges_text, zooms_text = (" x ".join(f"{n:.4g}" for n in sides) for sides in (edges, zooms))
            notes.append(f"{path}: its sform has voxels of {edges_text}, which are taken, pixdim {zooms_text}")
    code = 0 if analyze else int(header["xyzt_units"])
    unit = bytes(header["vox_units"]).decode("latin1") if analyze else SPACE.get(code & 7, code)
    mm = file_grid.millimetres(path, unit, notes)
    step = None if analyze else file_grid.seconds(float(header["pixdim"][4]), TIME.get(code & 56, ""))

    def write(array: NDArray[Any], file: Path) -> None:
        single = nibabel.Nifti2Image if header["sizeof_hdr"] == 540 else nibabel.Nifti1Image
        grid = single.header_class()
        for field in GRID_FIELDS:
            grid[field] = header[field]
        # A header that is passed together with its affine keeps both codes and transforms.
        labels = single(array, image.affine, grid)
        labels.set_data_dtype(array.dtype)
        nibabel.save(labels, file)

    affine, writer = np.diag([mm, mm, mm, 1]) @ image.affine, None if analyze else write
    return FileGrid(path, shape, affine, tuple(notes), write=writer, time_step=step, unit=mm), read


def _kind(stream: Any, kinds: Sequence[Any]) -> Any:
    """Return nibabel's class for a header, by its first bytes."""
    start = stream.read(nibabel.Nifti2Header.sizeof_hdr)
    stream.seek(0)
    for kind in kinds:
        if kind.header_class.may_contain_header(start):
            return kind
    raise ImageFileError("not a NIfTI or Analyze file")
