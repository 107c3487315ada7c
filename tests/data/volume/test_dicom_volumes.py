"""Several volumes in one DICOM series: echoes, acquisitions, phases, times."""

import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest

from ndlightnet.data.volume.datasets import find_inputs
from ndlightnet.data.volume.file_grid import Case
from ndlightnet.data.volume.volume import Volume

from .files import HU, edit, refuses, write_series

UIDS = {
    "SeriesInstanceUID": "1.2.3",
    "StudyInstanceUID": "1.2.4",
    "FrameOfReferenceUID": "1.2.5",
    "PatientID": "P",
    "SeriesNumber": 1,
}
# in the order in which they stand in a name, with two values each
FACTORS = (
    {"EchoNumbers": (1, 2), "EchoTime": (2.3, 4.6)},
    {"AcquisitionNumber": (1, 2)},
    {"TemporalPositionIdentifier": (1, 2), "NominalPercentageOfCardiacPhase": (0.5, 37.5), "TriggerTime": (0.5, 412.5)},
    {"ContentTime": ("101500.25", "101501"), "AcquisitionTime": ("101500", "101501")},
)


def write_volume(folder: Path, volume: np.ndarray, gap: float = 2.5, **tags: Any) -> list[Path]:
    """A volume of the series, added to a folder; its files in the order of their slices."""
    draft = write_series(folder.parent / "draft", volume, gap, **UIDS, **tags)
    folder.mkdir(exist_ok=True)
    before = len([*folder.iterdir()])
    moved = [file.rename(folder / f"{before + n}") for n, file in enumerate(draft.iterdir())]
    return sorted(moved, key=lambda file: pydicom.dcmread(file).InstanceNumber)


def values(case: Case) -> np.ndarray:
    return Volume.read(case).image[0].numpy()


@pytest.mark.parametrize("split", [s for s in product((False, True), repeat=4) if any(s)])
def test_each_volume_is_a_case_named_by_what_differs(tmp_path: Path, split: tuple[bool, ...]) -> None:
    """Echo, acquisition, phase and time, or some of them; files and slices in any order, numbers and a time that differ
    from file to file."""
    rng = np.random.default_rng(int("".join(str(int(s)) for s in split), 2))
    tags = [rng.choice([*factor]) for factor, use in zip(FACTORS, split, strict=True) if use]
    levels = {tag: value for factor in FACTORS for tag, value in factor.items() if tag in tags}
    expected, files = {}, []
    for chosen in product(*levels.values()):
        volume = rng.integers(-1000, 1500, (3, 4, 3))
        own = dict(zip(levels, chosen, strict=True))
        name = "_".join(["P_CT_1", *(f"{tag}-{value}" for tag, value in own.items())])
        expected[name] = volume
        files += write_volume(tmp_path / "written", volume, **own)
    folder = tmp_path / "in"
    folder.mkdir()
    for number, file in enumerate(rng.permutation(files)):
        varied = {} if "AcquisitionTime" in tags else {"AcquisitionTime": f"1016{number:02d}"}
        edit(file, InstanceNumber=number, **varied)
        file.rename(folder / f"{number:03d}")
    cases = find_inputs(folder)
    assert [case.name for case in cases] == sorted(expected)
    for case in cases:
        np.testing.assert_array_equal(values(case), expected[case.name])


def test_kinds_of_images_whose_names_would_be_one(tmp_path: Path) -> None:
    """A part of a name has 40 letters: here what differs comes after them."""
    kinds = [["ORIGINAL", "PRIMARY", "RECONSTRUCTED", "FIELD", kind] for kind in ("M", "P")]
    for number, kind in enumerate(kinds):
        write_volume(tmp_path / "in", HU + number, ImageType=kind)
    cases = find_inputs(tmp_path / "in")
    assert len({case.name for case in cases}) == 2
    assert all("_ImageType-ORIGINAL-PRIMARY-RECON" in case.name for case in cases)
    assert sorted(float((values(case) - HU).mean()) for case in cases) == [0, 1]


def two_echoes(folder: Path) -> list[list[Path]]:
    return [write_volume(folder, HU + echo, EchoNumbers=echo) for echo in (1, 2)]


