"""Where a root of data lies, and the line on entries of a folder that are not read."""

from pathlib import Path

import pytest

from ndlightnet.data.folders import DATA_VARIABLE, find_root, report_skipped
from ndlightnet.data.video.video_files import find_videos, read_video_folder
from ndlightnet.data.volume.class_folders import list_classes
from ndlightnet.data.volume.datasets import find_inputs

from .volume.files import HU, random_image, write, write_series


def left_by(entries: list[Path], folder: Path) -> str:
    """The first words of the one line, "" if there is none."""
    notes: list[str] = []
    report_skipped(entries, folder, "better ones", notes)
    assert len(notes) <= 1
    if not notes:
        return ""
    assert notes[0].startswith(f"{folder}: ") and notes[0].endswith(" (expected better ones)")
    return notes[0].removeprefix(f"{folder}: ").removesuffix(" (expected better ones)")


def test_the_count_and_the_first_names(tmp_path: Path) -> None:
    entries = [tmp_path / name for name in ("d", "b", "sub/c", "a\n", ".hidden")]
    assert left_by([], tmp_path) == left_by(entries[4:], tmp_path) == ""
    assert left_by(entries[:1], tmp_path) == "1 entry is left out: d"
    assert left_by(entries[:3], tmp_path) == "3 entries are left out: b, d, sub/c"
    assert left_by(entries, tmp_path) == r"4 entries are left out: a\n, b, d, ..."
    report_skipped(entries, tmp_path, "better ones", None)  # nobody wants to know


def test_the_kinds_of_many(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    names = ("1.TXT", "2.txt", "3.txt", "a.nii.gz", "b.nii.gz", "none", "sub")
    entries = [tmp_path / name for name in names]
    counted = "7 entries are left out (3 .txt, 2 .nii.gz, 1 without ending, 1 folder): 1.TXT, "
    assert left_by(entries, tmp_path) == f"{counted}2.txt, 3.txt, ..."


def junk(folder: Path, ending: str) -> None:
    """Four entries that are read nowhere."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"dangling{ending}").symlink_to("/nowhere")
    (folder / f"folder{ending}").mkdir()
    (folder / "picture.png").write_bytes(b"")
    (folder / "text.txt").write_text("")
    (folder / f".hidden{ending}").write_bytes(b"")


def test_volumes(tmp_path: Path) -> None:
    junk(tmp_path, ".nii.gz")
    notes: list[str] = []
    write(tmp_path / "UPPER.NII.GZ", random_image())
    write_series(tmp_path / "series", HU)
    (tmp_path / "DICOMDIR").write_bytes(b"")
    for name in ("a.mhd", "a.raw"):  # header and voxels
        (tmp_path / name).write_bytes(b"")
    assert [case.name for case in find_inputs(tmp_path, 1, notes)] == ["UPPER", "a", "series"]
    assert notes == [
        f"{tmp_path}: 4 entries are left out: dangling.nii.gz, folder.nii.gz, picture.png, ... "
        "(expected .nii.gz, .nii, .hdr.gz, .hdr, .nrrd, .mha, .mhd or a DICOM series)"
    ]
    notes.clear()
    find_inputs(tmp_path / "series", 1, notes)
    find_inputs(tmp_path / "UPPER.NII.GZ", 1, notes)
    assert notes == []


def test_classes_of_volumes(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for name in ("x", "y"):
            write(tmp_path / part / name / "0.nii.gz", random_image())
    junk(tmp_path / "train" / "x", ".nii")
    (tmp_path / "test" / "0.nii.gz").write_bytes(b"")
    notes: list[str] = []
    list_classes(tmp_path, notes)
    assert [note[: note.index(" (")] for note in notes] == [
        f"{tmp_path}/train/x: 4 entries are left out: dangling.nii, folder.nii, picture.png, ...",
        f"{tmp_path}/test: 1 entry is left out: 0.nii.gz",
    ]


@pytest.mark.parametrize("ending", [".mp4", ".M4V", ".mpg", ".MPEG", ".gif"])
def test_videos(tmp_path: Path, ending: str) -> None:
    for split in ("train", "test"):
        for name in ("x", "y"):
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / f"a{ending}").write_bytes(b"")
    junk(tmp_path / "train" / "y", ending)
    (tmp_path / "test" / f"misplaced{ending}").write_bytes(b"")
    notes: list[str] = []
    found = read_video_folder(tmp_path, notes)
    assert [sample.path.name for sample in found.train] == [f"a{ending}"] * 2
    left = f"y/dangling{ending}, y/folder{ending}, y/picture.png, ..."
    assert [note[: note.index(" (")] for note in notes] == [
        f"{tmp_path}/train: 4 entries are left out: {left}",
        f"{tmp_path}/test: 1 entry is left out: misplaced{ending}",
    ]
    notes.clear()
    assert len(find_videos(tmp_path, notes)) == 5
    assert len(notes) == 1 and "4 entries are left out: train/y/dangling" in notes[0]


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store with the folder `ett` and the file `text/enwik8.xz`, and an empty working folder."""
    (tmp_path / "store" / "ett").mkdir(parents=True)
    (tmp_path / "store" / "text").mkdir()
    (tmp_path / "store" / "text" / "enwik8.xz").touch()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "store"))
    return tmp_path / "store"


@pytest.mark.parametrize("root", ["ett", "text/enwik8.xz", Path("ett")])
def test_a_relative_root_is_found_in_the_store(store, root):
    assert find_root(root) == store / root


def test_the_working_folder_goes_first(store):
    Path("ett").mkdir()
    assert find_root("ett") == Path("ett")


@pytest.mark.parametrize("root", ["runs/phantoms/data", "/ett"])
def test_what_is_not_there_or_absolute_stays(store, root):
    assert find_root(root) == Path(root)


@pytest.mark.parametrize("value", [None, ""])
def test_without_the_variable_a_root_stays(store, monkeypatch, value):
    monkeypatch.delenv(DATA_VARIABLE) if value is None else monkeypatch.setenv(DATA_VARIABLE, value)
    assert find_root("ett") == Path("ett")


def test_the_variable_may_begin_with_a_tilde(store, monkeypatch):
    monkeypatch.setenv("HOME", str(store.parent))
    monkeypatch.setenv(DATA_VARIABLE, "~/store")
    assert find_root("ett") == store / "ett"
