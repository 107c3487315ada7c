"""Where a root of data lies, which files and class folders there are, and the line on entries that are not read."""

import os
from pathlib import Path

import pytest

from ndlightnet.data.folders import DATA_VARIABLE, class_folders, class_names, find_root, list_files, report_skipped
from ndlightnet.data.image.image_folder import list_images
from ndlightnet.data.video.video_files import read_video_folder
from ndlightnet.data.volume.class_folders import list_classes

from .refusals import refuses

IMAGES = (".png", ".jpg")


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
    report_skipped(entries, tmp_path, "better ones", None)


def test_the_kinds_of_many(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    names = ("1.TXT", "2.txt", "3.txt", "a.nii.gz", "b.nii.gz", "none", "sub")
    counted = "7 entries are left out (3 .txt, 2 .nii.gz, 1 without ending, 1 folder): 1.TXT, "
    assert left_by([tmp_path / name for name in names], tmp_path) == f"{counted}2.txt, 3.txt, ..."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes with two empty files each, beside them what is read nowhere."""
    names = ("cat/0.png", "cat/1.JPG", "dog/0.png", "dog/deep/er/X.png", "dog/notes.txt", "dog/._0.png", ".cache/a.png")
    for name in (*names, "readme.md"):
        (tmp_path / "train" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / name).touch()
    return tmp_path / "train"


def test_class_folders_and_their_files(folder: Path) -> None:
    notes: list[str] = []
    classes = class_names(folder)
    assert classes == ("cat", "dog")
    folders = class_folders(folder, classes, notes)
    assert folders == [(folder / "cat", 0), (folder / "dog", 1)]
    assert class_folders(folder, ("ant", "cat", "dog"))[0] == (folder / "cat", 1)
    files = [list_files(path, IMAGES, notes) for path, _ in folders]
    assert files == [
        [f"{folder}/cat/0.png", f"{folder}/cat/1.JPG"],
        [f"{folder}/dog/0.png", f"{folder}/dog/deep/er/X.png"],
    ]
    assert notes == [
        f"{folder}: 1 entry is left out: readme.md (expected a folder for each class)",
        f"{folder}/dog: 1 entry is left out: notes.txt (expected .png, .jpg)",
    ]
    assert list_files(folder / "readme.md", IMAGES) == [f"{folder}/readme.md"]  # what a user names is read


@pytest.mark.parametrize("kind", ["images", "videos", "volumes"])
def test_readers_of_every_kind_use_them(tmp_path: Path, kind: str) -> None:
    ending = {"images": ".PNG", "videos": ".MP4", "volumes": ".nrrd"}[kind]
    for name in ("train/b/2", "train/b/1", "train/a/x", "test/b/3"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}{ending}").touch()
    (tmp_path / "train" / "a" / "notes.txt").touch()
    (tmp_path / "test" / f"misplaced{ending}").touch()
    notes: list[str] = []
    if kind == "images":
        splits = [list_images(tmp_path / split, ("a", "b"), notes) for split in ("train", "test")]
        samples = [[(files.path(n), label) for n, label in enumerate(files.labels.tolist())] for files in splits]
    elif kind == "videos":
        videos = read_video_folder(tmp_path, notes)
        assert videos.classes == ("a", "b")
        samples = [[tuple(sample) for sample in split] for split in (videos.train, videos.test)]
    else:
        classes, cases = list_classes(tmp_path, notes)
        assert classes == ("a", "b") and list(cases) == ["train", "test"]
        samples = [[(case.images[0], label) for case, label in split] for split in cases.values()]
    train, test = tmp_path / "train", tmp_path / "test"
    assert samples == [
        [(train / f"a/x{ending}", 0), (train / f"b/1{ending}", 1), (train / f"b/2{ending}", 1)],
        [(test / f"b/3{ending}", 1)],
    ]
    assert sorted(note.split(" (expected")[0] for note in notes) == [
        f"{test}: 1 entry is left out: misplaced{ending}",
        f"{train}/a: 1 entry is left out: notes.txt",
    ]


def test_folders_that_cannot_be_used(folder: Path) -> None:
    (empty := folder.parent / "val").mkdir()
    for read, path, words in (
        (class_names, folder / "gone", "no such folder, expected one with a folder"),
        (class_names, folder / "dog", r"has the classes \['deep'\], expected two or more"),
        (lambda path: class_names(path / "train"), folder / "gone", "no such folder$"),
        (
            lambda path: class_folders(path.parent, ("cat",)),
            folder / "dog",
            r"a class that training lacks, it has \['cat'\]",
        ),
        (lambda path: class_folders(path, ("cat",)), empty, "has no folder of a class, expected one for each"),
        (lambda path: list_files(path, IMAGES), empty, r"has no file to read, expected \.png, \.jpg"),
        (list_files, folder / "gone", "no such file or folder"),
    ):
        refuses(lambda read=read, path=path: read(path), path, words)


def test_links_and_permissions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links are followed, but not round in circles."""
    (linked := folder.parent / "linked").mkdir()
    (linked / "a.png").touch()
    (folder / "cat" / "more").symlink_to(linked)
    (linked / "back").symlink_to(folder / "cat")
    (linked / "dangling.png").symlink_to("/nowhere")
    notes: list[str] = []
    assert len(list_files(folder / "cat", IMAGES, notes)) == 3
    assert notes == [f"{folder}/cat: 1 entry is left out: more/dangling.png (expected .png, .jpg)"]

    def forbidden(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    for name, read in (
        ("os.scandir", list_files),
        ("pathlib.Path.is_file", list_files),
        ("pathlib.Path.is_dir", class_names),
        ("pathlib.Path.iterdir", lambda path: class_folders(path, ("cat", "dog"))),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(name, forbidden)
            refuses(lambda read=read: read(folder), None, r"cannot be read \(.*Permission denied")


def test_a_name_that_is_not_utf8(folder: Path) -> None:
    odd = Path(os.fsdecode(bytes(folder) + b"/cat/\xff\xe9.png"))
    odd.touch()
    files = list_images(folder, ("cat", "dog"))
    assert odd in [files.path(number) for number in range(len(files))]


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
def test_a_relative_root_is_taken_from_the_store(store, monkeypatch, root):
    assert find_root(root) == store / root
    monkeypatch.setenv("HOME", str(store.parent))
    monkeypatch.setenv(DATA_VARIABLE, "~/store")
    assert find_root(root) == store / root


@pytest.mark.parametrize("root", ["runs/phantoms/data", "/ett", "work"])
def test_any_other_root_stays(store, root):
    """It exists nowhere, is absolute or lies in the working folder."""
    (store / "work").mkdir()
    Path("work").mkdir()
    assert find_root(root) == Path(root)


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_store_a_root_stays(store, monkeypatch, value):
    monkeypatch.delenv(DATA_VARIABLE) if value is None else monkeypatch.setenv(DATA_VARIABLE, value)
    assert find_root("ett") == Path("ett")
