"""Tables: means, deviations and seeds, what is missing, and where runs come from."""

from ndlightnet_evidence import tables


def made(row: str, seed: int, dice: float | None, **more: object) -> dict[str, object]:
    return {"row": row, "seed": seed, "mean_dice": dice, "parameters": 1_234_567, **more}


def cells(line: str) -> list[str]:
    assert line.startswith("|") and line.endswith("|")
    return [cell.strip() for cell in line[1:-1].split("|")]


def test_columns_are_as_wide_as_their_widest_cell():
    table = tables.markdown(["", "long head"], [["a name", "1"], ["b"]])
    assert table == ("|        | long head |\n| ------ | --------- |\n| a name | 1         |\n| b      |           |\n")


def test_means_deviations_and_seeds():
    runs = [
        made("A", 2, 0.9, mean_hd95_mm=3.0),
        made("A", 0, 0.5, mean_hd95_mm=1.0),
        made("A", 1, 0.7, mean_hd95_mm=2.0),
        made("B", 0, 0.25, mean_hd95_mm=4.5),
        {"row": "B", "seed": 1, "error": "x"},
        {"row": "C", "seed": 0, "error": "boom"},
        {"row": "B", "seed": 2, "missing": True},
        {"row": "D", "seed": 0, "missing": True},
    ]
    head, rule, a, b, c, d = tables.summary(runs, ["A", "B", "C", "D"]).splitlines()
    assert cells(head) == ["", "parameters", "mean_dice", "mean_hd95_mm", "mean_dice per seed"]
    assert set("".join(cells(rule))) == {"-"}
    assert cells(a) == ["A", "1.23 M", "0.700 ± 0.200", "2.000 ± 1.000", "0.500, 0.700, 0.900"]
    assert cells(b) == ["B", "1.23 M", "0.250", "4.500", "0.250"]  # one seed has no deviation
    assert cells(c)[:2] == ["C", "failed"] and not any(cells(c)[2:])
    assert cells(d)[:2] == ["D", "not run"] and not any(cells(d)[2:])
    assert len({len(cells(line)) for line in (head, rule, a, b, c, d)}) == 1
    assert tables.notes(runs) == (
        "\nFailed: B, seed 1 (x); C, seed 0 (boom).\n\nNot run, no time was left: B, seed 2; D, seed 0.\n"
    )


def test_whatever_is_measured_is_shown():
    """Of the known measures; other entries of metrics.json are left out."""
    run = {
        "row": "A",
        "seed": 0,
        "mse": 0.5,
        "bits_per_byte": 1.25,
        "latency_ms": 3.5,
        "auc": 0.9,
        "step_ms": 2.0,
        "mae": 0.25,
        "peak_memory_gb": None,
        "columns": ["x"],
        "recall": {"a class": 0.5},
    }
    head, _, line = tables.summary([run], ["A"]).splitlines()
    assert dict(zip(cells(head), cells(line), strict=True)) == {
        "": "A",
        "parameters": "none",
        "auc": "0.900",
        "bits_per_byte": "1.250",
        "mse": "0.500",
        "mae": "0.250",
        "step_ms": "2.000",
        "latency_ms": "3.500",
        "peak_memory_gb": "none",
        "auc per seed": "0.900",
    }


def test_the_order_of_the_rows_and_the_state():
    runs = [
        {"row": row, "seed": 0, "top1": 0.5, "parameters": 10**6, "state_size": size}
        for row, size in (("A", None), ("B", 256))
    ]
    head, _, *lines = tables.summary(runs, ["B", "A"]).splitlines()
    assert cells(head) == ["", "parameters", "state", "top1", "top1 per seed"]
    assert [cells(line)[:3] for line in lines] == [["B", "1.00 M", "256"], ["A", "1.00 M", "-"]]


def test_all_failed():
    lines = tables.summary([{"row": "A", "seed": 0, "error": "x"}], ["A"]).splitlines()
    assert len({len(cells(line)) for line in lines}) == 1 and cells(lines[2])[1] == "failed"


def test_a_measure_that_is_null():
    """metrics.json has null where no class has a distance, as after a network that says nothing."""
    runs = [made("A", 0, 0.5, mean_hd95_mm=None), made("A", 1, 0.5, mean_hd95_mm=2.0)]
    line = tables.summary(runs, ["A"]).splitlines()[2]
    assert cells(line)[2:4] == ["0.500 ± 0.000", "2.000"]
    line = tables.summary(runs[:1], ["A"]).splitlines()[2]
    assert cells(line)[2:4] == ["0.500", "none"]


def test_where_the_runs_come_from():
    runs = [
        {"row": "A", "seed": seed, "date": f"2026-01-0{seed}", "commit": commit, "device": "x"}
        for seed, commit in ((2, "abc"), (1, "abc"), (3, None))
    ]
    assert tables.notes(runs) == "\n2026-01-01 to 2026-01-03, commit abc, x.\n"
    assert tables.notes(runs[:1]) == "\n2026-01-02, commit abc, x.\n"
    assert tables.notes([]) == tables.notes([made("A", 0, 0.5)]) == ""


def test_curves_of_two_panels():
    def run(row, seed, panel, *accuracy):
        curve = {"x_label": "pairs", "x": [2, 4], "accuracy": list(accuracy)}
        return {"row": row, "seed": seed, "state": None, "curves": {panel: curve}}

    runs = [
        run("A", 1, "one", 0.5, 1.0),
        run("A", 0, "one", 0.75, 1.0),
        run("B", 0, "two", 0, 1),
        {"row": "C", "seed": 0, "error": "x"},
    ]
    one, two = tables.curves(runs, ["B", "A", "C"], ["state"]).split("\n\n### two")
    title, _, head, _, line = one.splitlines()
    assert title == "### one: accuracy by pairs" and cells(head) == ["", "state", "2", "4"]
    assert cells(line) == ["A", "-", "0.625 ± 0.177", "1.000 ± 0.000"]
    assert cells(two.splitlines()[-1]) == ["B", "-", "0.000", "1.000"]
