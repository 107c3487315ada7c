"""DICOM: a series of slices in, a segmentation object (DICOM-SEG) out.

The slices may be in any order and under any file name; their positions in space order them.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ndlightnet.data.errors import DataError, atomic_write, one_line
from ndlightnet.data.volume.dicom_headers import (
    SAME_PLACE,
    VOLUME_TAGS,
    Slice,
    checked,
    is_dicom,
    kind_of,
    numbers,
    read_header,
    text_of,
)
from ndlightnet.data.volume.dicom_voxels import read_voxels
from ndlightnet.data.volume.file_grid import EDGES, FileGrid, Read, label_array

# Slices are even if no step is off the median by more than this fraction; a missing slice gives 1.
EVEN_GAPS = 0.1
ALIKE = 1e-3  # largest difference of directions and pixel sizes in a series: they are rounded
# Tags that a DICOM-SEG repeats from its source, so that it is filed beside it.
REFERRED = ("StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID", "FrameOfReferenceUID")
# These may be empty, but the standard requires them; de-identified files lack some.
FILED = (
    "PatientID",
    "PatientName",
    "PatientBirthDate",
    "PatientSex",
    "StudyDate",
    "StudyTime",
    "StudyID",
    "AccessionNumber",
    "ReferringPhysicianName",
)


def open_series(folder: Path, files: Sequence[Path] = ()) -> tuple[FileGrid, Read]:
    """Open the series in these files of a folder; without `files`, the series of the folder, the one with the most
    slices if there are several. Voxels are read once: their bytes are removed from a header when they are decoded."""
    slices, affine, notes = _series(folder, files)

    def read(z: slice, _: int) -> NDArray[Any]:
        layers = [read_voxels(one.header) for one in slices[z]]
        for one in slices[z]:
            one.header.pop("PixelData", None)
        return np.stack(layers, axis=-1)

    rows, columns = slices[0].shape
    shape = (columns, rows, len(slices), 1)
    unit = text_of(slices[0].header, "Units")
    return FileGrid(folder, shape, affine, tuple(notes), tuple(slices), value_unit=unit), read


def _series(folder: Path, files: Sequence[Path]) -> tuple[list[Slice], NDArray[np.float64], list[str]]:
    """Return the slices in the order of z, the affine to RAS mm, and notes."""
    headers, notes = _headers(folder, files)
    slices = [checked(header) for header in headers]
    for one in slices:
        _check_same(one, slices[0])
    # The position gives the order of the slices; InstanceNumber need not.
    normal = slices[0].normal
    slices.sort(key=lambda one: float(normal @ one.place))
    single = [slices[0]]
    for one in slices[1:]:
        near = np.linalg.norm(one.place - single[-1].place) < SAME_PLACE
        if not (near and np.array_equal(read_voxels(one.header), read_voxels(single[-1].header))):
            single.append(one)
    if len(single) < len(slices):
        doubled = len(slices) - len(single)
        notes.append(f"{folder}: {doubled} slices are there twice; the copies are left out")
    first = single[0]
    if not first.scaling and text_of(first.header, "Modality") == "CT":
        notes.append(f"{folder}: has no RescaleIntercept; stored values are taken as they are")
    if len(single) > 1:
        step = _even_step(folder, single, normal)
    else:
        thickness = _thickness(first)
        if thickness == 0:
            notes.append(f"{folder}: one slice without SliceThickness, taken as 1 mm")
        step = normal * (thickness or 1)
    row_gap, column_gap = first.gaps
    affine = np.eye(4)
    affine[:3, 0], affine[:3, 1] = first.along_row * column_gap, first.along_column * row_gap
    affine[:3, 2], affine[:3, 3] = step, first.place
    affine[:2] *= -1  # DICOM's x and y run to the left and to the back
    return single, affine, notes


def _headers(folder: Path, files: Sequence[Path]) -> tuple[list[Any], list[str]]:
    if files:  # the files are already selected: each is read whole
        return [read_header(file, voxels=True) for file in files], []
    series: dict[str, list[Any]] = {}
    for header in map(read_header, filter(is_dicom, sorted(folder.iterdir()))):
        if kind_of(header) == "":
            series.setdefault(text_of(header, "SeriesInstanceUID"), []).append(header)
    if not series:
        raise DataError(f"{folder}: has no DICOM slices")

    def order(uid: str) -> tuple[int, float, str]:
        number = text_of(series[uid][0], "SeriesNumber")
        return -len(series[uid]), float(number) if number.isdecimal() else math.inf, uid

    chosen = min(series, key=order)
    notes = []
    if len(series) > 1:
        first = series[chosen][0]
        about = f"SeriesNumber {text_of(first, 'SeriesNumber')}, {text_of(first, 'SeriesDescription')!r}"
        most = f"{len(series[chosen])} ({one_line(about)}, {chosen})"
        notes.append(f"{folder}: holds {len(series)} series; took the one with the most slices, {most}")
    return series[chosen], notes


def _check_same(one: Slice, first: Slice) -> None:
    """Raise DataError for a slice that cannot lie in one volume with the first."""

    def shared(tag: str, same: bool) -> None:
        if not same:
            ours, theirs = (one_line(text_of(s.header, tag) or "missing") for s in (one, first))
            expected = f"{theirs} as in {first.file.name}, of the same series"
            raise DataError(f"{one.file}: {tag} is {ours}, expected {expected}")

    turns, others = (np.r_[s.along_row, s.along_column] for s in (one, first))
    shared("ImageOrientationPatient", np.allclose(turns, others, atol=ALIKE))
    shared("PixelSpacing", np.allclose(one.gaps, first.gaps, atol=ALIKE))
    shared("Rows", one.shape[0] == first.shape[0])
    shared("Columns", one.shape[1] == first.shape[1])
    frames = {text_of(s.header, "FrameOfReferenceUID") for s in (one, first)}
    shared("FrameOfReferenceUID", len(frames) == 1 or "" in frames)
    # Slope and intercept may change from slice to slice (PET); no slice may lack them.
    for tag in sorted({*one.scaling} ^ {*first.scaling}):
        odd, complete = (one, first) if tag in first.scaling else (first, one)
        raise DataError(f"{odd.file}: has no {tag}, which {complete.file.name} of its series has")


def _thickness(one: Slice) -> float:
    """Return the SliceThickness in mm; 0 if the header does not tell."""
    if text_of(one.header, "SliceThickness") == "":
        return 0.0
    low, high = EDGES
    expected = f"0 (not known) or {low:g} to {high:g} (mm)"
    return float(numbers(one.header, "SliceThickness", 1, expected, lambda mm: mm[0] == 0 or low <= mm[0] <= high)[0])


def _even_step(folder: Path, slices: Sequence[Slice], normal: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the step from a slice to the next, in mm; it is oblique if the gantry was tilted."""
    places = np.array([one.place for one in slices])
    steps = np.diff(places, axis=0)
    usual = np.median(steps, axis=0)
    off = np.linalg.norm(steps - usual, axis=1)
    if normal @ usual == 0 or off.max() > EVEN_GAPS * np.linalg.norm(usual):
        gaps = f"{(steps @ normal).min():.3g} to {(steps @ normal).max():.3g} mm apart"
        same = np.linalg.norm(steps, axis=1) < SAME_PLACE
        at = int(same.argmax() if same.any() else off.argmax())
        pair = slices[at : at + 2]
        between = f"between {pair[0].file.name} and {pair[1].file.name}"
        differ = []
        for tag in VOLUME_TAGS if same[at] else ():
            low, high = (one_line(text_of(one.header, tag) or "missing") for one in pair)
            differ += [f"{tag} {low} and {high}"] if low != high else []
        if differ:
            between += f" of one place: {', '.join(differ)}; expected one volume"
        raise DataError(f"{folder}: slices are {gaps}; one is missing or doubled ({between})")
    return np.asarray((places[-1] - places[0]) / (len(places) - 1))


