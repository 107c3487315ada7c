"""Tables: means, deviations and seeds, what is missing, and where runs come from."""

import pytest

from ndlightnet_evidence import tables


def run(row: str, seed: int, dice: float | None = None, **fields: object) -> tables.Run:
    return {"row": row, "seed": seed, "mean_dice": dice, "parameters": 1_234_567, **fields}


def cells(line: str) -> list[str]:
    assert line.startswith("|") and line.endswith("|")
    return [cell.strip() for cell in line[1:-1].split("|")]


def test_columns_are_as_wide_as_their_widest_cell():
    table = tables.markdown(["", "long head"], [["a name", "1"], ["b"]])
    assert table == "|        | long head |\n| ------ | --------- |\n| a name | 1         |\n| b      |           |\n"
    records = [{"a": 0.123456, "b": None}, {"c": 12}]
    assert [cells(line) for line in tables.of_records(records).splitlines()] == [
        ["a", "b", "c"],
        ["-" * 6, "---", "---"],
        ["0.1235", "-", ""],
        ["", "", "12"],
    ]


def test_means_deviations_and_seeds():
    runs = [
        run("A", 2, 0.9, mean_hd95_mm=3.0),
        run("A", 0, 0.5, mean_hd95_mm=None),
        run("A", 1, 0.7, mean_hd95_mm=2.0),
        run("B", 0, 0.25, mean_hd95_mm=None),
        {"row": "B", "seed": 1, "error": "x"},
        {"row": "C", "seed": 0, "error": "boom"},
    ]
    head, rule, a, b, c, d = tables.summary(runs, ["A", "B", "C", "D"]).splitlines()
    assert cells(head) == ["", "parameters", "mean_dice", "mean_hd95_mm", "mean_dice per seed"]
    assert set("".join(cells(rule))) == {"-"}
    assert cells(a) == ["A", "1.23 M", "0.700 ± 0.200", "2.500 ± 0.707", "0.500, 0.700, 0.900"]
    assert cells(b) == ["B", "1.23 M", "0.250", "none", "0.250"]  # one seed has no deviation
    assert cells(c) == ["C", "failed", "", "", ""] and cells(d) == ["D", "not run", "", "", ""]
    assert tables.notes(runs) == "\nFailed: B, seed 1 (x); C, seed 0 (boom).\n"
    lines = tables.summary(runs[-1:], ["C"]).splitlines()
    assert len({len(cells(line)) for line in lines}) == 1


def test_whatever_is_measured_is_shown():
    """Of the known measures; other entries of metrics.json are left out."""
    fields = {"mse": 0.5, "auc": 0.9, "step_ms": 2.0, "peak_memory_gb": None, "recall": {"a class": 0.5}}
    head, _, line = tables.summary([{"row": "A", "seed": 0, "state_size": 256, **fields}], ["A"]).splitlines()
    assert dict(zip(cells(head), cells(line), strict=True)) == {
        "": "A",
        "parameters": "none",
        "state": "256",
        "auc": "0.900",
        "mse": "0.500",
        "step_ms": "2.000",
        "peak_memory_gb": "none",
        "auc per seed": "0.900",
    }


@pytest.mark.parametrize(
    "origins, text",
    [
        ([(2, "abc"), (1, "abc"), (3, None)], "\n2026-01-01 to 2026-01-03, commit abc, x.\n"),
        ([(2, None)], "\n2026-01-02, x.\n"),
        ([], ""),
    ],
)
def test_notes_have_dates_commits_and_devices(origins, text):
    runs = [run("A", n, date=f"2026-01-0{n}", commit=commit, device="x") for n, commit in origins]
    assert tables.notes(runs) == text


def test_curves_of_two_panels():
    def curve(row, seed, panel, *accuracy):
        panels = {panel: {"x_label": "pairs", "x": [2, 4], "accuracy": list(accuracy)}}
        return {"row": row, "seed": seed, "state": None, "curves": panels}

    runs = [
        curve("A", 1, "one", 0.5, 1.0),
        curve("A", 0, "one", 0.75, 1.0),
        curve("B", 0, "two", 0.0, 1.0),
        {"row": "C", "seed": 0, "error": "x"},
    ]
    one, two = tables.curves(runs, ["B", "A", "C"], ["state"]).split("\n\n### two")
    title, _, head, _, line = one.splitlines()
    assert title == "### one: accuracy by pairs" and cells(head) == ["", "state", "2", "4"]
    assert cells(line) == ["A", "-", "0.625 ± 0.177", "1.000 ± 0.000"]
    assert cells(two.splitlines()[-1]) == ["B", "-", "0.000", "1.000"]
