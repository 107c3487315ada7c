"""Tables in Markdown: what was measured for the rows of a comparison, when, and on which device."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# what identifies a run ("row", "seed" and the like), then what was measured, or "error"
Run = dict[str, Any]
IDENTITY = ("row", "task", "seed", "fold")
# what may be in a run's metrics.json, in the order of the columns
SCORES = (
    "mean_dice",
    "mean_hd95_mm",
    "top1",
    "balanced_accuracy",
    "auc",
    "ece",
    "bits_per_byte",
    "mse",
    "mae",
    "coverage",
)
WRITTEN = ("rouge1", "rouge2", "rougeL", "loss")
COMPLETED = ("chamfer_l1", "chamfer_l2", "f_score")
SPOKEN = ("mcd", "msd", "spectrum_error", "order")
GENERATED = ("frechet", "frechet_train", "precision", "recall")
COSTS = ("step_ms", "latency_ms", "train_seconds", "padded_share", "sampled_per_second", "peak_memory_gb")
MEASURES = SCORES + WRITTEN + COMPLETED + SPOKEN + GENERATED + COSTS


def markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Return a table whose columns are as wide as their widest cell; short lines are padded."""
    lines = [[*line, *[""] * (len(head) - len(line))] for line in (head, *body)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "".join(f"| {' | '.join(map(str.ljust, line, widths))} |\n" for line in lines)


def number(value: float | None, form: str = ".3f") -> str:
    """Format a number; None and NaN become the word none."""
    return "none" if value is None or value != value else f"{value:{form}}"


def spread(values: Iterable[float | None], form: str = ".3f") -> str:
    """Format the mean ± standard deviation of the values that are neither None nor NaN."""
    numbers = [value for value in values if value is not None and value == value]
    deviation = f" ± {statistics.stdev(numbers):{form}}" if len(numbers) > 1 else ""
    return number(statistics.mean(numbers), form) + deviation if numbers else "none"


def cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def of_records(records: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a line for each record and a column for each field."""
    fields = list(dict.fromkeys(field for record in records for field in record))
    return markdown(fields, [[cell(record[f]) if f in record else "" for f in fields] for record in records])


def millions(run: Run) -> str:
    return f"{run['parameters'] / 1e6:.2f} M" if "parameters" in run else "none"


def complete(run: Run) -> bool:
    return "error" not in run


def identity(run: Run) -> Run:
    """Return the fields that identify a run."""
    return {key: run[key] for key in IDENTITY if key in run}


def name(run: Run) -> str:
    """Return the name of a run, such as: GLA, seed 0."""
    return ", ".join([run["row"], *(f"{key} {value}" for key, value in identity(run).items() if key != "row")])


def of_row(runs: Sequence[Run], row: str) -> list[Run]:
    """Return the complete runs of a row, sorted by seed and fold."""
    mine = [run for run in runs if run["row"] == row and complete(run)]
    return sorted(mine, key=lambda run: (run["seed"], run.get("fold", 0)))


def without(runs: Sequence[Run], row: str) -> str:
    """Return why a row has no complete run."""
    return "failed" if any(run["row"] == row for run in runs) else "not run"


def summary(runs: Sequence[Run], rows: Sequence[str], measures: Sequence[str] = MEASURES) -> str:
    """Return a table with a line for each row: each of the measures that some run has, mean ±
    standard deviation over seeds; the first measure for each seed."""
    done = [run for row in rows for run in of_row(runs, row)]
    # the recall of classifiers is a dictionary, with a number for each class
    columns = [m for m in measures if any(m in run and not isinstance(run[m], dict) for run in done)] or ["result"]
    body = []
    for row in rows:
        if not (of_this := of_row(runs, row)):
            body.append([row, without(runs, row)])
            continue
        values = [spread(run.get(measure) for run in of_this) for measure in columns]
        body.append([row, millions(of_this[0]), *values, ", ".join(number(run.get(columns[0])) for run in of_this)])
    return markdown(["", "parameters", *columns, f"{columns[0]} per seed"], body)


def curves(runs: Sequence[Run], rows: Sequence[str], facts: Sequence[str] = ()) -> str:
    """Return a table for each panel of the runs' "curves": accuracy over x, mean ± standard
    deviation over the runs of a row. facts: fields of a run for the columns in front."""
    texts = []
    for panel, first in panels(runs).items():
        body = []
        for row in rows:
            if of_this := [run for run in of_row(runs, row) if panel in run["curves"]]:
                seeds = [run["curves"][panel]["accuracy"] for run in of_this]
                values = [spread(column) for column in zip(*seeds, strict=True)]
                body.append([row, *(cell(of_this[0][fact]) for fact in facts), *values])
        title = f"### {panel}: accuracy by {first['x_label']}\n\n"
        texts.append(title + markdown(["", *facts, *map(str, first["x"])], body))
    return "\n".join(texts)


def panels(runs: Sequence[Run]) -> dict[str, Mapping[str, Any]]:
    """Return one curve {"x_label", "x", "accuracy", ...} of each panel that some run has."""
    return {panel: curve for run in runs if complete(run) for panel, curve in run["curves"].items()}


def notes(runs: Sequence[Run]) -> str:
    """Return the dates, commits and devices of the runs, and which runs have failed."""
    done, text = [run for run in runs if complete(run)], ""
    dates, commits, devices = (
        list(dict.fromkeys(run[key] for run in done if run.get(key))) for key in ("date", "commit", "device")
    )
    if dates:
        days = " to ".join(dict.fromkeys((min(dates), max(dates))))
        named = [f"commit {' and '.join(commits)}"] if commits else []
        text = f"\n{', '.join([days, *named, *devices])}.\n"
    failed = [f"{name(run)} ({run['error']})" for run in runs if not complete(run)]
    return text + (f"\nFailed: {'; '.join(failed)}.\n" if failed else "")
