"""DICOM as archives export it: nested, mixed, linked, several volumes in a series; every volume is one case."""

import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pydicom
import pytest

from ndlightnet.data.volume import dicom_tree
from ndlightnet.data.volume.datasets import find_inputs
from ndlightnet.data.volume.file_grid import Case
from ndlightnet.data.volume.volume import Volume

from .files import HU, edit, names_of, random_label, real, refuses, write, write_object, write_series


def holds(case, voxels, *notes):
    volume = Volume.read(case)
    np.testing.assert_array_equal(volume.image[0], voxels)
    assert volume.notes == notes


def export(root, ending):
    """Two patients, three series of one study of the first, other objects beside; what each case should hold."""
    study = root / "P1" / "ST1"
    for number, (kind, volume) in enumerate([("CT", HU), ("CT", HU[::-1]), ("MR", HU[:, ::-1])], 1):
        write_series(study / f"SE{number}", volume, PatientID="P^1", Modality=kind, SeriesNumber=number)
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
def test_series_at_any_depth_all_and_of_a_modality(tmp_path, ending):
    expected = export(tmp_path, ending)
    cases = find_inputs(tmp_path, notes=(notes := []))
    assert names_of(cases) == list(expected)
    for case in cases:
        holds(case, expected[case.name])
    kinds = "1 RTSTRUCT, 1 SEG, 1 SR, 2 localizer"
    assert notes == [f"{tmp_path}: DICOM objects are left out: {kinds} (expected series of images)"]
    assert names_of(find_inputs(tmp_path, 1, notes := [], "mr")) == ["P-1_MR_3"]
    assert "3 CT series" in notes[0] and "(expected series of MR images)" in notes[0]
    refuses(lambda: find_inputs(tmp_path, modality="PT"), tmp_path, "3 CT series, 1 MR series")
    structures = tmp_path / "P1" / "ST1" / "SE4"
    refuses(lambda: find_inputs(structures), structures, r"left out: 1 RTSTRUCT \(expected series of images\)")


def test_several_series_in_one_folder(tmp_path):
    folder = tmp_path / "in" / "mixed"
    volumes = [HU, HU[::-1], HU[..., :4]]
    for number, volume in enumerate(volumes, 1):
        write_series(folder, volume, PatientID="P", SeriesNumber=number)
    cases = find_inputs(tmp_path / "in")
    assert names_of(cases) == ["P_CT_1", "P_CT_2", "P_CT_3"]
    for case, volume in zip(cases, volumes, strict=True):
        holds(case, volume)
        Volume.read(case).save_labels(random_label(volume.shape), tmp_path / "out.nii.gz")  # on its own grid
    assert find_inputs(folder) == cases  # the names do not hang on where one begins


def test_a_folder_of_one_series_keeps_its_name(tmp_path):
    write_series(tmp_path / "in" / "a", HU, PatientID="P")
    write_series(tmp_path / "in" / "b", HU, PatientID="P")
    write_object(tmp_path / "in" / "b" / "x.dcm", "RTSTRUCT")
    write_series(tmp_path / "in", HU[..., :3])
    assert names_of(find_inputs(tmp_path / "in")) == ["a", "b", "in"]
    assert names_of(find_inputs(tmp_path / "in" / "a")) == ["a"]
    assert names_of(find_inputs(real("ct_torso", "dicom"))) == ["dicom"]  # its identifiers are empty


def test_names_are_safe_unique_and_stable(tmp_path):
    root = tmp_path / "in"
    write_series(root / "1" / "1", HU, PatientID="../../etc\\x", SeriesNumber=1)
    write_series(root / "2" / "1", HU, PatientID="P" * 60, SeriesInstanceUID="1.2.3")
    write_series(root / "3" / "1", HU, PatientID="", PatientName="", Modality="")
    write_series(root / "4" / "1", HU, PatientID="A", SeriesNumber=2, SeriesInstanceUID="1.2.4")
    write_series(root / "5" / "1", HU, PatientID="a", SeriesNumber=2, SeriesInstanceUID="1.2.5")
    names = names_of(find_inputs(root))
    assert names == names_of(find_inputs(root))
    assert all(Path(name).name == name and len(name) < 100 for name in names)
    assert len({name.casefold() for name in names}) == 5
    assert {"etc-x_CT_1", "P" * 40 + "_CT", "unknown"} < {*names}
    twins = [name for name in names if name.casefold().startswith("a_ct_2_")]
    assert len(twins) == 2 and all(len(name) == len("a_ct_2_") + 8 for name in twins)
    file = write(root / "etc-x_CT_1.nii.gz", HU.astype(np.int16))
    assert len({*names_of(find_inputs(root))}) == 6
    file.rename(root / "unknown_0000.nii.gz")  # ... which becomes the same name, for one channel
    refuses(lambda: find_inputs(root), None, "another case is called 'unknown'")


