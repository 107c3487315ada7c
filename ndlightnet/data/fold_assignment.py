"""Folds of training samples, one of which chooses a checkpoint or a recipe."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ndlightnet.data.errors import DataError, check_unique, readable


def assign_folds(labels: Sequence[int], count: int, groups: Sequence[str] | None = None) -> list[int]:
    """Return the fold of each sample, a number from 0 to count - 1; each class is spread evenly.

    With `groups`, such as patients, no group is in two folds. Without, neighbours of a class stay together, as far as
    the folds' sizes allow: clips that were cut from one recording often have neighbouring names, and would tell a
    network about each other.
    """
    classes = np.asarray(labels)
    folds = np.zeros(len(classes), np.int64)
    if groups is not None:
        from sklearn.model_selection import StratifiedGroupKFold

        if (distinct := len(set(groups))) < count:
            raise DataError(f"groups: {distinct} of them, expected {count} or more, one for each fold")
        splitter = StratifiedGroupKFold(count, shuffle=True, random_state=0)
        for fold, (_, held) in enumerate(splitter.split(classes, classes, groups)):
            folds[held] = fold
    else:
        for label in set(labels):
            members = np.flatnonzero(classes == label)
            folds[members] = np.arange(len(members)) * count // len(members)
    return [int(fold) for fold in folds]


def first_of_each(labels: Sequence[int], fraction: float, groups: Sequence[str] | None = None) -> list[bool]:
    """Return which samples are a `fraction` to hold back: the first ones of each class, or with `groups` the first of
    as many folds as hold such a fraction each."""
    if not fraction:
        return [False] * len(labels)
    if groups is not None:
        return [fold == 0 for fold in assign_folds(labels, max(2, round(1 / fraction)), groups)]
    classes, held = np.asarray(labels), np.zeros(len(labels), bool)
    for label in set(labels):
        members = np.flatnonzero(classes == label)
        held[members[: round(fraction * len(members))]] = True
    return [bool(one) for one in held]


def read_groups(root: Path, column: str, paths: Sequence[Path]) -> list[str]:
    """Return what `root/clips.csv`, a table with a column `path` from `root`, has in `column` for each path; a path
    without an entry is a group of its own."""
    file = root / "clips.csv"
    with readable(file), file.open(newline="", encoding="utf-8-sig") as text:
        rows = csv.DictReader(text)
        if missing := {"path", column} - {*(rows.fieldnames or ())}:
            raise DataError(f"{file}: has no column {', '.join(sorted(missing))}")
        check_unique(file, rows.fieldnames or ())
        group_of = {row["path"]: row[column] for row in rows}
    names = [path.relative_to(root).as_posix() for path in paths]
    return [group_of.get(name) or name for name in names]
