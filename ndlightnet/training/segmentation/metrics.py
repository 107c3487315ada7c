"""Measures of a segmentation: per case and class, their table, and their means.

`rows` is everywhere {name of the case: one {measure: value} per foreground class}, and `names` are the names of the
classes, names[0] the background's. NaN stands for an undefined or missing value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from monai.metrics.utils import get_surface_distance
from numpy.typing import ArrayLike, NDArray
from scipy.ndimage import binary_erosion, find_objects
from torch import Tensor

from ndlightnet.training.report.results import write_csv

Rows = Mapping[str, Sequence[Mapping[str, float]]]
Box = tuple[slice, ...]
TOLERANCE = 1.0  # mm, of the surface Dice
# A float32 affine turns 1 mm into 1.0000001 mm: a tolerance of 1 mm has to include that.
ROUNDING = 1 + 1e-5


class Measure(NamedTuple):
    """A measure of a class. heading, digits: of its column in pages. has_mean: metrics.json has its means.
    of_distances: of a measure of surfaces, its value from the distances of the voxels of either surface from the other
    (mm), where a frame has both; `alone` is its value where only one has the class."""

    heading: str
    digits: int
    has_mean: bool = False
    of_distances: Callable[[Sequence[Any]], Any] | None = None
    alone: float = float("nan")


MEASURES = {
    "dice": Measure("Dice", 3, True),
    "hd95_mm": Measure("HD95 (mm)", 1, True, lambda both: max(np.quantile(d, 0.95) for d in both)),
    "nsd": Measure("surface Dice", 3, True, lambda both: (np.hstack(both) <= TOLERANCE * ROUNDING).mean(), alone=0.0),
    "volume_ml": Measure("volume (ml)", 2),
    "truth_ml": Measure("truth (ml)", 2),
}
OF_SURFACES = {name: (one.of_distances, one.alone) for name, one in MEASURES.items() if one.of_distances is not None}


def dice_of(labels: Tensor, truth: Tensor, classes: int) -> Tensor:
    """Return the Dice of every foreground class, (classes - 1,) float64, of labels of one shape.

    NaN where neither has the class, so that means leave it out; 0 where only one has it: a false positive in a case
    without the class counts as wrong. (torchmetrics' dice_score gives the same from one-hot volumes, 126 GB for 118
    classes on 512^3 voxels; MONAI's is NaN for such a one.)
    """
    predicted, true = (_counts(x, classes) for x in (labels, truth))
    both = _counts(labels[labels == truth], classes)
    return (2 * both / (predicted + true).double())[1:]


def measure_case(
    labels: Tensor, truth: Tensor | None, classes: int, spacing: Sequence[float]
) -> list[dict[str, float]]:
    """Measure a case: return a dict per foreground class, 1 to classes - 1.

    dice: see `dice_of`. hd95_mm: the larger of the two directions' 95th percentiles of the distances between the
    surfaces (mm); NaN unless both have the class. nsd: fraction of both surfaces' voxels not further than TOLERANCE mm
    from the other surface; 0 and NaN as for Dice. volume_ml, truth_ml: volumes (ml). Without truth all but volume_ml
    are NaN.

    labels, truth: integers (x, y, z) on one grid, of voxels of `spacing` mm. A volume of a single slice is measured in
    its plane. Of a series over time, (frames, x, y, z), Dice counts the voxels of all frames together; distances and
    surface Dice are means over the frames that have them, and volumes means over all frames. Raises ValueError for
    shapes or numbers that do not fit.
    """
    if classes < 2:
        raise ValueError(f"classes: expected at least 2, the background's and another, got {classes}")
    if truth is not None and truth.shape != labels.shape:
        raise ValueError(f"truth: expected the labels' shape {tuple(labels.shape)}, got {tuple(truth.shape)}")
    over_time = labels.ndim == 4 and len(spacing) == 3
    if labels.ndim != len(spacing) and not over_time:
        raise ValueError(f"spacing: expected {labels.ndim} numbers (mm), one for each axis, got {spacing}")
    frames = len(labels) if over_time else 1
    per_voxel = float(np.prod(spacing)) / 1000 / frames
    unknown = [float("nan")] * (classes - 1)
    columns = {name: unknown for name in MEASURES}
    columns["volume_ml"] = (_counts(labels, classes)[1:] * per_voxel).tolist()
    if truth is not None:
        columns["truth_ml"] = (_counts(truth, classes)[1:] * per_voxel).tolist()
        columns["dice"] = dice_of(labels, truth, classes).tolist()
        space = (frames, *labels.shape[-len(spacing) :])
        pairs = zip(labels.reshape(space), truth.reshape(space), strict=True)
        surfaces = np.array([_surfaces(*pair, classes, spacing) for pair in pairs])
        for column, name in enumerate(OF_SURFACES):
            columns[name] = [of_known(np.mean, values) for values in surfaces[..., column].T]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _counts(labels: Tensor, classes: int) -> Tensor:
    """Count the voxels of every class, (classes,) int64."""
    if labels.numel():
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            raise ValueError(f"labels: expected numbers in 0..{classes - 1}, got {low}..{high}")
    return torch.bincount(labels.reshape(-1), minlength=classes)


def _surfaces(labels: Tensor, truth: Tensor, classes: int, spacing: Sequence[float]) -> list[list[float]]:
    """Return the measures OF_SURFACES of every foreground class."""
    keep = [axis for axis, length in enumerate(labels.shape) if length > 1]
    if len(keep) == 2:  # in a single slice every voxel would be surface
        labels, truth, spacing = labels.squeeze(), truth.squeeze(), [spacing[a] for a in keep]
    predicted, true = (x.cpu().numpy() for x in (labels, truth))
    pairs = zip(boxes(predicted, classes), boxes(true, classes), strict=True)
    measured = []
    for number, (a, b) in enumerate(pairs, 1):
        if a is None or b is None:
            neither = a is None and b is None
            measured.append([float("nan") if neither else alone for _, alone in OF_SURFACES.values()])
            continue
        box = tuple(slice(min(s.start, t.start), max(s.stop, t.stop)) for s, t in zip(a, b, strict=True))
        # outside of the box, and of the volume, is background: a voxel at the border is surface
        surface, true_surface = (x[box] == number for x in (predicted, true))
        surface, true_surface = (mask ^ binary_erosion(mask) for mask in (surface, true_surface))
        both = ((surface, true_surface), (true_surface, surface))
        distances = [get_surface_distance(*edges, spacing=list(spacing)) for edges in both]
        measured.append([measure(distances) for measure, _ in OF_SURFACES.values()])
    return measured


def boxes(labels: NDArray[Any], classes: int) -> list[Box | None]:
    """Return the smallest box around every foreground class; None for an absent one."""
    bounds: list[Box | None] = find_objects(labels, max_label=classes - 1)
    return bounds


def write_cases(path: Path, rows: Rows, names: Sequence[str]) -> None:
    """Write a CSV, a line per case and class: case, class and the measures, empty where NaN."""
    lines = [
        (case, name, *("" if np.isnan(measured[key]) else f"{measured[key]:.6g}" for key in MEASURES))
        for case, row in rows.items()
        for name, measured in zip(names[1:], row, strict=True)
    ]
    write_csv(path, ("case", "class", *MEASURES), lines)


def metrics_of(rows: Rows, names: Sequence[str]) -> dict[str, Any]:
    """Summarise a test for metrics.json. Means leave out NaN; mean_dice and the like are means over the classes of
    the means over the cases; std_over_cases is the standard deviation of the cases' mean Dice."""
    table = {key: np.array([[measured[key] for measured in row] for row in rows.values()]) for key in MEASURES}
    means = {key: [of_known(np.mean, column) for column in table[key].T] for key in MEASURES if MEASURES[key].has_mean}
    overall = {f"mean_{key}": of_known(np.mean, values) for key, values in means.items()}
    low, high = interval(table["dice"][None])
    std = of_known(np.std, [of_known(np.mean, row) for row in table["dice"]])
    return {
        "mean_dice": overall["mean_dice"],
        "dice_interval": [low, high],
        "std_over_cases": std,
        **overall,
        **{key: dict(zip(names[1:], values, strict=True)) for key, values in means.items()},
        "hd95_missing": int(np.isnan(table["hd95_mm"]).sum()),
        "cases": [{"name": case, **{key: table[key][i].tolist() for key in MEASURES}} for i, case in enumerate(rows)],
    }


def of_known(measure: Callable[[Any], Any], values: Iterable[float]) -> float:
    """Return np.mean, np.median or np.std of the values that are not NaN; NaN if all are."""
    finite = np.array([value for value in values if value == value])
    return float(measure(finite)) if finite.size else float("nan")


def interval(values: ArrayLike, level: float = 0.95, draws: int = 2000) -> tuple[float, float]:
    """Return the confidence interval of a mean over seeds and cases, NaN left out.

    values: (seeds, cases), every seed's network on the same cases; or (seeds, cases, classes), then the mean is that
    over the classes of their means. One seed: (1, cases), and the interval says nothing about other seeds.

    Percentile bootstrap of the crossed design: `draws` times, seeds are drawn with replacement and, independently,
    cases are, and the mean is taken over the drawn seeds on the drawn cases. The same values always give the same
    interval; a single value gives (NaN, NaN). With n seeds (or cases) the spread is estimated as sqrt((n - 1) / n) of
    its true value: too narrow below about ten. Where the effects of seeds and cases are not additive, it is somewhat
    too wide.
    """
    values = np.asarray(values, dtype=float)
    if values.ndim not in (2, 3) or values.size == 0 or not 0 < level < 1:
        raise ValueError(
            "interval: expected values (seeds, cases) or (seeds, cases, classes) and a level "
            f"between 0 and 1, got {values.shape} and {level}"
        )
    generator = np.random.default_rng(0)
    seeds, cases = (_times_drawn(n, draws, generator) for n in values.shape[:2])
    means = np.full((draws, *values.shape[2:]), np.nan).reshape(draws, -1)
    for k, of_class in enumerate(np.moveaxis(np.atleast_3d(values), 2, 0)):
        finite = ~np.isnan(of_class)
        # a value's weight: how often its seed was drawn, times how often its case was
        total, weight = ((seeds @ factor * cases).sum(1) for factor in (np.where(finite, of_class, 0), 1.0 * finite))
        np.divide(total, weight, out=means[:, k], where=weight > 0)
    finite = ~np.isnan(means)
    used = finite.any(1)
    if np.isfinite(values).sum() < 2:  # one value has no spread; none has no mean
        return float("nan"), float("nan")
    drawn = np.where(finite, means, 0).sum(1)[used] / finite.sum(1)[used]
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _times_drawn(n: int, draws: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """Return (draws, n): how often each of n numbers is among n drawn with replacement."""
    drawn = generator.integers(n, size=(draws, n)) + n * np.arange(draws)[:, None]
    return np.bincount(drawn.ravel(), minlength=draws * n).reshape(draws, n).astype(float)
