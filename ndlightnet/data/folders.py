"""Folders of data: where a relative root lies, the files below a folder, and notes on entries that are not read."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ndlightnet.data.errors import printable

DATA_VARIABLE = "NDLIGHTNET_DATA"
RESULTS = "derivatives"  # the folder in which BIDS has masks and other results
NAMED = 3  # names of left-out entries in a note


def find_root(root: str | Path) -> Path:
    """Return the file or folder that a config's `root` means.

    A relative `root` that does not exist from the working folder is taken from the folder that the
    environment variable NDLIGHTNET_DATA names, if it exists there. In all other cases `root` is
    returned as it is: absolute, found, made later (phantoms and digits), or missing everywhere, so
    that an error names what the config says.
    """
    root, base = Path(root), os.environ.get(DATA_VARIABLE)
    if not base or root.is_absolute() or root.exists():
        return root
    there = Path(base).expanduser() / root
    return there if there.exists() else root


def files_below(root: Path, on_error: Callable[[OSError], None] | None = None) -> Iterator[Path]:
    """Yield the files at any depth below a folder, also those of linked folders and links that lead
    nowhere; not those of hidden folders and of RESULTS. on_error: is called with the error of a
    folder that cannot be opened."""
    entered: set[str] = set()  # links may lead back
    for place, inside, names in os.walk(root, followlinks=True, onerror=on_error):
        if (real := os.path.realpath(place)) in entered:
            inside.clear()
            continue
        entered.add(real)
        inside[:] = sorted(n for n in inside if not n.startswith(".") and n.lower() != RESULTS)
        yield from (Path(place, name) for name in sorted(names))


def report_skipped(entries: Iterable[Path], folder: Path, wanted: str, notes: list[str] | None) -> None:
    """Add a line to `notes` if there are `entries` below the folder, which are not read: how many,
    of many also of which kinds, the first names, and what is expected. Hidden entries do not count,
    they are left-overs: "._ct.nii.gz" of macOS archives, unfinished writes."""
    visible = [entry for entry in entries if not entry.name.startswith(".")]
    names = sorted(printable(entry.relative_to(folder)) for entry in visible)
    if notes is not None and names:
        some = ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
        count = f"{len(names)} {'entry is' if len(names) == 1 else 'entries are'} left out"
        kinds = Counter("folder" if one.is_dir() else kind_of(one) for one in visible)
        of = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
        count += f" ({of})" if len(names) > 2 * NAMED else ""
        notes.append(f"{folder}: {count}: {some} (expected {wanted})")


def kind_of(file: Path) -> str:
    """Return the ending of a file in lower case, such as .txt or .nii.gz."""
    last = 2 if file.suffix.lower() in (".gz", ".xz") else 1
    return printable("".join(file.suffixes[-last:]).lower()) or "without ending"
