"""Layouts of folders: which files make a case."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ndlightnet.data.errors import DataError
from ndlightnet.data.volume.datasets import find_inputs, read_dataset
from ndlightnet.data.volume.file_grid import Case
from ndlightnet.data.volume.volume import Volume

from .files import HU, SHAPE, random_image, random_label, read_all, refuses, write, write_series

# ------------------------------------------------------------------------------------- decathlon


@pytest.fixture
def listed(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    for name in ("a", "b", "c"):
        write(tmp_path / "images" / f"{name}.nii.gz", random_image())
        write(tmp_path / "labels" / f"{name}.nii.gz", random_label())
    listing = {
        "modality": {"0": "MRI"},
        "labels": {"0": "background", "10": "x", "2": "two", "1": "one"},
        "training": [{"image": "./images/a.nii.gz", "label": "./labels/a.nii.gz"}],
        "test": ["./images/b.nii.gz", {"image": ["./images/c.nii.gz"], "label": "labels/c.nii.gz"}],
    }
    del listing["labels"]["10"]
    return tmp_path, listing


def relist(folder: Path, listing: Any) -> Path:
    (folder / "dataset.json").write_text(listing if isinstance(listing, str) else json.dumps(listing))
    return folder


def test_decathlon(listed: tuple[Path, dict[str, Any]]) -> None:
    folder, listing = listed
    found = read_dataset(relist(folder, listing))
    assert found.labels == ("background", "one", "two") and found.channels == ("MRI",)
    image, label = folder / "images", folder / "labels"
    assert found.training == (Case("a", (image / "a.nii.gz",), label / "a.nii.gz"),)
    assert found.test == (Case("b", (image / "b.nii.gz",), None), Case("c", (image / "c.nii.gz",), label / "c.nii.gz"))


def test_cases_with_one_file_name_get_different_names(tmp_path: Path) -> None:
    for name in ("p1", "p2"):
        write(tmp_path / name / "ct.nii.gz", random_image())
    listing = {"modality": {"0": "CT"}, "labels": {"0": "b"}}
    listing["test"] = ["p1/ct.nii.gz", "./p2/ct.nii.gz"]  # type: ignore[assignment]
    assert [c.name for c in read_dataset(relist(tmp_path, listing)).test] == ["p1_ct", "p2_ct"]


def test_decathlon_refuses(listed: tuple[Path, dict[str, Any]]) -> None:
    folder, listing = listed
    file = folder / "dataset.json"

    def bad(path: Path, words: str, **changes: Any) -> None:
        relist(folder, {**listing, **changes})
        refuses(lambda: read_dataset(folder), path, words)

    refuses(lambda: read_dataset(folder / "gone"), folder / "gone", "no such folder")
    refuses(lambda: read_dataset(folder), file, "no such file")
    neither = r"neither 'channel_names' \(nnU-Net\) nor 'modality'"
    for text, words in (("{", "not valid JSON"), ("[]", "JSON object"), ("{}", neither)):
        relist(folder, text)
        refuses(lambda: read_dataset(folder), file, words)
    file.write_bytes(b"\xff\xfe\x00")
    refuses(lambda: read_dataset(folder), file, "not valid JSON")
    bad(file, "without gaps", labels={"0": "b", "2": "x"})
    bad(file, "without gaps", labels={"1": "b", "2": "x"})
    bad(file, "without gaps", labels={"background": 0})
    bad(file, "map numbers", labels=["background"])
    bad(file, "map numbers", modality={})
    bad(file, "no case", training=[], test=[])
    bad(file, "should be a list", training={"image": "x"})
    bad(file, "without image files", training=[{"label": "./labels/a.nii.gz"}])
    bad(file, "without image files", test=[3])
    two = {"image": ["./images/a.nii.gz", "./images/b.nii.gz"]}
    bad(file, "should list 3 image files", modality={"0": "A", "1": "B", "2": "C"}, test=[two])
    bad(file, "should list 1 image files", test=[{"image": []}])
    bad(file, "'a' has no label", training=["./images/a.nii.gz"])
    bad(folder / "images/z.nii.gz", "no such file", test=["./images/z.nii.gz"])
    entry = {"image": "./images/a.nii.gz", "label": "labels/z.nii.gz"}
    bad(folder / "labels/z.nii.gz", "no such file", training=[entry])


@pytest.mark.parametrize(
    "listing, why",
    [
        ("[" * 200_000, "is not valid JSON (maximum recursion depth"),
        ('{"modality": ' + "[" * 200_000, "is not valid JSON (maximum recursion depth"),
        ('{"a":' * 100_000, "is not valid JSON (maximum recursion depth"),
        ("x" * 5000, "is not valid JSON"),
        ("1" * 5000, "is not valid JSON"),
        ("", "is not valid JSON"),
        ("null", "a JSON object"),
        ({"labels": {"9" * 5000: "a"}}, "'labels' should number from 0"),
        ({"labels": {"a" * 5000: "b"}}, "'labels' should number from 0"),
        ({"labels": ["a"]}, "'labels' should map numbers"),
        ({"training": 5}, "should be a list"),
        ({"training": [{"image": 5}]}, "has an entry without image files"),
        ({"test": ["x" * 5000]}, "no such file, though dataset.json asks for it"),
        ({"test": ["a\x00b\n.nii"]}, r"a\x00b\n.nii: no such file, though dataset.json asks"),
    ],
)
def test_an_odd_listing_is_one_short_line(tmp_path: Path, listing: Any, why: str) -> None:
    good = {"labels": {"0": "background"}, "modality": {"0": "CT"}, "training": [], "test": []}
    relist(tmp_path, {**good, **listing} if isinstance(listing, dict) else listing)
    with pytest.raises(DataError) as raised:
        read_dataset(tmp_path)
    message = str(raised.value)
    assert why in message and message.startswith(str(tmp_path))
    assert message.isprintable() and len(message) <= 1000


def test_one_file_holds_all_modalities_on_its_fourth_axis(tmp_path: Path) -> None:
    write(tmp_path / "brain.nii.gz", random_image((*SHAPE, 4)))
    listing = {"modality": dict(zip("0123", ("FLAIR", "T1w", "T1gd", "T2w"), strict=True))}
    listing |= {"labels": {"0": "background"}, "test": ["brain.nii.gz"]}  # type: ignore[dict-item]
    found = read_dataset(relist(tmp_path, listing))
    assert found.channels == ("FLAIR", "T1w", "T1gd", "T2w")
    image = Volume.read(found.test[0]).image
    np.testing.assert_array_equal(image, np.moveaxis(random_image((*SHAPE, 4)), -1, 0))
    read_all(found.test, 1, 4)
    file = found.test[0].images[0]
    refuses(lambda: read_all(found.test, 1, 3), file, "4 channels, expected 3")


@pytest.mark.parametrize("channels", [1, 2])
def test_nnunet_1_lists_a_case_of_which_the_channels_are_there(tmp_path: Path, channels: int) -> None:
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
    found = read_dataset(relist(tmp_path, listing))
    (a,), (b,) = found.training, found.test
    assert (a.name, b.name) == ("a", "b") and len(a.images) == len(b.images) == channels
    read_all([a, b], 3, channels)
    more = write(tmp_path / f"imagesTr/a_000{channels}.nii.gz", random_image())
    refuses(lambda: read_dataset(tmp_path), more, f"is channel {channels}, expected 0..")
    more.unlink()
    a.images[-1].unlink()
    asked = a.images[-1] if channels > 1 else tmp_path / "./imagesTr/a.nii.gz"
    refuses(lambda: read_dataset(tmp_path), asked, "no such file")
    whole = write(tmp_path / "imagesTr/a.nii.gz", random_image((*SHAPE, channels)))
    assert read_dataset(tmp_path).training[0].images == (whole,)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_listing_with_a_byte_order_mark(listed: tuple[Path, dict[str, Any]], encoding: str) -> None:
    folder, listing = listed
    listing["labels"]["1"] = "Größe"
    text = json.dumps(listing, ensure_ascii=False)
    (folder / "dataset.json").write_bytes(text.encode(encoding))
    assert read_dataset(folder).labels == ("background", "Größe", "two")


# ---------------------------------------------------------------------------------------- nnU-Net


@pytest.fixture
def nnunet(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """Two channels; case b of the test has no label; a left-over and a foreign file beside."""
    for kind, names in (("Tr", ("p_01", "p_02")), ("Ts", ("a", "b"))):
        for name in names:
            for channel in ("0000", "0001"):
                write(tmp_path / f"images{kind}" / f"{name}_{channel}.nii.gz", random_image())
            if name != "b":
                write(tmp_path / f"labels{kind}" / f"{name}.nii.gz", random_label())
    (tmp_path / "imagesTr" / "._p_01_0000.nii.gz").write_bytes(b"mac")
    (tmp_path / "imagesTr" / "readme.txt").write_text("x")
    listing = {
        "channel_names": {"0": "CT", "1": "PET"},
        "labels": {"tumour": 2, "background": 0, "liver": 1},
        "numTraining": 2,
        "file_ending": ".nii.gz",
    }
    return relist(tmp_path, listing), listing


def test_nnunet(nnunet: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = nnunet
    found = read_dataset(folder)
    assert found.folder == folder and found.channels == ("CT", "PET")
    assert found.labels == ("background", "liver", "tumour")

    def case(kind: str, name: str, label: bool = True) -> Case:
        images = (folder / f"images{kind}" / f"{name}_{c}.nii.gz" for c in ("0000", "0001"))
        return Case(name, (*images,), folder / f"labels{kind}/{name}.nii.gz" if label else None)

    assert found.training == (case("Tr", "p_01"), case("Tr", "p_02"))
    assert found.test == (case("Ts", "a"), case("Ts", "b", label=False))
    read_all([*found.training, *found.test], 3, 2)
    assert find_inputs(folder, channels=2) == list(found.test)


def test_nnunet_endings_in_capital_letters(nnunet: tuple[Path, dict[str, Any]]) -> None:
    folder, listing = nnunet
    expected = [(case.name, len(case.images)) for case in read_dataset(folder).training]
    for name in ("imagesTr/p_01_0000", "imagesTr/p_01_0001", "imagesTr/p_02_0001", "labelsTr/p_02"):
        (folder / f"{name}.nii.gz").rename(folder / f"{name}.NII.GZ")
    for ending in (".nii.gz", ".NII.GZ"):
        relist(folder, {**listing, "file_ending": ending})
        notes: list[str] = []
        found = read_dataset(folder, notes)
        assert [(case.name, len(case.images)) for case in found.training] == expected
        read_all(found.training, 3, 2)
        assert notes == [f"{folder}/imagesTr: 1 entry is left out: readme.txt (expected CASE_0000.nii.gz)"]
    assert len(find_inputs(folder / "imagesTr", 2)) == 2
    twin = write(folder / "imagesTr" / "p_01_0000.nii.gz", random_image())
    refuses(lambda: read_dataset(folder), None, "p_01_0000.* is there as well; remove one")
    assert twin.exists()


def test_nnunet_refuses(nnunet: tuple[Path, dict[str, Any]]) -> None:
    folder, listing = nnunet
    file = folder / "dataset.json"

    def bad(path: Path, words: str, **changes: Any) -> None:
        relist(folder, {**listing, **changes})
        refuses(lambda: read_dataset(folder), path, words)

    bad(file, "map names to numbers", labels=["background"])
    bad(file, "map names to numbers", labels={})
    bad(file, r"region 'whole': \[1, 2\]", labels={"background": 0, "whole": [1, 2], "core": 2})
    bad(file, "'ignore'", labels={"background": 0, "ignore": 1})
    for numbers in ((0, 2), (1, 2), (0, 1.0), (0, True), (0, "1"), (0, 0), (0, None)):
        bad(file, "without gaps", labels=dict(zip(("background", "liver"), numbers, strict=True)))
    bad(file, "map numbers", channel_names=["CT", "PET"])
    bad(file, "without gaps", channel_names={"0": "CT", "2": "PET"})
    bad(file, r"'\.gif', expected one of \.nii\.gz", file_ending=".gif")
    bad(file, "None, expected one of", file_ending=None)
    bad(file, "no case", file_ending=".mha")
    three = {"0": "CT", "1": "PET", "2": "MR"}
    bad(folder / "imagesTr/p_01_0002.nii.gz", "no such file", channel_names=three)
    bad(folder / "imagesTr/p_01_0001.nii.gz", r"channel 1, expected 0\.\.0", channel_names={"0": "CT"})
    (folder / "imagesTs" / "a_0000.nii.gz").unlink()
    bad(folder / "imagesTs/a_0000.nii.gz", "no such file")
    (folder / "labelsTr" / "p_02.nii.gz").unlink()
    bad(folder / "labelsTr/p_02.nii.gz", "no such file")
    odd = write(folder / "imagesTr" / "p_03.nii.gz", random_image())
    bad(odd, "should be called CASE_0000")


# ---------------------------------------------------------------------------------------- inputs


def test_find_inputs(listed: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, listing = listed
    (one,) = find_inputs(folder / "images" / "a.nii.gz")
    assert one == Case("a", (folder / "images" / "a.nii.gz",), None)
    assert [c.name for c in find_inputs(str(folder / "images"))] == ["a", "b", "c"]

    mixed = tmp_path / "mixed"
    write(mixed / "z.nii", random_image())
    write_series(mixed / "s1", HU)
    (mixed / "broken.nii.gz").write_bytes(b"")
    (mixed / "._z.nii.gz").write_bytes(b"mac")
    (mixed / "notes.txt").write_text("x")
    (mixed / "empty").mkdir()
    found = find_inputs(mixed)
    assert [c.name for c in found] == ["broken", "s1", "z"]
    assert all(c.label is None for c in found)
    refuses(lambda: Volume.read(found[0]), mixed / "broken.nii.gz", "cannot be read")
    assert Volume.read(found[1]).image.shape == Volume.read(found[2]).image.shape

    found = find_inputs(relist(folder, listing))
    assert [(c.name, c.label is None) for c in found] == [("b", True), ("c", False)]


def test_numbered_files_are_the_channels_of_a_case(tmp_path: Path) -> None:
    names = ("a_0000", "a_0001", "b_2021_0000", "b_2021_0001")
    files = [write(tmp_path / f"{name}.nii.gz", random_image()) for name in names]
    assert find_inputs(tmp_path, 2) == [
        Case("a", (files[0], files[1]), None),
        Case("b_2021", (files[2], files[3]), None),
    ]
    assert find_inputs(files[0], 2) == find_inputs(tmp_path, 2)[:1]
    # One channel: every file is a case, and keeps its name unless all of them end in _0000.
    assert [c.name for c in find_inputs(tmp_path)] == list(names)
    files[1].unlink()
    files[3].unlink()
    first, second = Case("a", (files[0],), None), Case("b_2021", (files[2],), None)
    assert find_inputs(tmp_path) == [first, second]
    # A channel that is not there is said when its case is read, and stops no other case.
    a, _ = find_inputs(tmp_path, 2)
    refuses(lambda: Volume.read(a), files[1], "cannot be read")
    # What has no channel 0 is a case of its own: a year is not a channel.
    scan = write(tmp_path / "scan_2021.nii.gz", random_image((*SHAPE, 2)))
    series = write_series(tmp_path / "ct_0000", HU)
    found = {c.name: c.images for c in find_inputs(tmp_path, 2)}
    assert list(found) == ["a", "b_2021", "ct_0000", "scan_2021"]
    assert found["scan_2021"] == (scan,) and found["ct_0000"] == (series,)
    assert [c.name for c in find_inputs(tmp_path)] == ["a_0000", "b_2021_0000", "ct_0000", "scan_2021"]

    more = write(tmp_path / "a_0002.nii.gz", random_image())
    refuses(lambda: find_inputs(tmp_path, 2), more, r"channel 2, expected 0\.\.1")
    more.unlink()
    twin = write(tmp_path / "a.nii.gz", random_image())
    refuses(lambda: find_inputs(tmp_path, 2), twin, "another case is called 'a'")


def test_find_inputs_refuses(listed: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, listing = listed
    text = tmp_path / "x.txt"
    text.write_text("x")
    (tmp_path / "none").mkdir()
    refuses(lambda: find_inputs(text), text, "not a NIfTI, Analyze, NRRD or MetaImage file")
    for name, header in (("x.img", r"\.hdr"), ("x.raw", r"\.mhd")):
        (tmp_path / name).write_bytes(b"")
        refuses(lambda: find_inputs(tmp_path / name), tmp_path / name, f"expected x.*{header}")  # noqa: B023
    refuses(lambda: find_inputs(tmp_path / "gone"), tmp_path / "gone", "no such file")
    refuses(lambda: find_inputs(tmp_path / "none"), tmp_path / "none", "holds no NIfTI")
    relist(folder, {**listing, "test": []})
    refuses(lambda: find_inputs(folder), folder, "no test case")


def test_files_that_differ_in_their_endings_are_two_cases(tmp_path: Path) -> None:
    for name in ("a.nii", "a.nii.gz", "b.nii"):
        write(tmp_path / name, random_image())
    write_series(tmp_path / "b", HU)
    assert [c.name for c in find_inputs(tmp_path)] == ["a.nii", "a.nii.gz", "b", "b.nii"]
    slices = write_series(tmp_path / "in" / "own", HU)
    write(slices / "own.nii.gz", random_image())
    assert [c.name for c in find_inputs(slices)] == ["own", "own.nii.gz"]


def test_volumes_at_any_depth(tmp_path: Path) -> None:
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
    notes: list[str] = []
    cases = find_inputs(tmp_path, notes=notes)
    assert [case.name for case in cases] == [
        "sub-01_anat_sub-01_T1w",
        "sub-01_dwi_mean",
        "sub-02_anat_sub-02_T1w",
        "sub-02_dwi_mean",
        "unknown_CT",
    ]
    read_all(cases, 1, 1)
    assert len(notes) == 1 and notes[0].startswith(
        f"{tmp_path}: 5 entries are left out: derivatives, loop, participants.tsv, ..."
    )


def test_channels_at_any_depth(tmp_path: Path) -> None:
    for case in ("a", "b"):
        for channel in (0, 1):
            write(tmp_path / f"{case}/{case}_000{channel}.nii.gz", random_image())
    assert [(case.name, len(case.images)) for case in find_inputs(tmp_path, 2)] == [("a", 2), ("b", 2)]