def test_a_series_that_goes_on_in_the_next_folder(tmp_path):
    root = tmp_path / "in"
    files = sorted(write_series(root / "P" / "S" / "1", HU, PatientID="P").iterdir())
    (root / "P" / "S" / "2").mkdir()
    for file in files[6:]:
        file.rename(root / "P" / "S" / "2" / file.name)
    (case,) = find_inputs(root)
    assert case.images == (root / "P" / "S",) and case.name == "P_CT"
    holds(case, HU)
    # A copy of it is a case of its own, not so many slices that are there twice.
    shutil.copytree(root / "P", root / "Q")
    cases = find_inputs(root)
    assert len({*names_of(cases)}) == len(cases) == 2
    for case in cases:
        holds(case, HU)


def test_links_that_lead_back(tmp_path):
    root = tmp_path / "in"
    write_series(root / "P" / "S" / "1", HU, PatientID="P")
    (root / "P" / "loop").symlink_to(root)
    (root / "self").symlink_to(root / "self")
    (root / "gone").symlink_to(tmp_path / "gone")
    write_series(tmp_path / "elsewhere", HU[::-1])
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    cases = find_inputs(root)
    assert names_of(cases) == ["P_CT", "linked"]
    holds(cases[1], HU[::-1])


def test_a_file_that_cannot_be_read_is_no_slice_left_out(tmp_path):
    """At the end of a series nothing else would tell that a slice is missing."""
    folder = write_series(tmp_path / "in" / "P" / "S", HU, PatientID="P")
    last = max(folder.iterdir(), key=lambda f: pydicom.dcmread(f).ImagePositionPatient[2])
    data = last.read_bytes()
    for size in (150, 300, data.index(b"CT") + 10):
        last.write_bytes(data[:size])
        (case,) = find_inputs(tmp_path / "in")
        refuses(lambda case=case: Volume.read(case), last, "cannot be read|cut short")
    for file in folder.iterdir():
        file.write_bytes(data[:150])
    (case,) = find_inputs(tmp_path / "in")
    assert case.name == "P_S"
    refuses(lambda: Volume.read(case), folder / "00.dcm", "cannot be read|cut short")


def test_scouts_in_several_planes_and_pictures_are_no_volumes(tmp_path):
    root = tmp_path / "in" / "P"
    for turn in ([1, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 1]):
        tags = {"ImageOrientationPatient": turn, "SeriesInstanceUID": "1.2.3"}
        write_series(root / "S", HU[..., :2], SeriesDescription="3-plane Localizer", **tags)
    write_object(root / "T" / "picture", "OT", Rows=7, Columns=9)
    write_series(root / "U", HU, PatientID="P")
    assert names_of(find_inputs(tmp_path / "in", notes=(notes := []))) == ["P_CT"]
    assert "1 OT, 4 localizer" in notes[0]


def test_only_headers_are_read(tmp_path, monkeypatch):
    """... and of them what tells the series: ten thousand headers have to fit into memory."""
    folder = write_series(tmp_path / "in" / "P" / "S", HU)
    read, headers = pydicom.dcmread, []
    monkeypatch.setattr(pydicom, "dcmread", lambda *a, **k: headers.append(read(*a, **k)) or headers[-1])
    find_inputs(tmp_path / "in")
    assert len(headers) == len([*folder.iterdir()])
    assert not any("PixelData" in header or "PixelSpacing" in header for header in headers)


# --------------------------------------------------------------- echoes, acquisitions, phases, times

