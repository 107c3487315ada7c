"""Notes on the entries of a folder that are not read."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from ndlightnet.data.errors import printable

NAMED = 3  # names of left-out entries in a note


def leave_out(entries: Iterable[Path], folder: Path, wanted: str, notes: list[str] | None) -> None:
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
