"""Layouts of folders: which files make a case."""

import json
from pathlib import PurePath

import numpy as np
import pytest

from ndlightnet.data.volume.datasets import find_inputs, read_dataset
from ndlightnet.data.volume.file_grid import Case
from ndlightnet.data.volume.formats import ENDINGS, FILES
from ndlightnet.data.volume.volume import Volume

from .files import HU, SHAPE, names_of, random_image, random_label, read_all, refuses, write, write_series


def relist(folder, listing):
    data = listing if isinstance(listing, bytes) else json.dumps(listing).encode()
    (folder / "dataset.json").write_bytes(data)
    return folder


# ------------------------------------------------------------------------------------- decathlon

DECATHLON = {
    "modality": {"0": "MRI"},
    "labels": {"0": "background", "2": "two", "1": "one"},
    "training": [{"image": "./images/a.nii.gz", "label": "./labels/a.nii.gz"}],
    "test": ["./images/b.nii.gz", {"image": ["./images/c.nii.gz"], "label": "labels/c.nii.gz"}],
}


@pytest.fixture
def decathlon(tmp_path):
    for name in ("a", "b", "c"):
        write(tmp_path / "images" / f"{name}.nii.gz", random_image())
        write(tmp_path / "labels" / f"{name}.nii.gz", random_label())
    return relist(tmp_path, DECATHLON)


def test_decathlon(decathlon):
    dataset = read_dataset(decathlon)
    assert dataset.labels == ("background", "one", "two") and dataset.channels == ("MRI",)
    image, label = decathlon / "images", decathlon / "labels"
    assert dataset.training == (Case("a", (image / "a.nii.gz",), label / "a.nii.gz"),)
    test = Case("b", (image / "b.nii.gz",), None), Case("c", (image / "c.nii.gz",), label / "c.nii.gz")
    assert dataset.test == test and find_inputs(decathlon) == [*test]
    assert names_of(find_inputs(str(image))) == ["a", "b", "c"]
    assert find_inputs(image / "a.nii.gz") == [Case("a", (image / "a.nii.gz",), None)]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_listing_with_a_byte_order_mark(decathlon, encoding):
    listing = {**DECATHLON, "labels": {"0": "background", "1": "Größe", "2": "two"}}
    relist(decathlon, json.dumps(listing, ensure_ascii=False).encode(encoding))
    assert read_dataset(decathlon).labels == ("background", "Größe", "two")


def test_cases_with_one_file_name_get_different_names(tmp_path):
    for name in ("p1", "p2"):
        write(tmp_path / name / "ct.nii.gz", random_image())
    listing = {"modality": {"0": "CT"}, "labels": {"0": "b"}, "test": ["p1/ct.nii.gz", "./p2/ct.nii.gz"]}
    assert names_of(read_dataset(relist(tmp_path, listing)).test) == ["p1_ct", "p2_ct"]


FILE, GAPS, ENTRY = "dataset.json", "should number from 0 without gaps", "has an entry without image files"
TWO_IMAGES = {"image": ["./images/a.nii.gz", "./images/b.nii.gz"]}
THREE = {"0": "A", "1": "B", "2": "C"}
BROKEN_TEXT = "cannot be read as JSON"