SERIES = {"SeriesInstanceUID": "1.2.3", "StudyInstanceUID": "1.2.4", "FrameOfReferenceUID": "1.2.5"}
SERIES |= {"PatientID": "P", "SeriesNumber": 1}
# in the order in which they stand in a name, with two values each
FACTORS = (
    {"EchoNumbers": (1, 2), "EchoTime": (2.3, 4.6)},
    {"AcquisitionNumber": (1, 2)},
    {"TemporalPositionIdentifier": (1, 2), "NominalPercentageOfCardiacPhase": (0.5, 37.5), "TriggerTime": (0.5, 412.5)},
    {"ContentTime": ("101500.25", "101501"), "AcquisitionTime": ("101500", "101501")},
)


def write_volume(folder, volume, **tags):
    """A volume of the series, added to a folder; its files in the order of their slices."""
    draft = write_series(folder.parent / "draft", volume, **SERIES, **tags)
    folder.mkdir(exist_ok=True)
    before = len([*folder.iterdir()])
    moved = [file.rename(folder / f"{before + n}") for n, file in enumerate(draft.iterdir())]
    return sorted(moved, key=lambda file: pydicom.dcmread(file).InstanceNumber)


def two_echoes(folder):
    return [write_volume(folder, HU + echo, EchoNumbers=echo) for echo in (1, 2)]


@pytest.mark.parametrize("split", [s for s in product((False, True), repeat=4) if any(s)])
def test_each_volume_is_a_case_named_by_what_differs(tmp_path, split):
    """Echo, acquisition, phase and time, or some of them; files and slices in any order, numbers and a time that differ
    from file to file."""
    rng = np.random.default_rng(int("".join(str(int(s)) for s in split), 2))
    tags = [rng.choice([*factor]) for factor, use in zip(FACTORS, split, strict=True) if use]
    levels = {tag: value for factor in FACTORS for tag, value in factor.items() if tag in tags}
    expected, files = {}, []
    for chosen in product(*levels.values()):
        volume = rng.integers(-1000, 1500, (3, 4, 3))
        differences = dict(zip(levels, chosen, strict=True))
        expected["_".join(["P_CT_1", *(f"{tag}-{value}" for tag, value in differences.items())])] = volume
        files += write_volume(tmp_path / "written", volume, **differences)
    (folder := tmp_path / "in").mkdir()
    for number, file in enumerate(rng.permutation(files)):
        varied = {} if "AcquisitionTime" in tags else {"AcquisitionTime": f"1016{number:02d}"}
        edit(file, InstanceNumber=number, **varied)
        file.rename(folder / f"{number:03d}")
    cases = find_inputs(folder)
    assert names_of(cases) == sorted(expected)
    for case in cases:
        holds(case, expected[case.name])


def test_kinds_of_images_whose_names_would_be_one(tmp_path):
    """Each word of a name has 40 letters: here what differs comes after them."""
    for number, kind in enumerate("MP"):
        write_volume(tmp_path / "in", HU + number, ImageType=["ORIGINAL", "PRIMARY", "RECONSTRUCTED", "FIELD", kind])
    cases = find_inputs(tmp_path / "in")
    assert len({*names_of(cases)}) == 2 and all("_ImageType-ORIGINAL-PRIMARY-RECON" in case.name for case in cases)
    assert sorted(float((Volume.read(case).image[0].numpy() - HU).mean()) for case in cases) == [0, 1]


def test_a_missing_a_copied_and_an_unreadable_slice(tmp_path):
    """... cost their own volume, or a note there."""
    two_echoes(folder := tmp_path / "in")[1][4].unlink()
    first, second = find_inputs(folder)
    holds(first, HU + 1)
    refuses(lambda: Volume.read(second), folder, "2.5 to 5 mm apart; one is missing or doubled")

    shutil.copy(two_echoes(folder := tmp_path / "copy")[1][4], folder / "copy")
    first, second = find_inputs(folder)
    holds(first, HU + 1)
    holds(second, HU + 2, f"{folder}: 1 slices are there twice; the copies are left out")

    lost = two_echoes(folder := tmp_path / "lost")[1][4]
    lost.write_bytes(lost.read_bytes()[:150])
    for case in find_inputs(folder):
        refuses(lambda case=case: Volume.read(case), lost, "cannot be read|cut short")


