"""Headers of DICOM files: the kind of object that each describes, and a check of every number of a slice, so that later
code meets no NaN, no missing tag and no invalid length."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from numpy.typing import NDArray
from pydicom.uid import UID

from ndlightnet.data.errors import DataError, one_line, readable
from ndlightnet.data.volume.file_grid import EDGES

Numbers = NDArray[np.float64]
# Classes whose images are slices positioned in the patient; others count if they have a position.
PLANES = re.compile(r"(Legacy Converted )?(Enhanced )?(CT|MR|PET|Positron Emission Tomography) ")
SCOUTS = re.compile("locali[sz]er|scout|survey|surview|topogram|scanogram", re.IGNORECASE)
FARTHEST = 1e6  # mm from the origin; nothing is scanned a kilometre away
# Cosines are written with three or more decimals: each of three numbers is up to 0.0005 off.
COSINE_ERROR = 1e-3
SCALING = ("RescaleSlope", "RescaleIntercept")
SAME_PLACE = 0.01  # mm
# What differs between the volumes of one series: echoes, acquisitions, phases, kinds of images,
# times. A volume is named by the first that tell it apart.
VOLUME_TAGS = (
    "EchoNumbers",
    "EchoTime",
    "AcquisitionNumber",
    "TemporalPositionIdentifier",
    "NominalPercentageOfCardiacPhase",
    "TriggerTime",
    "ImageType",
    "InversionTime",
    "FlipAngle",
    "DiffusionBValue",
    "KVP",
    "ConvolutionKernel",
    "FrameReferenceTime",
    "AcquisitionTime",
    "ContentTime",
)


@dataclass(frozen=True)
class Slice:
    """A file of one slice. place: position of its first voxel, mm; along_row, along_column: unit vectors; gaps: mm
    between rows and between columns; scaling: tags that turn stored values into units."""

    file: Path
    header: Any
    place: Numbers
    along_row: Numbers
    along_column: Numbers
    gaps: tuple[float, float]
    shape: tuple[int, int]
    scaling: tuple[str, ...]

    @property
    def normal(self) -> Numbers:
        return np.cross(self.along_row, self.along_column)


def is_dicom(file: Path) -> bool:
    return file.is_file() and file.name != "DICOMDIR" and pydicom.misc.is_dicom(file)


def read_header(file: Path, tags: Sequence[str] = (), voxels: bool = False) -> Any:
    """Read a header without the voxels; with `voxels` also these; with `tags` only those."""
    with readable(file):
        return pydicom.dcmread(file, stop_before_pixels=not voxels, specific_tags=list(tags) or None)


def text_of(header: Any, tag: str) -> str:
    """Return a tag as text, as it is in the file, "" if it is missing; never raises."""
    try:
        value = header.get(tag)
    except Exception:  # pydicom converts a value when it is asked for, and may not be able to
        return ""
    return "" if value is None else str(value).strip()


def kind_of(header: Any) -> str:
    """Return "" for the slice of a volume, else the kind of object in a word: reports, plans, structures, scouts and
    photographs are in the folders of images too."""
    uid = text_of(header.file_meta, "MediaStorageSOPClassUID") or text_of(header, "SOPClassUID")
    name = UID(uid).name
    image = "Image Storage" in name if name != uid else "Rows" in header  # unknown: by its tags
    placed = PLANES.match(name) or "ImagePositionPatient" in header
    if image and "LOCALIZER" in text_of(header, "ImageType"):
        return "localizer"
    modality = text_of(header, "Modality")
    if image and placed:
        return ""
    return name if modality in ("", "CT", "MR", "PT") else modality


def is_mosaic(header: Any) -> bool:
    """Return whether the image is a Siemens MOSAIC: one plane with all slices of a volume as its tiles."""
    return "MOSAIC" in text_of(header, "ImageType").upper()


def numbers(
    header: Any, tag: str, count: int, expected: str, good: Callable[[Numbers], Any] = lambda values: True
) -> Numbers:
    """Return the `count` finite numbers of a tag. DataError, with the file, the tag and its value, if it is missing,
    does not hold such numbers, or they are not `good`."""
    try:  # pydicom converts a value when it is asked for
        value = header.get(tag)
        values = np.array(value, dtype=float).reshape(-1)
    except Exception as error:
        value, values = text_of(header, tag) or error, np.empty(0)
    if value is None:
        raise DataError(f"{header.filename}: has no {tag}, or is cut short before it")
    if len(values) != count or not np.isfinite(values).all() or not good(values):
        raise DataError(f"{header.filename}: {tag} is {one_line(value)}, expected {expected}")
    return values


def whole_number(header: Any, tag: str, default: int | None, among: range | tuple[int, ...]) -> int:
    """Return the whole number of a tag, one of `among`; `default` if it is missing, DataError if that is None."""
    if text_of(header, tag) == "" and default is not None:
        return default
    some = f"{among[0]} to {among[-1]}" if isinstance(among, range) else " or ".join(map(str, among))
    return int(numbers(header, tag, 1, some, lambda values: values[0] in among)[0])


def place_of(header: Any) -> Numbers:
    return numbers(header, "ImagePositionPatient", 3, "3 finite numbers (mm)", lambda mm: np.abs(mm).max() < FARTHEST)


def checked(header: Any) -> Slice:
    """Return the slice of a header, with its numbers checked. DataError names the file, the tag, its value and what was
    expected."""
    file = Path(header.filename)
    if whole_number(header, "NumberOfFrames", 1, range(2**31)) > 1:
        raise DataError(f"{file}: holds several frames; only files of one slice can be read")
    if (kind := text_of(header, "PhotometricInterpretation")) == "":
        raise DataError(f"{file}: has no PhotometricInterpretation, or is cut short before it")
    if whole_number(header, "SamplesPerPixel", 1, (1, 3, 4)) > 1 or not kind.startswith("MONOCHROME"):
        expected = "MONOCHROME1 or MONOCHROME2: voxels should be real numbers, are colours"
        raise DataError(f"{file}: PhotometricInterpretation is {one_line(kind)}, expected {expected}")
    if is_mosaic(header):
        raise DataError(
            f"{file}: ImageType is {one_line(text_of(header, 'ImageType'))}: a MOSAIC holds the slices of a volume as "
            "tiles of one plane; expected a file for each slice, or NIfTI, to which dcm2niix converts it"
        )
    place, (low, high) = place_of(header), EDGES
    cosines = numbers(header, "ImageOrientationPatient", 6, "two directions at right angles, of length 1", _turn)
    in_range = f"2 numbers from {low:g} to {high:g} (mm)"
    gaps = numbers(header, "PixelSpacing", 2, in_range, lambda mm: low <= mm.min() and mm.max() <= high)
    rows, columns = (whole_number(header, tag, None, range(1, 2**16)) for tag in ("Rows", "Columns"))
    whole_number(header, "BitsAllocated", 16, (8, 16, 32))
    along_row, along_column = cosines.reshape(2, 3) / np.linalg.norm(cosines.reshape(2, 3), axis=1, keepdims=True)
    spacing = float(gaps[0]), float(gaps[1])
    return Slice(file, header, place, along_row, along_column, spacing, (rows, columns), _scaling(header))


def _turn(cosines: Numbers) -> bool:
    row, column = cosines.reshape(2, 3)
    lengths = np.linalg.norm([row, column], axis=1)
    return bool(np.abs(lengths - 1).max() <= COSINE_ERROR and abs(row @ column) <= 2 * COSINE_ERROR)


def _scaling(header: Any) -> tuple[str, ...]:
    """Return the tags that turn stored values into units, after a check of their values: slope or intercept without the
    other would be ignored later."""
    if "ModalityLUTSequence" in header:
        return ("ModalityLUTSequence",)
    if not any(tag in header for tag in SCALING):
        return ()
    numbers(header, "RescaleSlope", 1, "a number other than 0", lambda values: values[0] != 0)
    numbers(header, "RescaleIntercept", 1, "a finite number")
    return SCALING