@pytest.mark.parametrize(
    "listing, place, words",
    [
        *[(data, FILE, BROKEN_TEXT) for data in (b"{", b"", b"x" * 5000, b"1" * 5000, b"\xff\xfe\x00")],
        *[(data, FILE, f"{BROKEN_TEXT} .maximum recursion") for data in (b"[" * 200_000, b'{"a":' * 100_000)],
        (b"[]", FILE, "should hold a JSON object"),
        (b"null", FILE, "should hold a JSON object"),
        (b"{}", FILE, r"neither 'channel_names' \(nnU-Net\) nor 'modality'"),
        ({"labels": {"0": "b", "2": "x"}}, FILE, rf"'labels' {GAPS}, has \[0, 2\]"),
        ({"labels": {"1": "b", "2": "x"}}, FILE, GAPS),
        ({"labels": {"background": 0}}, FILE, GAPS),
        ({"labels": {"9" * 5000: "a"}}, FILE, GAPS),
        ({"labels": {"a" * 5000: "b"}}, FILE, GAPS),
        ({"labels": ["background"]}, FILE, "'labels' should map numbers"),
        ({"modality": {}}, FILE, "'modality' should map numbers"),
        ({"training": [], "test": []}, FILE, "lists no case for training or test"),
        ({"training": {"image": "x"}}, FILE, "should be a list"),
        ({"training": [{"label": "./labels/a.nii.gz"}]}, FILE, ENTRY),
        ({"training": [{"image": 5}]}, FILE, ENTRY),
        ({"test": [3]}, FILE, ENTRY),
        ({"modality": THREE, "test": [TWO_IMAGES]}, FILE, "should list 3 image files"),
        ({"test": [{"image": []}]}, FILE, "should list 1 image files"),
        ({"training": ["./images/a.nii.gz"]}, FILE, "'a' has no label"),
        ({"test": ["./images/z.nii.gz"]}, "images/z.nii.gz", "no such file, though dataset.json asks for it"),
        ({"training": [{"image": "./images/a.nii.gz", "label": "labels/z.nii"}]}, "labels/z.nii", "no such file"),
        ({"test": ["x" * 5000]}, None, "no such file, though dataset.json asks for it"),
        ({"test": ["a\x00b\n.nii"]}, None, r"a\\x00b\\n.nii: no such file, though dataset.json asks"),
    ],
)
def test_a_decathlon_is_refused_in_a_line(decathlon, listing, place, words):
    relist(decathlon, {**DECATHLON, **listing} if isinstance(listing, dict) else listing)
    refuses(lambda: read_dataset(decathlon), place and decathlon / place, words)


def test_folders_without_a_listing(tmp_path):
    refuses(lambda: read_dataset(tmp_path / "gone"), tmp_path / "gone", "no such folder")
    words = "no such file, expected a folder in the layout of nnU-Net or"
    refuses(lambda: read_dataset(tmp_path), tmp_path / FILE, words)


def test_one_file_holds_all_modalities_on_its_fourth_axis(tmp_path):
    voxels = random_image((*SHAPE, 4))
    file = write(tmp_path / "brain.nii.gz", voxels)
    modality = {"0": "FLAIR", "1": "T1w", "2": "T1gd", "3": "T2w"}
    listing = {**DECATHLON, "modality": modality, "training": [], "test": ["brain.nii.gz"]}
    dataset = read_dataset(relist(tmp_path, listing))
    assert dataset.channels == ("FLAIR", "T1w", "T1gd", "T2w")
    np.testing.assert_array_equal(Volume.read(dataset.test[0], 1, 4).image, np.moveaxis(voxels, -1, 0))
    refuses(lambda: read_all(dataset.test, 1, 3), file, "4 channels, expected 3")


@pytest.mark.parametrize("channels", [1, 2])
def test_nnunet_1_lists_a_case_of_which_the_channels_are_there(tmp_path, channels):
    for case in "ab":
        for channel in range(channels):
            write(tmp_path / f"imagesTr/{case}_000{channel}.nii.gz", random_image(seed=channel))
    write(tmp_path / "labelsTr/a.nii.gz", random_label())
    listing = {
        "modality": {str(channel): "MRI" for channel in range(channels)},
        "labels": {"0": "background", "1": "x", "2": "y"},
        "training": [{"image": "./imagesTr/a.nii.gz", "label": "./labelsTr/a.nii.gz"}],
        "test": ["./imagesTr/b.nii.gz"],
    }
    dataset = read_dataset(relist(tmp_path, listing))
    (a,), (b,) = dataset.training, dataset.test
    assert (a.name, b.name) == ("a", "b") and len(a.images) == len(b.images) == channels
    read_all([a, b], 3, channels)
    more = write(tmp_path / f"imagesTr/a_000{channels}.nii.gz", random_image())
    refuses(lambda: read_dataset(tmp_path), more, f"is channel {channels}, expected 0..")
    more.unlink()
    a.images[-1].unlink()
    missing = a.images[-1] if channels > 1 else tmp_path / "./imagesTr/a.nii.gz"
    refuses(lambda: read_dataset(tmp_path), missing, "no such file")
    single = write(tmp_path / "imagesTr/a.nii.gz", random_image((*SHAPE, channels)))
    assert read_dataset(tmp_path).training[0].images == (single,)