def test_what_is_no_second_volume(tmp_path):
    """One slice scanned again, and times of which each file has its own: one case, and what differs in its error.
    Copies that differ in a tag, and tags that differ in a single volume: no error."""
    again, times, copies, one = (tmp_path / name for name in ("again", "times", "copies", "one"))
    slices = write_volume(again, HU, AcquisitionNumber=1)
    voxels = (HU[..., 3].T + 1025).astype(np.uint16).tobytes()
    edit(shutil.copy(slices[3], again / "new"), AcquisitionNumber=2, SOPInstanceUID="1.2.6", PixelData=voxels)
    for number, file in enumerate([*write_volume(times, HU), *write_volume(times, HU + 1)]):
        edit(file, ContentTime=f"1015{number:02d}")
    words = r"0 to 2.5 mm apart; one is missing or doubled \(between .* of one place: "
    for folder, differ in (
        (again, r"AcquisitionNumber \d and \d; expected one volume\)"),
        (times, r"ContentTime 1015\d\d and 1015\d\d; "),
    ):
        (case,) = find_inputs(folder)
        refuses(lambda case=case: Volume.read(case), folder, words + differ)

    for number, file in enumerate(write_volume(copies, HU)):
        edit(shutil.copy(file, copies / f"copy{number}"), ContentTime="111111")
    for number, file in enumerate(write_volume(one, HU)):
        edit(file, ContentTime=f"1015{number:02d}", AcquisitionNumber=number // 6, EchoTime=1.5)
    for folder, notes in ((copies, [f"{copies}: 11 slices are there twice; the copies are left out"]), (one, [])):
        (case,) = find_inputs(folder)
        assert case.name == folder.name
        holds(case, HU, *notes)


def test_places_that_differ_by_rounding(tmp_path):
    for echo, shift in ((1, 0.005), (2, 0.00501)):  # 1e-5 mm apart, on two sides of a hundredth
        for file in write_volume(tmp_path / "in", HU + echo, EchoNumbers=echo):
            x, y, z = pydicom.dcmread(file).ImagePositionPatient
            edit(file, ImagePositionPatient=[x, y, round(float(z) + shift, 5)])
    cases = find_inputs(tmp_path / "in")
    assert [case.name.rpartition("_")[2] for case in cases] == ["EchoNumbers-1", "EchoNumbers-2"]
    for echo, case in enumerate(cases, 1):
        holds(case, HU + echo)


def test_two_volumes_are_neither_one_image_nor_a_series_over_time(tmp_path):
    two_echoes(tmp_path)
    case = Case("x", (tmp_path,), None)
    refuses(lambda: Volume.read(case), tmp_path, "of one place: EchoNumbers [12] and [12]")
    for case in find_inputs(tmp_path):
        words = "is read as one volume, expected a file over time"
        refuses(lambda case=case: Volume.read(case.as_series(True)), tmp_path, words)


@pytest.mark.parametrize("kind", [["M", "ND", "MOSAIC"], ["MOSAIC", "NORM"], ["M", "DIS2D_MOSAIC"]])
def test_a_mosaic_is_refused(tmp_path, kind):
    """A sheet of tiles: its files over time are one case, one line of error."""
    for number in range(3):
        tags = {"AcquisitionNumber": number, "ImageType": ["ORIGINAL", "PRIMARY", *kind]}
        write_volume(tmp_path / "in", HU[..., :1] + number, Modality="MR", **tags)
    for case in (*find_inputs(tmp_path / "in"), Case("x", (tmp_path / "in",), None)):
        words = "ImageType is .*MOSAIC.*tiles of one plane.*dcm2niix"
        refuses(lambda case=case: Volume.read(case), tmp_path / "in" / "0", words)
    assert len(find_inputs(tmp_path / "in")) == 1


def test_series_are_compared_with_those_of_their_own_name_only(tmp_path, monkeypatch):
    """Tags read for each series: as many of 12 series as of 6."""
    read = []
    text_of = dicom_tree.text_of
    monkeypatch.setattr(dicom_tree, "text_of", lambda header, tag: read.append(tag) or text_of(header, tag))
    for count in (6, 12):
        for number in range(count):
            write_object(tmp_path / f"{number:02}" / "slice.dcm", "CT", ImagePositionPatient=[0, 0, number])
        read.append("end")
        assert len(find_inputs(tmp_path)) == count
    first = read.index("end", 1)
    assert len(read) - first == 2 * first - 1
