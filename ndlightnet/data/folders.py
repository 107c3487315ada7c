"""Folders of data: where a relative root lies, the files below a folder, and notes on entries that are not read."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from ndlightnet.data.errors import DataError, printable, readable

DATA_VARIABLE = "NDLIGHTNET_DATA"
NAMED = 3  # names of left-out entries in a note
Notes = list[str] | None  # a list that gets lines for the user, if one is given


def find_root(root: str | Path) -> Path:
    """Return the file or folder that a config's `root` means.

    A relative `root` that does not exist from the working folder is taken from the folder that the environment variable
    NDLIGHTNET_DATA names, if it exists there. In all other cases `root` is returned as it is: absolute, existing, drawn
    later (phantoms and digits), or missing everywhere, so that an error names what the config says.
    """
    root, base = Path(root), os.environ.get(DATA_VARIABLE)
    if not base or root.is_absolute() or root.exists():
        return root
    stored = Path(base).expanduser() / root
    return stored if stored.exists() else root


def files_below(
    folder: Path, unread: str = "", on_error: Callable[[OSError], None] | None = None
) -> Iterator[os.DirEntry[str]]:
    """Yield the files at any depth below a folder, also those of linked folders and links that lead nowhere; hidden
    files and folders do not count, nor do folders called `unread`. on_error: is called with the error of a folder that
    cannot be opened; without it, the error is raised."""
    entered: set[str] = set()  # links may lead back

    def walk(place: str) -> Iterator[os.DirEntry[str]]:
        if (real := os.path.realpath(place)) in entered:
            return
        entered.add(real)
        try:
            with os.scandir(place) as content:
                entries = sorted(content, key=lambda entry: entry.name)
        except OSError as error:
            if on_error is None:
                raise
            on_error(error)
            return
        for entry in entries:
            if entry.name.startswith("."):
                continue
            # a link may lead to itself, which DirEntry.is_dir raises for
            is_folder = os.path.isdir(entry) if entry.is_symlink() else entry.is_dir()
            if not is_folder:
                yield entry
            elif entry.name.lower() != unread:
                yield from walk(entry.path)

    return walk(os.fspath(folder))


def list_files(path: Path, endings: tuple[str, ...] = ("",), notes: Notes = None) -> list[str]:
    """Return the file `path`, or the files of a folder, at any depth, whose names end in `endings` (in lower case); as
    text, for a million Path objects take seconds. A line on the other files is added to `notes`. DataError if there is
    none."""
    chosen: list[str] = []
    others: list[Path] = []
    with readable(path):
        if path.is_file():
            return [os.fspath(path)]
        if not path.is_dir():
            raise DataError(f"{path}: no such file or folder")
        for entry in files_below(path):
            if entry.name.lower().endswith(endings) and entry.is_file():  # a link may lead nowhere
                chosen.append(entry.path)
            else:
                others.append(Path(entry.path))
    expected = ", ".join(endings) or "a file"
    if not chosen:
        raise DataError(f"{path}: has no file to read, expected {expected}")
    report_skipped(others, path, expected, notes)
    return chosen


def class_names(split: Path) -> tuple[str, ...]:
    """Return the names of the class folders in a split, such as train/, sorted; DataError for fewer than two."""
    names = tuple(entry.name for entry in _visible(split) if entry.is_dir())
    if len(names) < 2:
        raise DataError(f"{split}: has the classes {list(names)}, expected two or more folders")
    return names


def class_folders(split: Path, classes: Sequence[str], notes: Notes = None) -> list[tuple[Path, int]]:
    """Return the class folders in a split, each with the number of its class. A line on other entries is added to
    `notes`. DataError for a class that `classes` lack, and for no class folder."""
    entries = _visible(split)
    folders = [entry for entry in entries if entry.is_dir()]
    numbers = {name: number for number, name in enumerate(classes)}
    for folder in folders:
        if folder.name not in numbers:
            raise DataError(f"{folder}: a class that training lacks, it has {list(classes)}")
    if not folders:
        raise DataError(f"{split}: has no folder of a class, expected one for each")
    report_skipped({*entries} - {*folders}, split, "a folder for each class", notes)
    return [(folder, numbers[folder.name]) for folder in folders]


def _visible(split: Path) -> list[Path]:
    """Return the entries of a split that are not hidden, sorted."""
    with readable(split):
        if not split.parent.is_dir():
            raise DataError(f"{split.parent}: no such folder")
        if not split.is_dir():
            raise DataError(f"{split}: no such folder, expected one with a folder for each class")
        return sorted(entry for entry in split.iterdir() if not entry.name.startswith("."))


def report_skipped(entries: Iterable[Path], folder: Path, expected: str, notes: Notes) -> None:
    """Add a line to `notes` if there are `entries` below the folder, which are not read: how many, of many also of
    which kinds, the first names, and what is expected. Hidden entries do not count, they are left-overs: "._ct.nii.gz"
    of macOS archives, unfinished writes."""
    visible = [entry for entry in entries if not entry.name.startswith(".")]
    names = sorted(printable(entry.relative_to(folder)) for entry in visible)
    if notes is not None and names:
        some = ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
        count = f"{len(names)} {'entry is' if len(names) == 1 else 'entries are'} left out"
        kinds = Counter("folder" if one.is_dir() else kind_of(one) for one in visible)
        of = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
        count += f" ({of})" if len(names) > 2 * NAMED else ""
        notes.append(f"{folder}: {count}: {some} (expected {expected})")


def kind_of(file: Path) -> str:
    """Return the ending of a file in lower case, such as .txt or .nii.gz."""
    last = 2 if file.suffix.lower() in (".gz", ".xz") else 1
    return printable("".join(file.suffixes[-last:]).lower()) or "without ending"
