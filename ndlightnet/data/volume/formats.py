"""The formats of volumes: a new one is one entry of READERS."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ndlightnet.data.errors import readable
from ndlightnet.data.volume.dicom import open_series
from ndlightnet.data.volume.file_grid import FileGrid, Read
from ndlightnet.data.volume.image_planes import open_label, open_picture
from ndlightnet.data.volume.itk import open_itk
from ndlightnet.data.volume.nifti import open_nifti, open_pair


@dataclass(frozen=True)
class Reader:
    """A format. open(path, slices): returns the grid, and a function that reads the voxels a few slices at a time, so
    that a volume of gigabytes is never held twice. endings: of its files, in lower case; empty: it is a folder. voxels:
    endings of the further files that it reads. picture: it holds a plane, which only a network of two axes asks for.
    open_label: for a format whose labels are read in another way than its images."""

    name: str
    endings: tuple[str, ...]
    open: Callable[[Path, Sequence[Path]], tuple[FileGrid, Read]]
    voxels: tuple[str, ...] = ()
    picture: bool = False
    open_label: Callable[[Path, Sequence[Path]], tuple[FileGrid, Read]] | None = None


READERS = (
    Reader("NIfTI", (".nii.gz", ".nii"), open_nifti),
    Reader("Analyze", (".hdr.gz", ".hdr"), open_pair, (".img.gz", ".img", ".mat")),
    Reader("NRRD", (".nrrd",), open_itk),
    Reader("MetaImage", (".mha", ".mhd"), open_itk, (".raw", ".zraw")),
    Reader("DICOM series", (), open_series),
    Reader("PNG", (".png",), open_picture, picture=True, open_label=open_label),
    Reader("TIFF", (".tif", ".tiff"), open_picture, picture=True, open_label=open_label),
    Reader("JPEG", (".jpg", ".jpeg"), open_picture, picture=True, open_label=open_label),
)
ENDINGS = tuple(end for reader in READERS if not reader.picture for end in reader.endings)
PICTURES = tuple(end for reader in READERS if reader.picture for end in reader.endings)
FOLDER = next(reader for reader in READERS if not reader.endings)
*_FIRST, _LAST = (reader.name for reader in READERS if reader.endings and not reader.picture)
FILES = f"{', '.join(_FIRST)} or {_LAST} file"  # for messages
RESULTS = "derivatives"  # the folder in which BIDS has masks and other results


def open_file(path: Path, slices: Sequence[Path] = (), label: bool = False) -> tuple[FileGrid, Read]:
    """Open a file of an image or of a label, or a folder with the DICOM slices, by its format's reader; an unknown
    ending is taken for NIfTI. Raises DataError if it cannot be read."""
    with readable(path):
        reader = FOLDER if path.is_dir() else reader_of(path)
        return ((label and reader.open_label) or reader.open)(path, slices)


def reader_of(file: Path) -> Reader:
    name = file.name.lower()
    return next((one for one in READERS if name.endswith(one.endings + one.voxels)), READERS[0])


def companions(path: Path) -> list[Path]:
    """Return the names of the further files that a volume may be read from beside its own."""
    cases = [case for end in reader_of(path).voxels for case in (end, end.upper())]
    return [path.with_name(stem(path) + ending) for ending in cases]


def stem(path: Path) -> str:
    """Return the name without the ending of a volume; the whole name of any other file."""
    ending = next((end for end in (*ENDINGS, *PICTURES) if path.name.lower().endswith(end)), "")
    return path.name[: len(path.name) - len(ending)]
