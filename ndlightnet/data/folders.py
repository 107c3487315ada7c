"""Notes on the entries of a folder that are not read."""

from collections.abc import Iterable
from pathlib import Path

from ndlightnet.data.errors import printable

NAMED = 3  # names of left-out entries in a note


def leave_out(entries: Iterable[Path], folder: Path, wanted: str, notes: list[str] | None) -> None:
    """Add a line to `notes` if there are `entries` below the folder, which are not read: how many,
    the first names, and what is expected. Hidden entries do not count, they are left-overs:
    "._ct.nii.gz" of macOS archives, unfinished writes."""
    visible = (entry for entry in entries if not entry.name.startswith("."))
    names = sorted(printable(entry.relative_to(folder)) for entry in visible)
    if notes is not None and names:
        some = ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
        count = f"{len(names)} {'entry is' if len(names) == 1 else 'entries are'} left out"
        notes.append(f"{folder}: {count}: {some} (expected {wanted})")