# ---------------------------------------------------------------------------------------- nnU-Net

NNUNET = {
    "channel_names": {"0": "CT", "1": "PET"},
    "labels": {"tumour": 2, "background": 0, "liver": 1},
    "numTraining": 2,
    "file_ending": ".nii.gz",
}


@pytest.fixture
def nnunet(tmp_path):
    """Two channels; case b of the test has no label; a left-over and a foreign file beside."""
    for kind, names in (("Tr", ("p_01", "p_02")), ("Ts", ("a", "b"))):
        for name in names:
            for channel in ("0000", "0001"):
                write(tmp_path / f"images{kind}" / f"{name}_{channel}.nii.gz", random_image())
            if name != "b":
                write(tmp_path / f"labels{kind}" / f"{name}.nii.gz", random_label())
    (tmp_path / "imagesTr" / "._p_01_0000.nii.gz").write_bytes(b"mac")
    (tmp_path / "imagesTr" / "readme.txt").write_text("x")
    return relist(tmp_path, NNUNET)


def test_nnunet(nnunet):
    dataset = read_dataset(nnunet)
    assert dataset.folder == nnunet and dataset.channels == ("CT", "PET")
    assert dataset.labels == ("background", "liver", "tumour")

    def case(kind, name, label=True):
        images = (nnunet / f"images{kind}" / f"{name}_{c}.nii.gz" for c in ("0000", "0001"))
        return Case(name, (*images,), nnunet / f"labels{kind}/{name}.nii.gz" if label else None)

    assert dataset.training == (case("Tr", "p_01"), case("Tr", "p_02"))
    assert dataset.test == (case("Ts", "a"), case("Ts", "b", label=False))
    read_all([*dataset.training, *dataset.test], 3, 2)
    assert find_inputs(nnunet, channels=2) == list(dataset.test)


def test_nnunet_endings_in_capital_letters(nnunet):
    expected = [(case.name, len(case.images)) for case in read_dataset(nnunet).training]
    for name in ("imagesTr/p_01_0000", "imagesTr/p_01_0001", "imagesTr/p_02_0001", "labelsTr/p_02"):
        (nnunet / f"{name}.nii.gz").rename(nnunet / f"{name}.NII.GZ")
    for ending in (".nii.gz", ".NII.GZ"):
        relist(nnunet, {**NNUNET, "file_ending": ending})
        training = read_dataset(nnunet, notes := []).training
        assert [(case.name, len(case.images)) for case in training] == expected
        read_all(training, 3, 2)
        assert notes == [f"{nnunet}/imagesTr: 1 entry is left out: readme.txt (expected CASE_0000.nii.gz)"]
    assert len(find_inputs(nnunet / "imagesTr", 2)) == 2
    write(nnunet / "imagesTr" / "p_01_0000.nii.gz", random_image())
    refuses(lambda: read_dataset(nnunet), None, "p_01_0000.* is there as well; remove one")


