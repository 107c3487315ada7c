"""Tables in Markdown: what was measured for the rows of a comparison, when, and on which device."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Run = Mapping[str, Any]
IDENTITY = ("row", "task", "side", "what", "seed", "fold", "lr")
# what may be in a run's metrics.json, in the order of the columns
MEASURES = (
    "mean_dice",
    "mean_hd95_mm",
    "top1",
    "balanced_accuracy",
    "auc",
    "ece",
    "bits_per_byte",
    "mse",
    "mae",
    "frechet",
    "frechet_train",
    "precision",
    "recall",
    "step_ms",
    "latency_ms",
    "train_seconds",
    "padded_share",
    "sampled_per_second",
    "peak_memory_gb",
)


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
    known = [value for value in values if value is not None and value == value]
    more = f" ± {statistics.stdev(known):{form}}" if len(known) > 1 else ""
    return number(statistics.mean(known), form) + more if known else "none"


def _plain(value: Any) -> str:
    return "-" if value is None else str(value)


def millions(run: Run) -> str:
    return f"{run['parameters'] / 1e6:.2f} M" if "parameters" in run else "none"


def complete(run: Run) -> bool:
    return not run.keys() & {"error", "missing"}


def identity(run: Run) -> dict[str, Any]:
    """Return the fields that identify a run."""
    return {key: run[key] for key in IDENTITY if key in run}


def name(run: Run) -> str:
    """Return the name of a run, such as: GLA, seed 0."""
    more = [f"{key} {value}" for key, value in identity(run).items() if key != "row"]
    return ", ".join([run["row"], *more])


def of_row(runs: Sequence[Run], row: str) -> list[Run]:
    """Return the complete runs of a row, sorted by seed and fold."""
    mine = [run for run in runs if run["row"] == row and complete(run)]
    return sorted(mine, key=lambda run: (run["seed"], run.get("fold", 0)))


def without(runs: Sequence[Run], row: str) -> str:
    """Return why a row has no complete run."""
    return "failed" if any("error" in r for r in runs if r["row"] == row) else "not run"


def summary(runs: Sequence[Run], rows: Sequence[str], wanted: Sequence[str] = MEASURES) -> str:
    """Return a table with a line for each row: every measure that was wanted and made, mean ±
    standard deviation over seeds; the first measure for each seed."""
    good = [run for row in rows for run in of_row(runs, row)]
    # the recall of classifiers is a dictionary, with a number for each class
    made = [m for m in wanted if any(m in run and not isinstance(run[m], dict) for run in good)]
    measures = made or ["result"]
    state = any(run.get("state_size") is not None for run in good)
    body = []
    for row in rows:
        mine = of_row(runs, row)
        if not mine:
            body.append([row, without(runs, row)])
            continue
        cells = [row, millions(mine[0])]
        cells += [_plain(mine[0].get("state_size"))] if state else []
        cells += [spread(run.get(measure) for run in mine) for measure in measures]
        body.append([*cells, ", ".join(number(run.get(measures[0])) for run in mine)])
    head = ["", "parameters", *(["state"] if state else []), *measures, f"{measures[0]} per seed"]
    return markdown(head, body)


def curves(runs: Sequence[Run], rows: Sequence[str], facts: Sequence[str] = ()) -> str:
    """Return a table for each panel of the runs' "curves": accuracy over x, mean ± standard
    deviation over the runs of a row. facts: fields of a run for the columns in front."""
    parts = []
    for panel, first in panels(runs).items():
        body = []
        for row in rows:
            mine = [run for run in of_row(runs, row) if panel in run["curves"]]
            if mine:
                seeds = [run["curves"][panel]["accuracy"] for run in mine]
                values = [spread(at) for at in zip(*seeds, strict=True)]
                body.append([row, *(_plain(mine[0][fact]) for fact in facts), *values])
        title = f"### {panel}: accuracy by {first['x_label']}\n\n"
        parts.append(title + markdown(["", *facts, *map(str, first["x"])], body))
    return "\n".join(parts)


def panels(runs: Sequence[Run]) -> dict[str, Mapping[str, Any]]:
    """Return one curve {"x_label", "x", "accuracy", ...} of each panel that some run has."""
    return {panel: one for run in runs if complete(run) for panel, one in run["curves"].items()}


def notes(runs: Sequence[Run]) -> str:
    """Return the dates, commits and devices of the runs, and which runs have no result."""
    good, text = [run for run in runs if complete(run)], ""
    found = {key: list(dict.fromkeys(run[key] for run in good if run.get(key))) for key in ("date", "commit", "device")}
    if dates := sorted(found["date"]):
        days = " to ".join(dict.fromkeys((dates[0], dates[-1])))
        commits = [f"commit {' and '.join(found['commit'])}"] if found["commit"] else []
        text = f"\n{', '.join([days, *commits, *found['device']])}.\n"
    failed = [f"{name(run)} ({run['error']})" for run in runs if "error" in run]
    missing = [name(run) for run in runs if "missing" in run]
    for said, these in (("Failed", failed), ("Not run, no time was left", missing)):
        text += f"\n{said}: {'; '.join(these)}.\n" if these else ""
    return text
