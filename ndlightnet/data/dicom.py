"""DICOM: a series of slices in, a segmentation object (DICOM-SEG) out.

The slices come in any order and under any file name; a place in space says where each belongs.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from numpy.typing import NDArray
from pydicom.pixels.processing import apply_rescale
from pydicom.uid import UID
from torch import Tensor

from ndlightnet.data.errors import DataError, one_line, readable, whole_file
from ndlightnet.data.volume_formats import Case, Stored, label_array

# Slices are even when no step is off the median by more than this; a missing one is off by 1.
EVEN_GAPS = 0.1
SAME_PLACE = 0.01  # mm
PLACED = ("ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing", "Rows", "Columns")
# What a DICOM-SEG repeats from its source, so that it is filed beside it.
REFERRED = ("StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID", "FrameOfReferenceUID")
# These may be empty, but the standard wants them there; de-identified files have lost some.
FILED = ("PatientID", "PatientName", "PatientBirthDate", "PatientSex", "StudyDate", "StudyTime",
         "StudyID", "AccessionNumber", "ReferringPhysicianName")  # fmt: skip


def dicom_files(folder: Path) -> list[Path]:
    """The files that say they are DICOM, whatever their ending."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name != "DICOMDIR")
    return [file for file in files if pydicom.misc.is_dicom(file)]


def open_series(folder: Path) -> Stored:
    """The series of a folder, the one with the most slices where there are several."""
    slices, affine, notes = _series(folder)
    first = slices[0]

    def read(z: slice, _: int) -> NDArray[Any]:
        return np.stack([_layer(header) for header in slices[z]], axis=-1)

    shape = (int(first.Columns), int(first.Rows), len(slices), 1)
    return Stored(folder, shape, affine, read, tuple(notes))


def _layer(header: Any) -> NDArray[Any]:
    """(x, y): the voxels of one slice with its own rescale slope and intercept applied."""
    file = Path(header.filename)
    with readable(file):
        whole = pydicom.dcmread(file)
        if whole.get("PixelData") is None:
            raise DataError(f"{file}: has no PixelData, or is cut short before it")
        return np.asarray(apply_rescale(whole.pixel_array, whole)).T


def _series(folder: Path) -> tuple[list[Any], NDArray[np.float64], list[str]]:
    """Headers in the order of z, the affine to RAS mm, notes."""
    slices, notes = _largest_series(folder)
    for header in slices:
        file = Path(header.filename)
        if int(header.get("NumberOfFrames") or 1) > 1:
            raise DataError(f"{file}: holds several frames; only files of one slice can be read")
        if int(header.get("SamplesPerPixel") or 1) > 1:
            raise DataError(f"{file}: voxels should be real numbers, are colours")
        for tag in PLACED:
            if header.get(tag) is None:
                raise DataError(f"{file}: has no {tag}, or is cut short before it")
    frames = np.array(
        [[*h.ImageOrientationPatient, *h.PixelSpacing, h.Rows, h.Columns] for h in slices], float
    )
    if not np.allclose(frames, frames[0], atol=1e-3):
        raise DataError(f"{folder}: has slices of different orientation, pixel size or shape")
    along_row, along_column, (row_gap, column_gap), _ = np.split(frames[0], [3, 6, 8])
    normal = np.cross(along_row, along_column)
    # The place says which slice comes next; InstanceNumber is only a number.
    slices.sort(key=lambda header: float(normal @ _place(header)))
    single = [slices[0]]
    for header in slices[1:]:
        near = np.linalg.norm(_place(header) - _place(single[-1])) < SAME_PLACE
        if not (near and np.array_equal(_layer(header), _layer(single[-1]))):
            single.append(header)
    if len(single) < len(slices):
        doubled = len(slices) - len(single)
        notes.append(f"{folder}: {doubled} slices are there twice; the copies are left out")
    places = np.array([_place(header) for header in single])
    if len(single) == 1:
        thickness = float(single[0].get("SliceThickness") or 0)
        if thickness == 0:
            notes.append(f"{folder}: one slice without SliceThickness, taken as 1 mm")
        step = normal * (thickness or 1)
    else:
        step = _even_step(folder, places, normal)
    affine = np.eye(4)
    affine[:3, 0], affine[:3, 1] = along_row * column_gap, along_column * row_gap
    affine[:3, 2], affine[:3, 3] = step, places[0]
    affine[:2] *= -1  # DICOM's millimetres run to the left and back
    return single, affine, notes


def _largest_series(folder: Path) -> tuple[list[Any], list[str]]:
    headers = []
    for file in dicom_files(folder):
        with readable(file):
            headers.append(pydicom.dcmread(file, stop_before_pixels=True))
    series: dict[str, list[Any]] = {}
    for header in filter(_is_image, headers):
        series.setdefault(str(header.get("SeriesInstanceUID") or ""), []).append(header)
    if not series:
        raise DataError(f"{folder}: has no DICOM slices")

    def number(uid: str) -> float:
        given = series[uid][0].get("SeriesNumber")
        return float("inf") if given is None else float(given)

    chosen = min(series, key=lambda uid: (-len(series[uid]), number(uid), uid))
    notes = []
    if len(series) > 1:
        first = series[chosen][0]
        about = f"SeriesNumber {first.get('SeriesNumber')}, {first.get('SeriesDescription', '')!r}"
        notes.append(
            f"{folder}: holds {len(series)} series; took the one with the most slices, "
            f"{len(series[chosen])} ({one_line(about)}, {chosen})"
        )
    return series[chosen], notes


