"""Tables of segmentation runs: pairs, seeds and folds, against numbers worked out by hand."""

import numpy as np
import pytest

from ndlightnet.training.segmentation.metrics import interval, metrics_of
from ndlightnet_evidence.segmentation import by_case, differences, mean_dice, segmentation_tables, values

NAMES = ("background", "liver", "cyst")
NAN = float("nan")


def run_of(row: str, seed: int, dice: dict[str, list[float]], **more: object) -> dict[str, object]:
    """A run as metrics.json has it, null for NaN."""
    known = {"volume_ml": 1.0, "truth_ml": 1.0}
    rows = {
        case: [{"dice": d, "hd95_mm": 2.0 if d == d else d, "nsd": d, **known} for d in both]
        for case, both in dice.items()
    }

    def plain(value):
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items()}
        if isinstance(value, list):
            return [plain(one) for one in value]
        return None if isinstance(value, float) and value != value else value

    return {"row": row, "seed": seed, "parameters": 1_234_567, **plain(metrics_of(rows, NAMES)), **more}


def drawn(seed: int, cases: int, low: float) -> dict[str, list[float]]:
    rng = np.random.default_rng(seed)
    return {f"case{seed}{n}": rng.uniform(low, low + 0.2, 2).tolist() for n in range(cases)}


def tables(text: str) -> list[list[dict[str, str]]]:
    """Each table as its lines, {column: cell}; columns of one name are numbered."""
    result = []
    for block in text.split("\n\n"):
        if block.startswith("|"):
            head, _, *lines = ([cell.strip() for cell in line[1:-1].split("|")] for line in block.splitlines())
            head = [f"{name}{head[:at].count(name) or ''}" for at, name in enumerate(head)]
            result.append([dict(zip(head, line, strict=True)) for line in lines])
    return result


def shown(table: np.ndarray) -> str:
    low, high = interval(table)
    return f"{low:.3f} to {high:.3f}"


def test_seeds_are_paired_and_rows_keep_their_order():
    a = [{case[-1]: dice for case, dice in drawn(seed, 5, 0.7).items()} for seed in (0, 1)]
    b = [{case: [x - 0.1, y - 0.2] for case, (x, y) in one.items()} for one in a]
    runs = [run_of(row, seed, dice[seed]) for seed in (1, 0) for row, dice in (("B", b), ("A", a))]
    scores, costs = tables(segmentation_tables(runs, ["A", "B"]))
    assert [line[""] for line in scores] == [line[""] for line in costs] == ["A", "B"]
    first, second = scores
    assert (first["more than A"], first["95 % interval1"]) == ("", "")
    # every case loses the same: nothing is left to draw
    assert (second["more than A"], second["95 % interval1"]) == ("-0.150", "-0.150 to -0.150")
    means, table = [np.mean(list(one.values())) for one in a], np.array([list(one.values()) for one in a])
    assert first["Dice"] == f"{np.mean(means):.3f} ± {np.std(means, ddof=1):.3f}"
    assert first["by seeds"] == f"{means[0]:.3f}, {means[1]:.3f}" and first["95 % interval"] == shown(table)


def test_a_class_that_only_one_finds_where_there_is_none():
    """NaN against 0: the case without a cyst, in which A says so and B does not."""
    a = by_case([run_of("A", 0, {"x": [0.8, NAN], "y": [0.6, 0.5], "z": [0.5, NAN]})])
    b = by_case([run_of("B", 0, {"x": [0.7, 0.0], "y": [0.6, 0.7], "z": [0.5, NAN]})])
    gain = differences(b, a)
    np.testing.assert_allclose(gain, [[[-0.1, -1.0], [0.0, 0.2], [0.0, NAN]]], atol=1e-6)
    np.testing.assert_array_equal(differences(a, b), -gain)
    assert mean_dice(gain) == pytest.approx((-0.1 / 3 - 0.8 / 2) / 2, abs=1e-6)


def test_only_shared_seeds_and_cases_are_compared():
    a = by_case([run_of("A", 0, {"x": [0.8, 0.4], "y": [0.6, 0.5]}), run_of("A", 1, {"x": [0.1, 0.2]})])
    b = by_case([run_of("B", 1, {"x": [0.5, 0.5], "w": [0.0, 0.0]})])
    np.testing.assert_allclose(differences(b, a), [[[0.4, 0.3]]], atol=1e-6)
    assert values(a).shape == (2, 1, 2)
    for runs in ([], [run_of("C", 7, {"x": [0.5, 0.5]})], [run_of("C", 0, {"elsewhere": [0.5, 0.5]})]):
        assert differences(by_case(runs), a).size == 0


def test_folds_are_pooled():
    folds = [drawn(k, 3, 0.5 + 0.1 * k) for k in range(3)]
    runs = [run_of("A", 4, fold, fold=k) for k, fold in reversed(list(enumerate(folds)))]
    text = segmentation_tables(runs, ["A"])
    ((line,), _), table = tables(text), np.array([[dice for fold in folds for dice in fold.values()]])
    assert line["by folds"] == ", ".join(f"{np.mean(list(fold.values())):.3f}" for fold in folds)
    assert np.sort(values(by_case(runs)), None) == pytest.approx(np.sort(table, None), abs=1e-6)
    assert line["95 % interval"] == shown(table) and "of one seed" in text


def test_a_row_without_a_run_unknown_scores_and_medians_of_costs():
    runs = [run_of("A", 0, {"x": [0.5, NAN], "y": [0.25, NAN]}, gflops=12.3456, step_ms=None, case_seconds=9.0)]
    runs += [{**runs[0], "seed": seed, "case_seconds": float(seed)} for seed in (1, 2)]
    scores, costs = tables(segmentation_tables(runs, ["B", "A"]))
    for lines, column in ((scores, "Dice"), (costs, "parameters")):
        assert lines[0][column] == "not run" and set(lines[0].values()) == {"B", "not run", ""}
    assert scores[1]["more than B"] == scores[1]["95 % interval1"] == "none"
    assert scores[1]["HD95 (mm)"] == "2.000 ± 0.000 (6 of 12 missing)"
    assert list(costs[1].values()) == ["A", "1.23 M", "12.35", "2", "none", "none", "none"]
