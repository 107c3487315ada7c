"""Measures of a case against MONAI on the whole volume; the table; intervals against theory."""

import csv
import math
import os

import numpy as np
import pytest
import torch
from monai.metrics.hausdorff_distance import compute_hausdorff_distance
from monai.metrics.meandice import compute_dice
from monai.metrics.surface_dice import compute_surface_dice
from monai.networks.utils import one_hot
from scipy.stats import norm, t

from ndlightnet.training.segmentation.metrics import (
    MEASURES,
    TOLERANCE,
    interval,
    measure_case,
    metrics_of,
    of_known,
    write_cases,
)

SPACING = (0.5, 2.0, 7.0)


def cube(number: int, *start: int, shape=(16, 16, 16)) -> torch.Tensor:
    """A 4 x 4 x 4 cube of label `number` on zeros."""
    labels = torch.zeros(shape, dtype=torch.long)
    labels[tuple(slice(s, s + 4) for s in start)] = number
    return labels


def blobs(shape: tuple[int, ...], classes: int, seed: int) -> torch.Tensor:
    """Connected labels that touch each other and the volume's borders."""
    random = torch.Generator().manual_seed(seed)
    small = torch.rand(1, classes, *(n // 3 + 1 for n in shape), generator=random)
    mode = "trilinear" if len(shape) == 3 else "bilinear"
    return torch.nn.functional.interpolate(small, shape, mode=mode)[0].argmax(0)


def monai(labels, truth, classes, spacing) -> dict[str, np.ndarray]:
    """The same from MONAI, whole and one-hot."""
    a, b = (one_hot(x[None, None], classes, dim=1) for x in (labels, truth))
    measured = {
        "dice": compute_dice(a, b, include_background=False),
        "hd95_mm": compute_hausdorff_distance(a, b, percentile=95, spacing=spacing),
        "nsd": compute_surface_dice(a, b, [TOLERANCE] * (classes - 1), spacing=spacing),
    }
    return {key: value[0].numpy() for key, value in measured.items()}


def agree(rows: list[dict[str, float]], expected: dict[str, np.ndarray]) -> None:
    """MONAI has float32: 1e-6 of the distances; NSD and Dice are ratios of whole numbers."""
    for key, values in expected.items():
        values[~np.isfinite(values)] = math.nan
        np.testing.assert_allclose(column(rows, key), values, 1e-6, err_msg=key)


def column(rows: list[dict[str, float]], key: str) -> list[float]:
    return [row[key] for row in rows]


def test_where_a_class_is_missing():
    """1 in both, 2 only in the truth, 3 only found, 4 in neither."""
    truth = cube(1, 0, 0, 0) + cube(2, 8, 8, 8)
    labels = cube(1, 0, 0, 2) + cube(3, 4, 4, 12)
    rows = measure_case(labels, truth, 5, SPACING)
    nan, ml = math.nan, 64 * 7.0 / 1000
    np.testing.assert_allclose(column(rows, "dice"), [0.5, 0, 0, nan])
    np.testing.assert_allclose(column(rows, "hd95_mm"), [14, nan, nan, nan])
    np.testing.assert_allclose(column(rows, "nsd")[1:], [0, 0, nan])
    assert column(rows, "volume_ml") == pytest.approx([ml, 0, ml, 0])
    assert column(rows, "truth_ml") == pytest.approx([ml, ml, 0, 0])


@pytest.mark.parametrize("shape, dtype", [((19, 17, 23), torch.int16), ((9, 31, 8), torch.int64)])
def test_measures_are_those_of_monai_without_cropping(shape, dtype):
    labels, truth = (blobs(shape, 5, seed).to(dtype) for seed in (1, 2))
    labels[labels == 4] = 0  # one class lies in the truth alone
    rows = measure_case(labels, truth, 5, (0.3, 0.7, 1.5))
    agree(rows, monai(labels, truth, 5, (0.3, 0.7, 1.5)))
    assert 0 < rows[0]["nsd"] < 1 and rows[0]["hd95_mm"] > 1 and math.isnan(rows[3]["hd95_mm"])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_single_slice_is_measured_in_its_plane(axis):
    """In three dimensions all of its voxels would be surface."""
    labels, truth = (blobs((21, 27), 3, seed) for seed in (3, 4))
    spacing = [0.7, 1.3]
    expected = monai(labels, truth, 3, list(spacing))
    spacing.insert(axis, 5.0)
    rows = measure_case(labels.unsqueeze(axis), truth.unsqueeze(axis), 3, spacing)
    agree(rows, expected)
    assert rows[0]["volume_ml"] == pytest.approx((labels == 1).sum().item() * 4.55 / 1000)


def test_the_tolerance_takes_a_spacing_that_float32_rounded_up():
    """One voxel off is one millimetre off, whatever the affine's last digits say."""
    moved, truth = cube(1, 4, 4, 5), cube(1, 4, 4, 4)
    for spacing in (1.0, 1.0000001):
        assert measure_case(moved, truth, 2, (spacing,) * 3)[0]["nsd"] == 1
    assert measure_case(moved, truth, 2, (1.01,) * 3)[0]["nsd"] < 1


def test_without_truth_only_volumes_are_known():
    (row,) = measure_case(cube(1, 0, 0, 0), None, 2, SPACING)
    assert row.pop("volume_ml") == pytest.approx(64 * 7.0 / 1000)
    assert set(row) == {*MEASURES} - {"volume_ml"} and all(map(math.isnan, row.values()))


@pytest.mark.parametrize(
    "label, shape, classes, spacing, words",
    [
        (0, (3, 4, 6), 2, (1, 1, 1), r"^truth: .*\(3, 4, 5\), got \(3, 4, 6\)$"),
        (0, (3, 4, 5), 2, (1, 1), "^spacing: expected 3 numbers"),
        (0, (3, 4, 5), 1, (1, 1, 1), "^classes: expected at least 2.*got 1$"),
        (-1, (3, 4, 5), 2, (1, 1, 1), r"^labels: expected numbers in 0\.\.1, got -1\.\.0"),
        (2, (3, 4, 5), 2, (1, 1, 1), r"^labels: expected numbers in 0\.\.1, got 0\.\.2"),
    ],
)
def test_what_does_not_fit_is_refused(label, shape, classes, spacing, words):
    labels = label * cube(1, 0, 0, 0, shape=(3, 4, 5))
    with pytest.raises(ValueError, match=words):
        measure_case(labels, torch.zeros(shape).long(), classes, spacing)
    if "numbers in 0" in words:  # of the truth, too
        with pytest.raises(ValueError, match="expected numbers in 0"):
            measure_case(0 * labels, labels, classes, spacing)


def row_of(*dice: float, **others: float) -> list[dict[str, float]]:
    return [dict.fromkeys(MEASURES, math.nan) | {"dice": d} | others for d in dice]


def test_the_table_has_a_line_for_each_case_and_class(tmp_path):
    """Names are no formulas."""
    rows = {"=1+1\n\x1b": row_of(0.123456789, math.nan, hd95_mm=1.5), "é": row_of(1.0, 0.0, volume_ml=12345.678)}
    write_cases(tmp_path / "new" / "cases.csv", rows, ["background", "liver, left", "@SUM(1)"])
    assert os.listdir(tmp_path / "new") == ["cases.csv"]
    with (tmp_path / "new" / "cases.csv").open(newline="", encoding="utf-8") as file:
        head, *lines = csv.reader(file)
    assert head == ["case", "class", *MEASURES]
    assert lines == [
        [r"'=1+1\n\x1b", "liver, left", "0.123457", "1.5", "", "", ""],
        [r"'=1+1\n\x1b", "'@SUM(1)", "", "1.5", "", "", ""],
        ["é", "liver, left", "1", "", "", "12345.7", ""],
        ["é", "'@SUM(1)", "0", "", "", "12345.7", ""],
    ]


def test_metrics_are_means_over_classes_of_means_over_cases():
    nan = math.nan
    rows = {"a": row_of(0.5, nan, nsd=0.25), "b": row_of(1.0, 0.25, nsd=0.75, hd95_mm=3.0)}
    metrics = metrics_of(rows, ["background", "x", "y"])
    assert metrics["dice"] == {"x": 0.75, "y": 0.25} and metrics["mean_dice"] == 0.5
    assert metrics["nsd"] == {"x": 0.5, "y": 0.5} and metrics["mean_nsd"] == 0.5
    assert metrics["mean_hd95_mm"] == 3 and metrics["hd95_missing"] == 2
    assert metrics["std_over_cases"] == pytest.approx(np.std([0.5, 0.625]))
    low, high = metrics["dice_interval"]
    assert low == 0.5 and high == 0.625  # case a alone: x of 0.5; case b alone: (1 + 0.25) / 2
    assert [case["name"] for case in metrics["cases"]] == ["a", "b"]
    assert metrics["cases"][1]["dice"] == [1.0, 0.25]


@pytest.mark.filterwarnings("error")
def test_without_a_value_all_is_nan_without_a_warning():
    metrics = metrics_of({"a": row_of(math.nan)}, ["background", "x"])
    assert math.isnan(metrics["mean_dice"]) and math.isnan(of_known(np.median, []))
    assert all(map(math.isnan, metrics["dice_interval"]))


def coverage(values: np.ndarray, level: float) -> float:
    """Share of the runs, values (runs, seeds, cases) of mean 0, whose interval holds 0."""
    inside = [low <= 0 <= high for low, high in (interval(v, level) for v in values)]
    return float(np.mean(inside))


# n normal values: the bootstrap's mean is normal with deviation s sqrt((n - 1) / n) / sqrt(n), and
# the interval holds 0 when |t| of n - 1 degrees is below z sqrt((n - 1) / n). Four deviations of
# the share in RUNS runs, and 0.02 for the quantiles: the same 2000 draws serve every run, so that
# theirs, sqrt(0.05 * 0.95 / 2000) = 0.005 at each end, does not average out.
RUNS, LEVEL = 600, 0.9


def bound(share: float) -> float:
    return 4 * math.sqrt(share * (1 - share) / RUNS) + 0.02


@pytest.mark.parametrize("n, axis", [(12, 1), (12, 2), (40, 2)])
def test_an_interval_covers_as_often_as_theory_has_it(n, axis):
    """Over seeds (axis 1) and over cases (axis 2), where only they differ."""
    values = np.random.default_rng(n).normal(size=(RUNS, n))
    repeated = np.repeat(np.expand_dims(values, 3 - axis), 5, 3 - axis)
    expected = 2 * t.cdf(norm.ppf((1 + LEVEL) / 2) * math.sqrt((n - 1) / n), n - 1) - 1
    assert abs(coverage(repeated, LEVEL) - expected) < bound(expected)


@pytest.mark.slow
def test_an_interval_knows_of_seeds_and_cases_at_once():
    """Effects of both: the variances of both count. One alone would cover far too seldom: within +-z of 1 / sqrt(2)
    of the deviation lies 0.755."""
    random = np.random.default_rng(7)
    seeds, cases = random.normal(size=(RUNS, 30, 1)), random.normal(size=(RUNS, 1, 30))
    assert abs(coverage(seeds + cases, LEVEL) - LEVEL) < bound(LEVEL)
    assert coverage((seeds + cases).mean(1, keepdims=True), LEVEL) < 0.755 + bound(0.755)


def test_an_interval_is_deterministic_and_leaves_out_what_is_not_known():
    values = np.random.default_rng(0).normal(0.8, 0.1, (3, 20))
    assert interval(values) == interval(values.copy())
    holes = values.copy()
    holes[1, 4] = math.nan
    low, high = interval(holes)
    assert low < np.nanmean(holes) < high and (low, high) != interval(values)
    assert np.isfinite(interval(np.concatenate([values, np.full((3, 1), math.nan)], 1))).all()
    assert interval(np.full((2, 9), 0.25)) == (0.25, 0.25)
    for single in ([[0.5]], [[math.nan, 0.5]], [[math.nan] * 3]):
        assert all(map(math.isnan, interval(single)))
    narrow, wide = interval(values, 0.5), interval(values, 0.95)
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_an_interval_over_classes_is_of_the_mean_of_their_means():
    values = np.random.default_rng(1).normal(size=(2, 15))
    lifted = np.stack([values, 3 * values + 1], 2)  # the mean is 2 values + 0.5
    low, high = interval(values)
    assert interval(lifted) == pytest.approx((2 * low + 0.5, 2 * high + 0.5))


@pytest.mark.parametrize("values, level", [([0.5, 0.6], 0.95), ([[]], 0.95), ([[1, 2]], 95)])
def test_an_interval_of_something_else_is_refused(values, level):
    with pytest.raises(ValueError, match=r"^interval: expected values \(seeds, cases\)"):
        interval(values, level)
