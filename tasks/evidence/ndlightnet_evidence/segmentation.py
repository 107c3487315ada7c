"""Markdown tables of segmentation runs: their scores, the differences from the first row, and their costs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ndlightnet.training.segmentation.metrics import interval, of_known
from ndlightnet_evidence.tables import Run, markdown, millions, number, of_row, spread, without

Dice = dict[int, dict[str, list[float]]]  # of each class, by seed and case
COSTS = {
    "GFLOPs": "gflops",
    "s per case": "case_seconds",
    "GB in prediction": "case_memory_gb",
    "ms per step": "step_ms",
    "GB in training": "peak_memory_gb",
}


def segmentation_tables(runs: Sequence[Run], rows: Sequence[str]) -> str:
    """Return two tables: scores and costs. rows: their order; the others are compared with the first."""
    by_row = {row: of_row(runs, row) for row in rows}
    done = [run for row in rows for run in by_row[row]]
    first = by_row[rows[0]]
    several = "folds" if "fold" in done[0] else "seeds"
    scores = ["Dice", "95 % interval", f"by {several}", f"more than {rows[0]}", "95 % interval", "HD95 (mm)", "NSD"]
    tables = ((scores, lambda runs: _scores(runs, first)), (["parameters", *COSTS], _costs))
    texts = []
    for head, cells in tables:
        body = [[row, *(cells(by_row[row]) if by_row[row] else [without(runs, row)])] for row in rows]
        texts.append(markdown(["", *head], body))
    return "\n".join([*texts, *_notes(done, several, rows[0])])


def _notes(runs: Sequence[Run], several: str, first: str) -> list[str]:
    over = "cases and seeds"
    if len({run["seed"] for run in runs}) == 1:
        over = "cases, of one seed: they say nothing of others"
    return [
        f"Means ± standard deviations over {several}. Intervals: all {several} together, bootstrap "
        f"over {over}. More than {first}: mean difference on the "
        "same cases; where a class is not in a case and only one of the two says so, that counts "
        "as Dice 1 and 0. HD95 is that of the classes found.\n",
        "GFLOPs: two for each multiplication and addition of matrix products, convolutions and "
        "attention in a forward of one training patch. s per case: median, reading and writing "
        "left out. ms per step: with waiting for data.\n",
    ]


def _scores(runs: Sequence[Run], first: Sequence[Run]) -> list[str]:
    dice, more = by_case(runs), ["", ""]
    if runs is not first:
        gain = differences(dice, by_case(first))
        more = [number(mean_dice(gain), "+.3f"), _range(gain, "+.3f")] if gain.size else ["none"] * 2
    distance, count = spread(run["mean_hd95_mm"] for run in runs), sum(map(_values, runs))
    if missing := sum(run["hd95_missing"] for run in runs):
        distance += f" ({missing} of {count} missing)"
    return [
        spread(run["mean_dice"] for run in runs),
        _range(values(dice)),
        ", ".join(number(run["mean_dice"]) for run in runs),
        *more,
        distance,
        spread(run["mean_nsd"] for run in runs),
    ]


def _costs(runs: Sequence[Run]) -> list[str]:
    """Return the medians of the costs, which are the same for all seeds except for noise."""
    costs = [[run[key] for run in runs if run.get(key) is not None] for key in COSTS.values()]
    return [millions(runs[0]), *(f"{statistics.median(cost):.4g}" if cost else "none" for cost in costs)]


def by_case(runs: Sequence[Run]) -> Dice:
    """Return the Dice by seed and case, NaN where it is null; the folds of a seed are joined."""
    dice: Dice = {}
    for run in runs:
        cases = dice.setdefault(run["seed"], {})
        for case in run["cases"]:
            cases[case["name"]] = [np.nan if v is None else v for v in case["dice"]]
    return dice


def values(*dice: Dice) -> NDArray[np.float64]:
    """Return the first as (seeds, cases, classes), on the seeds and cases that all of them have."""
    seeds = sorted(set.intersection(*(set(one) for one in dice)))
    cases = set.intersection(*(set(one[seed]) for one in dice for seed in seeds or one))
    return np.array([[dice[0][seed][case] for case in sorted(cases)] for seed in seeds])


def differences(dice: Dice, first: Dice) -> NDArray[np.float64]:
    """Return `dice` minus `first` on the same seeds and cases, (seeds, cases, classes); without any
    its size is 0. NaN marks a class that is in neither the truth nor the prediction: where only one
    of the two is NaN, that one is right and counts as 1, and the other counts as it is, 0."""
    if not dice or not first:
        return np.empty((0, 0, 0))
    one, two = values(dice, first), values(first, dice)
    right = np.isnan(one) ^ np.isnan(two)
    return np.where(right, np.nan_to_num(one, nan=1.0) - np.nan_to_num(two, nan=1.0), one - two)


def mean_dice(table: NDArray[np.float64]) -> float:
    """Return the mean over classes of their means in (seeds, cases, classes), without NaN."""
    columns = table.reshape(-1, table.shape[-1]).T
    return of_known(np.mean, [of_known(np.mean, column) for column in columns])


def _values(run: Run) -> int:
    return sum(len(case["dice"]) for case in run["cases"])


def _range(table: NDArray[np.float64], form: str = ".3f") -> str:
    low, high = interval(table)
    return "none" if low != low else f"{low:{form}} to {high:{form}}"
