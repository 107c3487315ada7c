"""Volumes that tests write, and those that they are given."""

import gzip
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pydicom
import pytest
import SimpleITK as sitk

from ndlightnet.data.volume.file_grid import Case
from ndlightnet.data.volume.volume import Volume

from ..refusals import refuses as refuses

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


def real(*names: str) -> Path:
    path = SHARED.joinpath(*names)
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


def patched(data: bytes, start: int, new: bytes) -> bytes:
    """A NIfTI file, compressed or not, with other bytes in its header; nibabel refuses to write some."""
    raw = gzip.decompress(data) if (packed := data[:2] == b"\x1f\x8b") else data
    raw = raw[:start] + new + raw[start + len(new) :]
    return gzip.compress(raw) if packed else raw


def one_bit(data: bytes) -> bytes:
    """Of a voxel, in a gzip that does not compress: only the checksum tells."""
    raw = bytearray(gzip.compress(gzip.decompress(data), 0))
    raw[len(raw) // 2] ^= 1
    return bytes(raw)


# How an image is spoilt, in its bytes (a function) or in its voxels, and what the error says.
FAULTS: dict[str, tuple[Any, str]] = {
    "truncated": (lambda data: data[: len(data) // 2], "cannot be read"),
    "truncated inside gzip": (lambda data: gzip.compress(gzip.decompress(data)[:-100]), "cannot be read"),
    "corrupt": (lambda data: data[:200] + bytes(100) + data[300:], "cannot be read"),
    "one bit": (one_bit, "CRC check failed"),
    "not NIfTI": (lambda _: gzip.compress(b"hello" * 200), "not a NIfTI or Analyze file"),
    "text": (lambda _: b"hello", "cannot be read"),
    "empty": (lambda _: b"", "cannot be read"),
    "flat affine": (lambda data: patched(data, 280, bytes(16)), "has an affine that does not place"),
    "affine with NaN": (lambda data: patched(data, 280, np.full(4, np.nan, "<f4").tobytes()), "has an affine that"),
    "nan": (np.where(np.arange(9)[:, None, None] < 5, np.nan, random_image()), "385 voxels that are NaN"),
    "infinite": (np.full(SHAPE, -np.inf, np.float32), "693 voxels that are NaN or infinite"),
    "5-D": (random_image((*SHAPE, 2, 2)), "should have 3 axes"),
    "1-D": (random_image(SHAPE[:1]), "should have 3 axes"),
    "empty axis": (random_image((9, 0, 11)), "empty axis"),
    "colour": (np.zeros(SHAPE, [("R", "u1"), ("G", "u1"), ("B", "u1")]), "voxels should be real numbers"),
}


def broken_image(path: Path, fault: str) -> None:
    """Spoil the compressed NIfTI at `path`."""
    spoilt, _ = FAULTS[fault]
    if callable(spoilt):
        path.write_bytes(spoilt(path.read_bytes()))
    else:
        write(path, spoilt)


def write_itk(
    path: Path, voxels: np.ndarray, affine: np.ndarray = AFFINE, fields: str = "", packed: bool = False
) -> Path:
    """voxels (x, y, z[, channels]) by SimpleITK, placed by an affine to RAS mm; more lines of a MetaImage's header."""
    image = sitk.GetImageFromArray(np.moveaxis(voxels.T, 0, -1) if voxels.ndim == 4 else voxels.T, voxels.ndim == 4)
    lps = np.diag([-1, -1, 1, 1]) @ affine
    edges = np.linalg.norm(lps[:3, :3], axis=0)
    image.SetSpacing(edges.tolist())
    image.SetOrigin(lps[:3, 3].tolist())
    image.SetDirection((lps[:3, :3] / edges).ravel().tolist())
    sitk.WriteImage(image, str(path), packed)
    path.write_bytes(path.read_bytes().replace(b"ElementDataFile", fields.encode() + b"ElementDataFile"))
    return path


def write_series(folder: Path, volume: np.ndarray, gap: float = 2.5, **tags: Any) -> Path:
    """volume (x, y, z) in HU as a DICOM series from the feet up; file names shuffled. tags: set in every file. A folder
    that is there gets this series as one more."""
    before = len(list(folder.glob("*")))
    kinds = ("SeriesInstanceUID", "StudyInstanceUID", "FrameOfReferenceUID")
    uids = {kind: pydicom.uid.generate_uid() for kind in kinds}
    numbers = {"BitsAllocated": 16, "BitsStored": 16, "HighBit": 15, "PixelRepresentation": 0, "SamplesPerPixel": 1}
    plane = {"PixelSpacing": [1.25, 0.75], "ImageOrientationPatient": [1, 0, 0, 0, 1, 0], "Rows": volume.shape[1]}
    values = {"PhotometricInterpretation": "MONOCHROME2", "RescaleSlope": 1, "RescaleIntercept": -1024}
    shared = {**uids, **numbers, **plane, **values, "Columns": volume.shape[0]}
    for z in range(volume.shape[2]):
        place = {"InstanceNumber": z + 1, "ImagePositionPatient": [-30.0, -20.0, 100.0 + gap * z]}
        voxels = {"PixelData": (volume[:, :, z].T + 1024).astype(np.uint16).tobytes()}
        write_object(folder / f"{before + (z * 7) % 11:02d}.dcm", "CT", **{**shared, **place, **voxels, **tags})
    return folder


def write_object(file: Path, kind: str, **tags: Any) -> Path:
    """A DICOM object: a slice (CT) or what is none, RTSTRUCT, SEG, SR or a picture (OT)."""
    data, uids = pydicom.Dataset(), {"CT": "2", "RTSTRUCT": "481.3", "SEG": "66.4", "SR": "88.11", "OT": "7"}
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


def names_of(cases: Iterable[Case]) -> list[str]:
    return [case.name for case in cases]


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
