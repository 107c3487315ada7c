"""Results of a run: metrics.json, CSV files, and notes on the terminal."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_only

from ndlightnet.data.errors import atomic_write, cell, printable, writable


def log(notes: Sequence[str]) -> None:
    """Print `notes`, what was decided for the user, each line once, in every process."""
    for note in dict.fromkeys(notes):
        print(f"note: {printable(note)}", file=sys.stderr)


@rank_zero_only
def log_rank_zero(notes: Sequence[str]) -> None:
    """Print `notes` in the first process."""
    log(notes)


def check_writable(folder: Path) -> None:
    """Raise DataError if results could not be written to `folder` later; it is not made."""
    with writable(folder):
        place = next(place for place in (folder, *folder.parents) if place.exists())
        probe = place / f".{os.getpid()}.writable"  # by process: several may check at once
        probe.write_text("written")  # a full disk accepts an empty file
        probe.unlink()


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON, floats with 6 decimals; numbers that are not finite become null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(k): plain(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        if isinstance(value, float):
            return round(value, 6) if np.isfinite(value) else None
        return value

    with atomic_write(path) as draft:
        draft.write_text(json.dumps(plain(content), indent=2) + "\n")


def write_metrics(folder: Path, test: dict[str, Any] | None = None, fit: dict[str, Any] | None = None) -> None:
    """Write a run's metrics.json: what `test` measures, and under "fit" what a training does. None:
    as the file there has it."""
    path, saved = folder / "metrics.json", {}
    if path.is_file():
        with suppress(ValueError):  # not JSON: replaced
            saved = json.loads(path.read_bytes())
        if not isinstance(saved, dict):
            saved = {}
    trained = saved.pop("fit", None)
    trained = trained if fit is None else fit
    write_json(path, {**(saved if test is None else test), **({"fit": trained} if trained else {})})


def mean_scores(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each measure over rows that have all of them."""
    rows = [*rows]
    return {name: mean(row[name] for row in rows) for name in rows[0]}


def write_csv(path: Path, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a CSV file whose text no spreadsheet takes for a formula."""
    with atomic_write(path) as draft, draft.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([cell(value) for value in row] for row in (head, *rows))