def _is_image(header: Any) -> bool:
    """Reports, plans, presentations and segmentations stand in the folders of images too."""
    kind = header.file_meta.get("MediaStorageSOPClassUID") or header.get("SOPClassUID") or ""
    name = UID(kind).name
    return "Image Storage" in name if name != kind else "Rows" in header  # unknown: by its look


def _place(header: Any) -> NDArray[np.float64]:
    return np.array(header.ImagePositionPatient, dtype=float)


def _even_step(
    folder: Path, places: NDArray[np.float64], normal: NDArray[np.float64]
) -> NDArray[np.float64]:
    """From a slice to the next one, in mm; they lean where the gantry was tilted."""
    steps = np.diff(places, axis=0)
    usual = np.median(steps, axis=0)
    off = np.linalg.norm(steps - usual, axis=1).max()
    if normal @ usual == 0 or off > EVEN_GAPS * np.linalg.norm(usual):
        gaps = f"{(steps @ normal).min():.3g} to {(steps @ normal).max():.3g} mm apart"
        raise DataError(f"{folder}: slices are {gaps}; one is missing or doubled")
    return np.asarray((places[-1] - places[0]) / (len(places) - 1))


def save_segmentation(
    labels: Tensor | NDArray[Any], like: Case, path: str | Path, names: Sequence[str]
) -> None:
    """Writes labels (x, y, z), whole numbers, as a DICOM-SEG (`.dcm`, binary segments) that refers
    to the slices of `like`'s first image. names[n] names the label n; 0 is the background and no
    segment. The file appears complete or not at all.

    Raises ValueError for labels of another shape or kind or without a name, DataError when the
    source is no DICOM series or lacks the numbers to refer to, when highdicom is not installed or
    the file cannot be written.
    """
    path, folder = Path(path), like.images[0]
    if path.suffix != ".dcm":
        raise ValueError(f"a DICOM-SEG is written as .dcm, got {path.name}")
    if not folder.is_dir():
        raise DataError(f"{folder}: a DICOM-SEG needs a DICOM series as its source")
    try:
        import highdicom
    except ImportError as error:
        need = 'a DICOM-SEG needs highdicom: pip install "ndlightnet[dicom]"'
        raise DataError(f"{path}: {need}") from error
    with readable(folder):
        slices, affine, _ = _series(folder)
    shape = (int(slices[0].Columns), int(slices[0].Rows), len(slices))
    array = label_array(labels, shape, folder)
    if array.max() >= len(names):
        raise ValueError(f"labels go up to {array.max()}, names up to {len(names) - 1}")
    row_gap, column_gap = map(float, slices[0].PixelSpacing)
    apart = round(abs(np.linalg.det(affine)) / (row_gap * column_gap), 6)  # along the normal
    for header in slices:
        for tag in REFERRED:
            if not header.get(tag):
                raise DataError(f"{header.filename}: has no {tag}, which a DICOM-SEG refers to")
        for tag in FILED:
            if tag not in header:
                setattr(header, tag, "")
        header.SliceThickness = header.get("SliceThickness") or apart
        header.SpacingBetweenSlices = apart
    tissue = highdicom.sr.CodedConcept("85756007", "SCT", "Tissue")
    segments = [
        highdicom.seg.SegmentDescription(
            segment_number=number,
            segment_label=name[:64],  # as long as the standard allows
            segmented_property_category=tissue,
            # What a name of ours means is not known: a private code with that name says so much.
            segmented_property_type=highdicom.sr.CodedConcept(
                str(number), "99NDLIGHTNET", name[:64]
            ),
            algorithm_type="AUTOMATIC",
            algorithm_identification=highdicom.AlgorithmIdentificationSequence(
                name="ndlightnet",
                version="1",
                family=highdicom.sr.CodedConcept("123109", "DCM", "Artificial Intelligence"),
            ),
        )
        for number, name in enumerate(names)
        if number > 0
    ]
    try:
        written = highdicom.seg.Segmentation(
            source_images=slices,
            pixel_array=np.ascontiguousarray(array.T.astype(np.uint16)),  # (slice, row, column)
            segmentation_type="BINARY",
            segment_descriptions=segments,
            omit_empty_frames=bool(array.any()),  # an object without frames is not valid
            series_instance_uid=highdicom.UID(),
            series_number=1000,
            sop_instance_uid=highdicom.UID(),
            instance_number=1,
            manufacturer="ndlightnet",
            manufacturer_model_name="ndlightnet",
            software_versions="1",
            device_serial_number="1",
            series_description="ndlightnet segmentation",
        )
    except Exception as error:  # headers can be wrong in more ways than are looked at here
        raise DataError(f"{folder}: cannot take a DICOM-SEG ({one_line(error)})") from error
    with whole_file(path) as draft:
        written.save_as(draft)
