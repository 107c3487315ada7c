"""DICOM as archives export it: nested, mixed, linked; every series of images is one case."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest

from ndlightnet.data.volume.datasets import find_inputs
from ndlightnet.data.volume.file_grid import Case
from ndlightnet.data.volume.volume import Volume

from .files import HU, random_label, real, refuses, write, write_object, write_series


def names(cases: list[Case]) -> list[str]:
    return [case.name for case in cases]


def export(root: Path, ending: str = "") -> dict[str, np.ndarray]:
    """Two patients, three series of one study of the first, other objects beside; what each case should hold."""
    study = root / "P1" / "ST1"
    for number, (kind, volume, folder) in enumerate(
        [("CT", HU, "SE1"), ("CT", HU[::-1], "SE2"), ("MR", HU[:, ::-1], "SE3")], 1
    ):
        write_series(study / folder, volume, PatientID="P^1", Modality=kind, SeriesNumber=number)
    write_object(study / "SE4" / "structures", "RTSTRUCT", PatientID="P^1")
    write_object(study / "SE1" / "segments.dcm", "SEG", PatientID="P^1")
    write_object(root / "P2" / "report", "SR", PatientID="P2")
    write_series(root / "P2" / "S" / "T" / "U", HU + 1, PatientID="P2", SeriesNumber=1)
    scout = {"ImageType": ["ORIGINAL", "PRIMARY", "LOCALIZER"], "SeriesNumber": 0}
    write_series(study / "SE0", HU[..., :2], PatientID="P^1", **scout)
    shutil.copy(study / "SE1" / "00.dcm", root / "DICOMDIR")
    if not ending:
        for file in [*root.rglob("*.dcm")]:
            file.rename(file.with_suffix(""))
    return {"P-1_CT_1": HU, "P-1_CT_2": HU[::-1], "P-1_MR_3": HU[:, ::-1], "P2_CT_1": HU + 1}


@pytest.mark.parametrize("ending", ["", ".dcm"])
def test_series_at_any_depth(tmp_path: Path, ending: str) -> None:
    root = tmp_path / "export"
    wanted = export(root, ending)
    found = find_inputs(root, notes=(notes := []))
    assert names(found) == list(wanted)
    for case in found:
        np.testing.assert_array_equal(Volume.read(case).image[0], wanted[case.name])
    listed = "1 RTSTRUCT, 1 SEG, 1 SR, 2 localizer"
    assert notes == [f"{root}: DICOM objects are left out: {listed} (expected series of images)"]


def test_a_choice_by_modality(tmp_path: Path) -> None:
    export(tmp_path)
    found = find_inputs(tmp_path, 1, notes := [], "mr")
    assert names(found) == ["P-1_MR_3"]
    assert "3 CT series" in notes[0] and "(expected series of MR images)" in notes[0]
    refuses(lambda: find_inputs(tmp_path, modality="PT"), tmp_path, "3 CT series, 1 MR series")
    refuses(
        lambda: find_inputs(tmp_path / "P1" / "ST1" / "SE4"),
        tmp_path / "P1" / "ST1" / "SE4",
        r"left out: 1 RTSTRUCT \(expected series of images\)",
    )


def test_several_series_in_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "in" / "mixed"
    volumes = [HU, HU[::-1], HU[..., :4]]
    for number, volume in enumerate(volumes, 1):
        write_series(folder, volume, PatientID="P", SeriesNumber=number)
    found = find_inputs(tmp_path / "in")
    assert names(found) == ["P_CT_1", "P_CT_2", "P_CT_3"]
    for case, volume in zip(found, volumes, strict=True):
        loaded = Volume.read(case)
        np.testing.assert_array_equal(loaded.image[0], volume)
        assert loaded.notes == ()
        labels = random_label(volume.shape)
        Volume.read(case).save_labels(labels, tmp_path / "out.nii.gz")  # on its own grid
    assert find_inputs(folder) == found  # the names do not hang on where one begins


def test_a_folder_of_one_series_keeps_its_name(tmp_path: Path) -> None:
    write_series(tmp_path / "in" / "a", HU, PatientID="P")
    write_series(tmp_path / "in" / "b", HU, PatientID="P")
    write_object(tmp_path / "in" / "b" / "x.dcm", "RTSTRUCT")
    write_series(tmp_path / "in", HU[..., :3])
    assert names(find_inputs(tmp_path / "in")) == ["a", "b", "in"]
    assert names(find_inputs(tmp_path / "in" / "a")) == ["a"]
    (case,) = find_inputs(real("ct_torso", "dicom"))  # its identifiers are empty
    assert case.name == "dicom"


def test_names_are_safe_unique_and_stable(tmp_path: Path) -> None:
    root = tmp_path / "in"
    write_series(root / "1" / "1", HU, PatientID="../../etc\\x", SeriesNumber=1)
    write_series(root / "2" / "1", HU, PatientID="P" * 60, SeriesInstanceUID="1.2.3")
    write_series(root / "3" / "1", HU, PatientID="", PatientName="", Modality="")
    write_series(root / "4" / "1", HU, PatientID="A", SeriesNumber=2, SeriesInstanceUID="1.2.4")
    write_series(root / "5" / "1", HU, PatientID="a", SeriesNumber=2, SeriesInstanceUID="1.2.5")
    found = names(find_inputs(root))
    assert found == names(find_inputs(root))
    assert all(Path(name).name == name and len(name) < 100 for name in found)
    assert len({name.casefold() for name in found}) == 5
    assert {"etc-x_CT_1", "P" * 40 + "_CT", "unknown"} < {*found}
    twins = [name for name in found if name.casefold().startswith("a_ct_2_")]
    assert len(twins) == 2 and all(len(name) == len("a_ct_2_") + 8 for name in twins)
    write(root / "etc-x_CT_1.nii.gz", HU.astype(np.int16))
    assert len({*names(find_inputs(root))}) == 6
    for file in root.glob("*.nii.gz"):  # ... which becomes the same name, for one channel
        file.rename(root / "unknown_0000.nii.gz")
    refuses(lambda: find_inputs(root), None, "another case is called 'unknown'")


def test_a_series_that_goes_on_in_the_next_folder(tmp_path: Path) -> None:
    root = tmp_path / "in"
    files = sorted(write_series(root / "P" / "S" / "1", HU, PatientID="P").iterdir())
    (root / "P" / "S" / "2").mkdir()
    for file in files[6:]:
        file.rename(root / "P" / "S" / "2" / file.name)
    (case,) = find_inputs(root)
    assert case.images == (root / "P" / "S",) and case.name == "P_CT"
    np.testing.assert_array_equal(Volume.read(case).image[0], HU)
    # A copy of it is a case of its own, not so many slices that are there twice.
    shutil.copytree(root / "P", root / "Q")
    found = find_inputs(root)
    assert len({*names(found)}) == len(found) == 2
    for case in found:
        loaded = Volume.read(case)
        np.testing.assert_array_equal(loaded.image[0], HU)
        assert loaded.notes == ()


def test_links_that_lead_back(tmp_path: Path) -> None:
    root = tmp_path / "in"
    write_series(root / "P" / "S" / "1", HU, PatientID="P")
    (root / "P" / "loop").symlink_to(root)
    (root / "self").symlink_to(root / "self")
    (root / "gone").symlink_to(tmp_path / "gone")
    write_series(tmp_path / "elsewhere", HU[::-1])
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    found = find_inputs(root)
    assert names(found) == ["P_CT", "linked"]
    np.testing.assert_array_equal(Volume.read(found[1]).image[0], HU[::-1])


def test_a_file_that_cannot_be_read_is_no_slice_left_out(tmp_path: Path) -> None:
    """At the end of a series nothing else would tell that a slice is missing."""
    folder = write_series(tmp_path / "in" / "P" / "S", HU, PatientID="P")
    last = max(folder.iterdir(), key=lambda f: pydicom.dcmread(f).ImagePositionPatient[2])
    whole = last.read_bytes()
    for cut in (150, 300, whole.index(b"CT") + 10):
        last.write_bytes(whole[:cut])
        (case,) = find_inputs(tmp_path / "in")
        refuses(lambda case=case: Volume.read(case), last, "cannot be read|cut short")
    for file in folder.iterdir():
        file.write_bytes(whole[:150])
    (case,) = find_inputs(tmp_path / "in")
    assert case.name == "P_S"
    refuses(lambda: Volume.read(case), folder / "00.dcm", "cannot be read|cut short")


def test_scouts_in_several_planes_and_pictures_are_no_volumes(tmp_path: Path) -> None:
    folder = tmp_path / "in" / "P" / "S"
    for turn in ([1, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 1]):
        tags: dict[str, Any] = {"ImageOrientationPatient": turn, "SeriesInstanceUID": "1.2.3"}
        write_series(folder, HU[..., :2], SeriesDescription="3-plane Localizer", **tags)
    picture = write_series(tmp_path / "in" / "P" / "T", HU[..., :1], Modality="OT")
    for file in picture.iterdir():
        data = pydicom.dcmread(file)
        data.file_meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.7"
        del data.ImagePositionPatient
        data.save_as(file)
    write_series(tmp_path / "in" / "P" / "U", HU, PatientID="P")
    assert names(find_inputs(tmp_path / "in", notes=(notes := []))) == ["P_CT"]
    assert "1 OT, 4 localizer" in notes[0]


def test_only_headers_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """... and of them what tells the series: ten thousand headers have to fit into memory."""
    folder = write_series(tmp_path / "in" / "P" / "S", HU)
    read, seen = pydicom.dcmread, []
    monkeypatch.setattr(pydicom, "dcmread", lambda *a, **k: seen.append(read(*a, **k)) or seen[-1])
    find_inputs(tmp_path / "in")
    assert len(seen) == len([*folder.iterdir()])
    assert not any("PixelData" in header or "PixelSpacing" in header for header in seen)