def save_segmentation(labels: Tensor | NDArray[Any], grid: FileGrid, path: str | Path, names: Sequence[str]) -> None:
    """Writes labels (x, y, z), whole numbers, as a DICOM-SEG (`.dcm`, binary segments) that refers to the slices of
    `grid`. names[n] names the label n; 0 is the background and no segment. The file appears complete or not at all.

    Raises ValueError for labels of another shape or kind or without a name, DataError when the grid is not of a DICOM
    series or lacks the UIDs to refer to, when highdicom is not installed or the file cannot be written.
    """
    path, folder = Path(path), grid.path
    if path.suffix != ".dcm":
        raise ValueError(f"a DICOM-SEG is written as .dcm, got {path.name}")
    if not grid.slices:
        raise DataError(f"{folder}: a DICOM-SEG needs a DICOM series as its source")
    try:
        import highdicom
    except ImportError as error:
        raise DataError(f'{path}: a DICOM-SEG needs highdicom: pip install "ndlightnet[dicom]"') from error
    slices = grid.slices
    array = label_array(labels, grid.shape[:3], folder)
    if array.max() >= len(names):
        raise ValueError(f"labels go up to {array.max()}, names up to {len(names) - 1}")
    # mm between slices along the normal
    apart = round(abs(np.linalg.det(grid.affine)) / np.prod(slices[0].gaps), 6)
    for one in slices:
        header = one.header
        for tag in REFERRED:
            if not header.get(tag):
                raise DataError(f"{header.filename}: has no {tag}, which a DICOM-SEG refers to")
        for tag in FILED:
            if tag not in header:
                setattr(header, tag, "")
        header.SliceThickness = _thickness(one) or apart
        header.SpacingBetweenSlices = apart
    coded = highdicom.sr.CodedConcept
    family = coded("123109", "DCM", "Artificial Intelligence")
    algorithm = highdicom.AlgorithmIdentificationSequence(name="ndlightnet", version="1", family=family)
    segments = [
        highdicom.seg.SegmentDescription(
            segment_number=number,
            segment_label=name[:64],  # as long as the standard allows
            segmented_property_category=coded("85756007", "SCT", "Tissue"),
            # The meaning of a name is not known here: a private code with that name stands for it.
            segmented_property_type=coded(str(number), "99NDLIGHTNET", name[:64]),
            algorithm_type="AUTOMATIC",
            algorithm_identification=algorithm,
        )
        for number, name in enumerate(names[1:], 1)
    ]
    try:
        written = highdicom.seg.Segmentation(
            source_images=[one.header for one in slices],
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
    except Exception as error:  # headers can be wrong in more ways than are checked here
        raise DataError(f"{folder}: cannot take a DICOM-SEG ({one_line(error)})") from error
    with atomic_write(path) as draft:
        written.save_as(draft)