@pytest.mark.parametrize(
    "changes, place, words",
    [
        ({"labels": ["background"]}, FILE, "should map names to numbers"),
        ({"labels": {}}, FILE, "should map names to numbers"),
        ({"labels": {"background": 0, "core": 2, "all": [1, 2]}}, FILE, r"the region 'all': \[1, 2\]; one number"),
        ({"labels": {"background": 0, "ignore": 1}}, FILE, "'ignore'"),
        *[({"labels": {"background": 0, "liver": second}}, FILE, GAPS) for second in (2, 1.0, True, "1", 0, None)],
        ({"labels": {"background": 1, "liver": 2}}, FILE, GAPS),
        ({"channel_names": ["CT", "PET"]}, FILE, "should map numbers"),
        ({"channel_names": {"0": "CT", "2": "PET"}}, FILE, GAPS),
        ({"file_ending": ".gif"}, FILE, r"'\.gif', expected one of \.nii\.gz"),
        ({"file_ending": None}, FILE, "None, expected one of"),
        ({"file_ending": ".mha"}, FILE, "no case"),
        ({"channel_names": THREE}, "imagesTr/p_01_0002.nii.gz", "no such file"),
        ({"channel_names": {"0": "CT"}}, "imagesTr/p_01_0001.nii.gz", r"is channel 1, expected 0\.\.0"),
    ],
)
def test_an_nnunet_folder_is_refused_in_a_line(nnunet, changes, place, words):
    relist(nnunet, {**NNUNET, **changes})
    refuses(lambda: read_dataset(nnunet), nnunet / place, words)


def test_files_of_nnunet_that_lack_or_have_no_channel(nnunet):
    for name in ("imagesTs/a_0000.nii.gz", "labelsTr/p_02.nii.gz"):
        moved = (nnunet / name).rename(nnunet / "moved")
        refuses(lambda: read_dataset(nnunet), nnunet / name, "no such file")
        moved.rename(nnunet / name)
    odd = write(nnunet / "imagesTr" / "p_03.nii.gz", random_image())
    refuses(lambda: read_dataset(nnunet), odd, "should be called CASE_0000")


# ---------------------------------------------------------------------------------------- inputs


def test_a_folder_of_all_kinds(tmp_path):
    write(tmp_path / "z.NII", random_image())
    write_series(tmp_path / "s1", HU)
    for name in ("broken.nii.gz", "._z.nii.gz", "notes.txt", "DICOMDIR", "picture.png", "a.mhd", "a.raw"):
        (tmp_path / name).touch()
    (tmp_path / "dangling.nii.gz").symlink_to("/nowhere")
    for name in ("empty", "folder.nii.gz"):
        (tmp_path / name).mkdir()
    header, broken, *sound = find_inputs(tmp_path, 1, notes := [])
    assert names_of([header, broken, *sound]) == ["a", "broken", "s1", "z"]
    assert notes == [
        f"{tmp_path}: 5 entries are left out: dangling.nii.gz, empty, folder.nii.gz, ... "
        f"(expected {', '.join(ENDINGS)} or a DICOM series)"
    ]
    refuses(lambda: Volume.read(broken), tmp_path / "broken.nii.gz", "cannot be read")
    read_all(sound, 1, 1)
    for case in sound:
        assert case.label is None and find_inputs(case.images[0], 1, notes := []) == [case] and notes == []


def test_numbered_files_are_the_channels_of_a_case(tmp_path):
    names = ("a_0000", "a_0001", "b_2021_0000", "b_2021_0001")
    files = [write(tmp_path / f"{name}.nii.gz", random_image()) for name in names]
    two = [Case("a", (files[0], files[1]), None), Case("b_2021", (files[2], files[3]), None)]
    assert find_inputs(tmp_path, 2) == two and find_inputs(files[0], 2) == two[:1]
    # One channel: every file is a case, and keeps its name unless all of them end in _0000.
    assert names_of(find_inputs(tmp_path)) == list(names)
    files[1].unlink()
    files[3].unlink()
    assert find_inputs(tmp_path) == [Case("a", (files[0],), None), Case("b_2021", (files[2],), None)]
    # A channel that is not there is said when its case is read, and stops no other case.
    a, _ = find_inputs(tmp_path, 2)
    refuses(lambda: Volume.read(a), files[1], "cannot be read")
    # What has no channel 0 is a case of its own: a year is not a channel.
    scan = write(tmp_path / "scan_2021.nii.gz", random_image((*SHAPE, 2)))
    series = write_series(tmp_path / "ct_0000", HU)
    images = {case.name: case.images for case in find_inputs(tmp_path, 2)}
    assert list(images) == ["a", "b_2021", "ct_0000", "scan_2021"]
    assert images["scan_2021"] == (scan,) and images["ct_0000"] == (series,)
    assert names_of(find_inputs(tmp_path)) == ["a_0000", "b_2021_0000", "ct_0000", "scan_2021"]

    more = write(tmp_path / "a_0002.nii.gz", random_image())
    refuses(lambda: find_inputs(tmp_path, 2), more, r"channel 2, expected 0\.\.1")
    more.unlink()
    twin = write(tmp_path / "a.nii.gz", random_image())
    refuses(lambda: find_inputs(tmp_path, 2), twin, "another case is called 'a'")


