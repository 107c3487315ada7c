"""Every number of a DICOM header is looked at: a wrong one is refused by file, tag and value."""

from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest

from .files import HU, SHAPE, edit, load, refuses, write_series

THIRD = 2  # the slice that is spoilt


def slices_of(folder: Path) -> list[Path]:
    """In the order of z."""
    place = {file: pydicom.dcmread(file).ImagePositionPatient[2] for file in folder.iterdir()}
    return sorted(place, key=lambda file: place[file])


@pytest.mark.filterwarnings("ignore:Invalid value for VR")
@pytest.mark.parametrize(
    "tag, value, words",
    [
        ("ImagePositionPatient", ["nan", "-20", "105"], r"is \[nan, .*expected 3 finite numbers"),
        ("ImagePositionPatient", ["-30", "-20", "inf"], "expected 3 finite numbers"),
        ("ImagePositionPatient", ["-30", "-20", "1e300"], "expected 3 finite numbers"),
        ("ImagePositionPatient", ["-30", "-20"], "expected 3 finite numbers"),
        ("ImagePositionPatient", ["-30", "", "105"], "expected 3 finite numbers"),
        ("ImageOrientationPatient", [2, 0, 0, 0, 1, 0], "right angles, of length 1"),
        ("ImageOrientationPatient", [1, 0, 0, 0, 0.9, 0], "right angles, of length 1"),
        ("ImageOrientationPatient", [1, 0, 0, 0.6, 0.8, 0], "right angles, of length 1"),
        ("ImageOrientationPatient", [0, 0, 0, 0, 1, 0], "right angles, of length 1"),
        ("ImageOrientationPatient", ["nan", 0, 0, 0, 1, 0], "right angles, of length 1"),
        ("PixelSpacing", [-1.25, 0.75], r"is \[-1.25, 0.75\], expected 2 numbers from 0.001"),
        ("PixelSpacing", [1.25, 0], "expected 2 numbers from 0.001 to 100"),
        ("PixelSpacing", ["nan", "0.75"], "expected 2 numbers from 0.001 to 100"),
        ("PixelSpacing", [1.25, 2000], "expected 2 numbers from 0.001 to 100"),
        ("PixelSpacing", [1.25], "expected 2 numbers from 0.001 to 100"),
        ("Rows", 0, "is 0, expected 1 to 65535"),
        ("Columns", 0, "is 0, expected 1 to 65535"),
        ("BitsAllocated", 12, "is 12, expected 8 or 16 or 32"),
        ("PhotometricInterpretation", "PALETTE COLOR", "is PALETTE COLOR, expected MONOCHROME1"),
        ("RescaleSlope", None, "has no RescaleSlope"),
        ("RescaleIntercept", None, "has no RescaleIntercept"),
        ("RescaleSlope", "", "has no RescaleSlope"),
        ("RescaleSlope", 0, "is 0.0, expected a number other than 0"),
        ("RescaleSlope", "nan", "is nan, expected a number other than 0"),
        ("RescaleIntercept", "inf", "is inf, expected a finite number"),
        ("FrameOfReferenceUID", "1.2.3", "FrameOfReferenceUID is 1.2.3, expected .* as in"),
    ],
)
def test_a_wrong_number_is_refused(tmp_path: Path, tag: str, value: Any, words: str) -> None:
    folder = write_series(tmp_path / "s", HU)
    victim = slices_of(folder)[THIRD]
    edit(victim, **{tag: value})
    refuses(lambda: load(folder), victim, words)
    for file in folder.iterdir():  # ... and where every slice has it
        edit(file, **{tag: value})
    if tag != "FrameOfReferenceUID":
        refuses(lambda: load(folder), folder / "00.dcm", words)


def test_a_number_that_is_text(tmp_path: Path) -> None:
    victim = slices_of(folder := write_series(tmp_path / "s", HU))[THIRD]
    victim.write_bytes(victim.read_bytes().replace(b"-20.0", b"wests"))
    words = "ImagePositionPatient is .*wests.*, expected 3 finite numbers"
    refuses(lambda: load(folder), victim, words)


def test_one_slice_without_rescale(tmp_path: Path) -> None:
    folder = write_series(tmp_path / "s", HU)
    files = slices_of(folder)
    for victim in (files[THIRD], folder / "00.dcm"):  # the first that is read as well
        kept = victim.read_bytes()
        for tag in ("RescaleSlope", "RescaleIntercept"):
            edit(victim, **{tag: None})
        words = r"has no RescaleIntercept, which \d\d.dcm of its series has"
        refuses(lambda: load(folder), victim, words)
        victim.write_bytes(kept)
    for file in files:
        for tag in ("RescaleSlope", "RescaleIntercept"):
            edit(file, **{tag: None})
    loaded = load(folder)  # none has: an MR image's values are as they are; CT's are worth a word
    np.testing.assert_array_equal(loaded.image[0], HU + 1024)
    assert loaded.notes == (f"{folder}: has no RescaleIntercept; stored values are taken as they are",)
    for file in files:
        edit(file, Modality="MR")
    assert load(folder).notes == ()


def test_a_slope_and_an_intercept_for_each_slice_of_pet(tmp_path: Path) -> None:
    folder = write_series(tmp_path / "s", HU, Modality="PT")
    slopes, intercepts = np.linspace(0.5, 3, SHAPE[2]), np.arange(SHAPE[2]) - 4.0
    for z, file in enumerate(slices_of(folder)):
        edit(file, RescaleSlope=float(slopes[z]))
        edit(file, RescaleIntercept=float(intercepts[z]))
    image = load(folder).image[0]
    np.testing.assert_array_equal(image, ((HU + 1024) * slopes + intercepts).astype(np.float32))


def test_directions_that_are_rounded_to_three_decimals(tmp_path: Path) -> None:
    """They are taken, and made of length 1: voxels are not 0.1 % larger than PixelSpacing says."""
    rng = np.random.default_rng(0)
    for number in range(20):
        turn = np.linalg.qr(rng.normal(size=(3, 3)))[0][:2].round(3)
        folder = write_series(tmp_path / str(number), HU[..., :2], ImageOrientationPatient=[*map(float, turn.ravel())])
        normal = np.cross(*turn)
        for z, file in enumerate(sorted(folder.iterdir())):
            edit(file, ImagePositionPatient=[*map(float, (2.5 * z * normal).round(4))])
        affine = load(folder).image.affine.numpy()
        edges = np.linalg.norm(affine[:3, :2], axis=0)
        np.testing.assert_allclose(edges, (0.75, 1.25), rtol=1e-12)


@pytest.mark.filterwarnings("ignore:Invalid value for VR")
@pytest.mark.parametrize("value", [-4, "nan", 1e4])
def test_the_thickness_of_a_single_slice(tmp_path: Path, value: Any) -> None:
    folder = write_series(tmp_path / "s", HU[..., :1])
    edit(folder / "00.dcm", SliceThickness=value)
    refuses(lambda: load(folder), folder / "00.dcm", "SliceThickness is .*, expected 0 .not known")
    edit(folder / "00.dcm", SliceThickness="0.00")
    assert "taken as 1 mm" in load(folder).notes[0]


def test_the_order_does_not_come_from_numbers_that_may_lack(tmp_path: Path) -> None:
    folder = write_series(tmp_path / "s", HU)
    for file in folder.iterdir():
        edit(file, InstanceNumber=None)
    np.testing.assert_array_equal(load(folder).image[0], HU)
