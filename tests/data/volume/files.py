"""Volumes that tests write, and those that they are given."""

import gzip
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pydicom
import pytest

from ndlightnet.data.errors import DataError
from ndlightnet.data.volume.file_grid import Case
from ndlightnet.data.volume.volume import Volume

SHARED = Path(__file__).parents[4] / "shared" / "data"
# Oblique, unequal spacing, first axis to the left: an affine that forgives nothing.
TILT = 0.2
AFFINE = np.array(
    [
        [-1.5, 0, 0, 60.25],
        [0, 2 * np.cos(TILT), -3 * np.sin(TILT), -20.5],
        [0, 2 * np.sin(TILT), 3 * np.cos(TILT), 7.0],
        [0, 0, 0, 1],
    ]
)
SHAPE = (9, 7, 11)


def real(*parts: str) -> Path:
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"no real data at {path}")
    return path


def write(path: Path, voxels: np.ndarray, affine: np.ndarray = AFFINE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(voxels, affine), path)
    return path


def random_image(shape: tuple[int, ...] = SHAPE, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(100, 50, shape).astype(np.float32)


def random_label(shape: tuple[int, ...] = SHAPE, classes: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, shape).astype(np.uint8)


def load(path: Path, over_time: bool = False) -> Volume:
    return Volume.read(Case("x", (path,), None, over_time=over_time))


def edit(file: Path, **tags: Any) -> None:
    """Change tags of a DICOM file: text goes into it as it is, however wrong; None takes the tag out."""
    data = pydicom.dcmread(file)
    with pydicom.config.disable_value_validation():
        for tag, value in tags.items():
            if tag in data and (value is None or tag != "PixelData"):  # which keeps its kind of value
                del data[tag]
            if value is not None:
                setattr(data, tag, value)
    data.save_as(file)


def refuses(act: Callable[[], Any], path: Path | None, words: str) -> None:
    """A DataError of one line that starts with the path and says what is wrong."""
    with pytest.raises(DataError, match=words) as caught:
        act()
    assert "\n" not in str(caught.value)
    if path is not None:
        assert str(caught.value).startswith(f"{path}:"), str(caught.value)


def broken_image(path: Path, how: str) -> str:
    """Spoils the image at `path`; returns what the error should say."""
    voxels = random_image()
    whole = path.read_bytes()
    if how == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif how == "truncated inside gzip":  # the gzip is sound, the volume in it is not
        path.write_bytes(gzip.compress(gzip.decompress(whole)[:-100]))
    elif how == "corrupt":
        path.write_bytes(whole[:200] + bytes(100) + whole[300:])
    elif how == "one bit":  # of a voxel, in a gzip that does not compress: only the checksum tells
        raw = bytearray(gzip.compress(gzip.decompress(whole), 0))
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
        return "CRC check failed"
    elif how == "not NIfTI":
        path.write_bytes(gzip.compress(b"hello" * 200))
    elif how == "text":
        path.write_text("hello")
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "gone":
        path.unlink()
        return "No such file"
    elif how == "nan":
        voxels[:5] = np.nan
        write(path, voxels)
        return "385 voxels that are NaN"
    elif how == "infinite":
        write(path, np.full(SHAPE, -np.inf, np.float32))
        return "693 voxels that are NaN or infinite"
    elif how == "5-D":
        write(path, random_image((*SHAPE, 2, 2)))
        return "3 axes"
    elif how == "1-D":
        write(path, random_image(SHAPE[:1]))
        return "3 axes"
    elif how == "empty axis":
        write(path, random_image((9, 0, 11)))
        return "empty axis"
    elif how == "colour":
        write(path, np.zeros(SHAPE, [("R", "u1"), ("G", "u1"), ("B", "u1")]))
        return "real numbers"
    elif how in ("flat affine", "affine with NaN"):
        # Through the raw header: nibabel itself refuses to write it.
        raw = bytearray(gzip.decompress(whole))
        raw[280:296] = bytes(16) if how == "flat affine" else np.full(4, np.nan, "<f4").tobytes()
        path.write_bytes(gzip.compress(bytes(raw)))
        return "affine"
    return "cannot be read"


def write_series(folder: Path, volume: np.ndarray, gap: float = 2.5, **tags: Any) -> Path:
    """volume (x, y, z) in HU as a DICOM series from the feet up; file names shuffled. tags: set in every file. A folder
    that is there gets this series as one more."""
    folder.mkdir(parents=True, exist_ok=True)
    before = len(list(folder.iterdir()))
    series, study, frame = (pydicom.uid.generate_uid() for _ in range(3))
    for z in range(volume.shape[2]):
        data = pydicom.Dataset()
        data.file_meta = pydicom.dataset.FileMetaDataset()
        data.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
        data.file_meta.MediaStorageSOPClassUID = data.SOPClassUID = "1.2.840.10008.5.1.4.1.1.2"
        data.file_meta.MediaStorageSOPInstanceUID = data.SOPInstanceUID = pydicom.uid.generate_uid()
        data.SeriesInstanceUID, data.InstanceNumber, data.Modality = series, z + 1, "CT"
        data.StudyInstanceUID, data.FrameOfReferenceUID = study, frame
        data.ImagePositionPatient, data.PixelSpacing = [-30.0, -20.0, 100.0 + gap * z], [1.25, 0.75]
        data.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
        data.Columns, data.Rows = volume.shape[:2]
        data.BitsAllocated = data.BitsStored = 16
        data.HighBit, data.PixelRepresentation, data.SamplesPerPixel = 15, 0, 1
        data.PhotometricInterpretation = "MONOCHROME2"
        data.RescaleSlope, data.RescaleIntercept = 1, -1024
        data.PixelData = (volume[:, :, z].T + 1024).astype(np.uint16).tobytes()
        for tag, value in tags.items():
            setattr(data, tag, value)
        data.save_as(folder / f"{before + (z * 7) % 11:02d}.dcm", enforce_file_format=True)
    return folder


def write_object(file: Path, kind: str, **tags: Any) -> Path:
    """A DICOM object without an image: RTSTRUCT, SEG or SR."""
    data, uids = pydicom.Dataset(), {"RTSTRUCT": "481.3", "SEG": "66.4", "SR": "88.11"}
    data.file_meta = pydicom.dataset.FileMetaDataset()
    data.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    data.SOPClassUID = data.file_meta.MediaStorageSOPClassUID = f"1.2.840.10008.5.1.4.1.1.{uids[kind]}"
    data.SOPInstanceUID = data.file_meta.MediaStorageSOPInstanceUID = pydicom.uid.generate_uid()
    data.SeriesInstanceUID, data.Modality = pydicom.uid.generate_uid(), kind
    for tag, value in tags.items():
        setattr(data, tag, value)
    file.parent.mkdir(parents=True, exist_ok=True)
    data.save_as(file, enforce_file_format=True)
    return file


HU = np.random.default_rng(0).integers(-1000, 1500, SHAPE)


def read_all(cases: Iterable[Case], classes: int, channels: int | None = None) -> None:
    for case in cases:
        Volume.read(case, classes, channels)


def write_nrrd(path: Path, voxels: np.ndarray, affine: np.ndarray | None = None, fields: str = "") -> Path:
    """voxels (x, y, z[, frames]) as NRRD with more header lines; placed by an affine to RAS."""
    kind = {"f4": "float", "i2": "short", "u1": "uchar"}[voxels.dtype.str[1:]]
    lines = [f"type: {kind}", f"dimension: {voxels.ndim}", "encoding: raw", "endian: little"]
    lines += [f"sizes: {' '.join(map(str, voxels.shape))}"]
    if affine is not None:
        *steps, origin = [f"({','.join(map(str, column))})" for column in affine.T[:, :3].tolist()]
        lines += ["space: right-anterior-superior", f"space directions: {' '.join(steps)}"]
        lines += [f"space origin: {origin}"]
    head = "\n".join(["NRRD0004", *lines, fields.strip(), ""]).replace("\n\n", "\n")
    path.write_bytes(head.encode() + b"\n" + voxels.tobytes(order="F"))
    return path