def test_what_holds_no_inputs(decathlon):
    for name in ("x.txt", "x.img", "x.raw"):
        (decathlon / name).write_bytes(b"")
    (decathlon / "none").mkdir()
    relist(decathlon, {**DECATHLON, "test": []})
    for name, words in {
        "": "dataset.json lists no test case",
        "x.txt": f"not a {FILES}",
        "x.img": r"expected x.*\.hdr",
        "x.raw": r"expected x.*\.mhd",
        "gone": "no such file",
        "none": "holds no NIfTI",
    }.items():
        refuses(lambda name=name: find_inputs(decathlon / name), decathlon / name, words)


def test_files_that_differ_in_their_endings_are_two_cases(tmp_path):
    for name in ("a.nii", "a.nii.gz", "b.nii"):
        write(tmp_path / name, random_image())
    slices = write_series(tmp_path / "b", HU)
    assert names_of(find_inputs(tmp_path)) == ["a.nii", "a.nii.gz", "b", "b.nii"]
    write(slices / "b.nii.gz", random_image())
    assert names_of(find_inputs(slices)) == ["b", "b.nii.gz"]


def test_volumes_at_any_depth(tmp_path):
    """A folder in the layout of BIDS; repeated names get those of their folders."""
    for subject in ("01", "02"):
        write(tmp_path / f"sub-{subject}/anat/sub-{subject}_T1w.nii.gz", random_image())
        write(tmp_path / f"sub-{subject}/dwi/mean.nii.gz", random_image())
    write(tmp_path / "derivatives/masks/sub-01_dseg.nii.gz", random_label())
    write_series(tmp_path / "derivatives/ct", HU)
    write(tmp_path / "sub-01/anat/masks/mask.nii.gz", random_label())  # below a folder of volumes
    write(tmp_path / ".git/annex/x.nii.gz", random_image())
    (tmp_path / "sub-02/anat/lost.nii.gz").symlink_to("/nowhere")
    (tmp_path / "loop").symlink_to(tmp_path)
    write_series(tmp_path / "sub-02/ct", HU)
    (tmp_path / "participants.tsv").write_text("x")
    cases = find_inputs(tmp_path, notes=(notes := []))
    of_subjects = [f"sub-{number}_{name}" for number in ("01", "02") for name in (f"anat_sub-{number}_T1w", "dwi_mean")]
    assert names_of(cases) == [*of_subjects, "unknown_CT"]
    read_all(cases, 1, 1)
    (note,) = notes
    assert note.startswith(f"{tmp_path}: 5 entries are left out: derivatives, loop, participants.tsv, ...")


def test_channels_at_any_depth(tmp_path):
    for case in ("a", "b"):
        for channel in (0, 1):
            write(tmp_path / f"{case}/{case}_000{channel}.nii.gz", random_image())
    assert [(case.name, len(case.images)) for case in find_inputs(tmp_path, 2)] == [("a", 2), ("b", 2)]


def test_listing_compares_no_file_with_all_others(tmp_path, monkeypatch):
    """Paths are looked up, not compared one by one: so many comparisons as files, not their square."""
    for number in range(60):
        (tmp_path / f"{number:02}_0000.nii.gz").touch()
    compared = []
    equal = PurePath.__eq__
    monkeypatch.setattr(PurePath, "__eq__", lambda one, two: compared.append(one) or equal(one, two))
    assert len(find_inputs(tmp_path)) == 60
    assert len(compared) < 5 * 60
