"""Tables: means, deviations and seeds, what is missing, and where runs come from."""

from ndlightnet_evidence import tables


def run(row: str, seed: int, dice: float | None = None, **fields: object) -> tables.Run:
    return {"row": row, "seed": seed, "mean_dice": dice, "parameters": 1_234_567, **fields}


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line.startswith("|")]


def test_columns_are_as_wide_as_their_widest_cell():
    table = tables.markdown(["", "long head"], [["a name", "1"], ["b"]])
    assert table == "|        | long head |\n| ------ | --------- |\n| a name | 1         |\n| b      |           |\n"
    head, _, *lines = cells(tables.of_records([{"a": 0.123456, "b": None}, {"c": 12}]))
    assert (head, lines) == (["a", "b", "c"], [["0.1235", "-", ""], ["", "", "12"]])


def test_means_deviations_and_seeds():
    """Of the known measures; other entries of metrics.json are left out."""
    measures = {"auc": 0.9, "peak_memory_gb": None, "recall": {"a class": 0.5}, "top": 1.0}
    runs = [
        run("A", 2, 0.9, mean_hd95_mm=3.0, **measures),
        run("A", 0, 0.5, mean_hd95_mm=float("nan"), **measures),
        run("A", 1, 0.7, mean_hd95_mm=2.0, **measures),
        run("B", 0, 0.25, mean_hd95_mm=None),
        {"row": "B", "seed": 1, "error": "x"},
        {"row": "C", "seed": 0, "error": "boom"},
    ]
    head, _, a, b, c, d = cells(tables.summary(runs, ["A", "B", "C", "D"]))
    measures = ["mean_dice", "mean_hd95_mm", "auc", "peak_memory_gb"]
    assert head == ["", "parameters", *measures, "mean_dice per seed"]
    spreads = ["0.700 ± 0.200", "2.500 ± 0.707", "0.900 ± 0.000", "none", "0.500, 0.700, 0.900"]
    assert a == ["A", "1.23 M", *spreads]
    assert b == ["B", "1.23 M", "0.250", "none", "none", "none", "0.250"]  # one seed has no deviation
    assert c == ["C", "failed", *[""] * 5] and d == ["D", "not run", *[""] * 5]
    assert tables.notes(runs) == "\nFailed: B, seed 1 (x); C, seed 0 (boom).\n"
    assert [len(line) for line in cells(tables.summary(runs[-1:], ["C"]))] == [4, 4, 4]


def test_notes_have_dates_commits_and_devices():
    origins = [(2, "abc"), (1, "abc"), (3, None)]
    runs = [run("A", n, date=f"2026-01-0{n}", commit=commit, device="x") for n, commit in origins]
    assert tables.notes(runs) == "\n2026-01-01 to 2026-01-03, commit abc, x.\n"
    assert tables.notes(runs[2:]) == "\n2026-01-03, x.\n" and tables.notes([]) == ""


def test_curves_of_two_panels():
    def curve(row, seed, panel, *accuracy):
        panels = {panel: {"x_label": "pairs", "x": [2, 4], "accuracy": list(accuracy)}}
        return {"row": row, "seed": seed, "state": None, "curves": panels}

    runs = [curve("A", 1, "one", 0.5, 1.0), curve("A", 0, "one", 0.75, 1.0), curve("B", 0, "two", 0.0, 1.0)]
    one, two = tables.curves([*runs, {"row": "C", "seed": 0, "error": "x"}], ["B", "A", "C"], ["state"]).split(
        "\n\n### two"
    )
    assert one.startswith("### one: accuracy by pairs\n")
    assert cells(one)[::2] == [["", "state", "2", "4"], ["A", "-", "0.625 ± 0.177", "1.000 ± 0.000"]]
    assert cells(two)[-1] == ["B", "-", "0.000", "1.000"]
