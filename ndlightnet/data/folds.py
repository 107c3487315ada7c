"""Parts of training samples that choose a checkpoint or a recipe."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ndlightnet.data.errors import DataError, check_unique, readable


def parts(labels: Sequence[int], count: int, groups: Sequence[str] | None = None) -> list[int]:
    """Return the part of each sample, a number from 0 to count - 1; each class is spread evenly.

    With `groups`, such as patients, no group is in two parts. Without, neighbours of a class stay
    together, as far as the parts' sizes allow: clips that were cut from one recording often have
    neighbouring names, and would tell a network about each other.
    """
    of = np.asarray(labels)
    if groups is not None:
        from sklearn.model_selection import StratifiedGroupKFold

        if (distinct := len(set(groups))) < count:
            raise DataError(f"groups: {distinct} of them, expected {count} or more, one for each part")
        folds, found = StratifiedGroupKFold(count, shuffle=True, random_state=0), 0 * of
        for part, (_, held) in enumerate(folds.split(of, of, groups)):
            found[held] = part
        return [int(part) for part in found]
    found = 0 * of
    for label in set(labels):
        own = np.flatnonzero(of == label)
        found[own] = np.arange(len(own)) * count // len(own)
    return [int(part) for part in found]


def first_of_each(labels: Sequence[int], fraction: float, groups: Sequence[str] | None = None) -> list[bool]:
    """Return which samples are a `fraction` to hold back: the first ones of each class, or with
    `groups` the first of as many parts as hold such a fraction each."""
    if not fraction:
        return [False] * len(labels)
    if groups is not None:
        return [part == 0 for part in parts(labels, max(2, round(1 / fraction)), groups)]
    of, out = np.asarray(labels), np.zeros(len(labels), bool)
    for label in set(labels):
        own = np.flatnonzero(of == label)
        out[own[: round(fraction * len(own))]] = True
    return [bool(held) for held in out]


def read_groups(root: Path, column: str, paths: Sequence[Path]) -> list[str]:
    """Return what `root/clips.csv`, a table with a column `path` from `root`, has in `column` for
    each path; a path without an entry is a group of its own."""
    file = root / "clips.csv"
    with readable(file), file.open(newline="", encoding="utf-8-sig") as text:
        rows = csv.DictReader(text)
        if missing := {"path", column} - {*(rows.fieldnames or ())}:
            raise DataError(f"{file}: has no column {', '.join(sorted(missing))}")
        check_unique(file, rows.fieldnames or ())
        named = {row["path"]: row[column] for row in rows}
    own = [path.relative_to(root).as_posix() for path in paths]
    return [named.get(name) or name for name in own]