def test_a_missing_a_copied_and_an_unreadable_slice(tmp_path: Path) -> None:
    """... cost their own volume, or a note there."""
    folder = tmp_path / "in"
    two_echoes(folder)[1][4].unlink()
    first, second = find_inputs(folder)
    np.testing.assert_array_equal(values(first), HU + 1)
    refuses(lambda: values(second), folder, "2.5 to 5 mm apart; one is missing or doubled")

    shutil.copy(two_echoes(folder := tmp_path / "copy")[1][4], folder / "copy")
    first, second = find_inputs(folder)
    notes = [Volume.read(case).notes for case in (first, second)]
    assert notes == [(), (f"{folder}: 1 slices are there twice; the copies are left out",)]
    np.testing.assert_array_equal(values(second), HU + 2)

    lost = two_echoes(folder := tmp_path / "lost")[1][4]
    lost.write_bytes(lost.read_bytes()[:150])
    for case in find_inputs(folder):
        refuses(lambda case=case: values(case), lost, "cannot be read|cut short")


def test_what_is_no_second_volume(tmp_path: Path) -> None:
    """One slice scanned again, and times of which each file has its own: one case, and what differs in its error. Tags
    that differ in a single volume: no error."""
    files = write_volume(tmp_path / "again", HU, AcquisitionNumber=1)
    again = shutil.copy(files[3], tmp_path / "again" / "new")
    voxels = (HU[..., 3].T + 1025).astype(np.uint16).tobytes()
    edit(again, AcquisitionNumber=2, SOPInstanceUID="1.2.6", PixelData=voxels)
    (case,) = find_inputs(tmp_path / "again")
    words = r"0 to 2.5 mm apart; one is missing or doubled \(between .* of one place: "
    differ = r"AcquisitionNumber \d and \d; expected one volume\)"
    refuses(lambda: values(case), case.images[0], words + differ)

    files = [*write_volume(tmp_path / "times", HU), *write_volume(tmp_path / "times", HU + 1)]
    for number, file in enumerate(files):
        edit(file, ContentTime=f"1015{number:02d}")
    (case,) = find_inputs(tmp_path / "times")
    refuses(lambda: values(case), case.images[0], words + r"ContentTime 1015\d\d and 1015\d\d; ")

    # copies that differ in a tag are no second volume, nor are places that rounding moves
    files = write_volume(tmp_path / "copies", HU)
    for number, file in enumerate(files):
        edit(shutil.copy(file, file.with_name(f"copy{number}")), ContentTime="111111")
    (case,) = find_inputs(tmp_path / "copies")
    np.testing.assert_array_equal(values(case), HU)

    for number, file in enumerate(write_volume(tmp_path / "one", HU)):
        edit(file, ContentTime=f"1015{number:02d}", AcquisitionNumber=number // 6, EchoTime=1.5)
    (case,) = find_inputs(tmp_path / "one")
    assert case.name == "one"
    np.testing.assert_array_equal(values(case), HU)


def test_places_that_differ_by_rounding(tmp_path: Path) -> None:
    for echo, shift in ((1, 0.005), (2, 0.00501)):  # 1e-5 mm apart, on two sides of a hundredth
        for file in write_volume(tmp_path / "in", HU + echo, EchoNumbers=echo):
            x, y, z = pydicom.dcmread(file).ImagePositionPatient
            edit(file, ImagePositionPatient=[x, y, round(float(z) + shift, 5)])
    cases = find_inputs(tmp_path / "in")
    assert [case.name.rpartition("_")[2] for case in cases] == ["EchoNumbers-1", "EchoNumbers-2"]
    for echo, case in enumerate(cases, 1):
        np.testing.assert_array_equal(values(case), HU + echo)


def test_a_folder_given_as_one_image(tmp_path: Path) -> None:
    two_echoes(tmp_path / "in")
    case = Case("x", (tmp_path / "in",), None)
    refuses(lambda: values(case), tmp_path / "in", "of one place: EchoNumbers [12] and [12]")


def test_no_series_over_time(tmp_path: Path) -> None:
    two_echoes(tmp_path / "in")
    for case in find_inputs(tmp_path / "in"):
        words = "is read as one volume, expected a file over time"
        refuses(lambda case=case: values(case.as_series(True)), tmp_path / "in", words)


@pytest.mark.parametrize("kind", [["M", "ND", "MOSAIC"], ["MOSAIC", "NORM"], ["M", "DIS2D_MOSAIC"]])
def test_a_mosaic_is_refused(tmp_path: Path, kind: list[str]) -> None:
    """A sheet of tiles: its files over time are one case, one line of error."""
    for number in range(3):
        tags = {"AcquisitionNumber": number, "ImageType": ["ORIGINAL", "PRIMARY", *kind]}
        write_volume(tmp_path / "in", HU[..., :1] + number, Modality="MR", **tags)
    (case,) = find_inputs(tmp_path / "in")
    for one in (case, Case("x", (tmp_path / "in",), None)):
        words = "ImageType is .*MOSAIC.*tiles of one plane.*dcm2niix"
        refuses(lambda one=one: values(one), tmp_path / "in" / "0", words)
