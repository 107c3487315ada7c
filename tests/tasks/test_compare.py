"""tasks/compare.py: its table, its arguments, and what it does with a run that fails."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare", ROOT / "tasks" / "compare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made(row: str, seed: int, dice: float, **more: object) -> dict[str, object]:
    return {"row": row, "seed": seed, "mean_dice": dice, "parameters": 1_234_567, **more}


def cells(line: str) -> list[str]:
    assert line.startswith("|") and line.endswith("|")
    return [cell.strip() for cell in line[1:-1].split("|")]


def test_table_of_means_deviations_and_seeds(compare):
    runs = [
        made("A", 2, 0.9, mean_hd95_mm=3.0), made("A", 0, 0.5, mean_hd95_mm=1.0),
        made("A", 1, 0.7, mean_hd95_mm=2.0), made("B", 0, 0.25, mean_hd95_mm=4.5),
        {"row": "B", "seed": 1, "error": "failed"}, {"row": "C", "seed": 0, "error": "failed"},
    ]  # fmt: skip
    head, rule, a, b, c = compare.table(runs, ["A", "B", "C"]).splitlines()
    assert cells(head) == ["", "parameters", "mean_dice", "mean_hd95_mm", "mean_dice per seed"]
    assert set(cells(rule)) == {"---"}
    assert cells(a) == ["A", "1.23 M", "0.700 ± 0.200", "2.000 ± 1.000", "0.500, 0.700, 0.900"]
    assert cells(b) == ["B", "1.23 M", "0.250", "4.500", "0.250"]  # one seed has no deviation
    assert cells(c)[:2] == ["C", "failed"] and not any(cells(c)[2:])
    assert len({len(cells(line)) for line in (head, rule, a, b, c)}) == 1


def test_table_keeps_the_order_of_the_rows_and_shows_what_is_measured(compare):
    runs = [{"row": row, "seed": 0, "top1": 0.5, "parameters": 10**6} for row in "AB"]
    head, _, *lines = compare.table(runs, ["B", "A"]).splitlines()
    assert cells(head) == ["", "parameters", "top1", "top1 per seed"]
    assert [cells(line)[0] for line in lines] == ["B", "A"]


def test_table_when_all_failed(compare):
    lines = compare.table([{"row": "A", "seed": 0, "error": "x"}], ["A"]).splitlines()
    assert len({len(cells(line)) for line in lines}) == 1 and cells(lines[2])[1] == "failed"


def test_table_with_a_measure_that_is_null(compare):
    """metrics.json has null where no class has a distance, as after a network that says nothing."""
    runs = [made("A", 0, 0.5, mean_hd95_mm=None), made("A", 1, 0.5, mean_hd95_mm=2.0)]
    line = compare.table(runs, ["A"]).splitlines()[2]
    assert cells(line)[2].startswith("0.500")
    line = compare.table(runs[:1], ["A"]).splitlines()[2]
    assert cells(line)[2] == "0.500"


TASK = """
import json, sys
from pathlib import Path
option = "--trainer.default_root_dir="
root = next(Path(a[len(option):]) for a in sys.argv if a.startswith(option))
with open(root / "calls.jsonl", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
print("to stdout"); print("to stderr", file=sys.stderr)
if sys.argv[1] == "FAIL":
    sys.exit(1)
if sys.argv[1] == "test":
    (root / "metrics.json").write_text(json.dumps({"top1": 0.75, "parameters": 5}))
"""


def options(tmp_path: Path, fail: str = "nothing") -> argparse.Namespace:
    task = tmp_path / "task.py"
    task.write_text(TASK.replace("FAIL", fail))
    return argparse.Namespace(
        task=task, config=tmp_path / "c.yaml", out=tmp_path / "out", jobs=1,
        extra=["--trainer.max_epochs=1"], checkpoint="last",
    )  # fmt: skip


def calls(root: Path) -> list[list[str]]:
    return [json.loads(line) for line in (root / "calls.jsonl").read_text().splitlines()]


def test_one_run_fits_then_tests_the_last_checkpoint(compare, tmp_path):
    found = compare.one_run(options(tmp_path), "without MD-TPE", 7)
    assert found.pop("seconds") > 0
    assert found == {"row": "without MD-TPE", "seed": 7, "top1": 0.75, "parameters": 5}
    root = tmp_path / "out" / "without_MD-TPE-7"
    common = [
        "--config", str(tmp_path / "c.yaml"), "--seed_everything=7",
        f"--trainer.default_root_dir={root}", "--model.net.init_args.tpe=false",
        "--trainer.max_epochs=1",
    ]  # fmt: skip
    last = f"--ckpt_path={root}/checkpoints/last.ckpt"
    assert calls(root) == [["fit", *common], ["test", last, *common]]
    log = (root / "log.txt").read_text()
    assert log.count("to stdout") == log.count("to stderr") == 2


@pytest.mark.parametrize("fail, runs", [("fit", 1), ("test", 2)])
def test_one_run_that_fails(compare, tmp_path, fail, runs):
    root = tmp_path / "out" / "LightNet-0"
    root.mkdir(parents=True)
    (root / "metrics.json").write_text('{"top1": 1.0}')  # of an earlier run
    found = compare.one_run(options(tmp_path, fail), "LightNet", 0)
    assert set(found) == {"row", "seed", "error"}
    assert found["error"] == f"{fail} failed, see {root}/log.txt"
    assert len(calls(root)) == runs and "to stderr" in (root / "log.txt").read_text()


def start(compare, monkeypatch, tmp_path, *arguments: str, answer=None) -> tuple[int, list]:
    seen = []

    def one_run(options, row, seed):
        seen.append((options, row, seed))
        return answer(row, seed) if answer else made(row, seed, 0.5)

    monkeypatch.setattr(compare, "one_run", one_run)
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "compare" / "c"
    folder.mkdir(parents=True, exist_ok=True)  # which one_run would have made
    return compare.main(), seen


def test_a_run_with_a_null_is_shown_and_saved(compare, monkeypatch, tmp_path):
    def answer(row, seed):
        return made(row, seed, None if seed else 0.5, mean_hd95_mm=None)

    arguments = ("t.py", "c.yaml", "--rows", "LightNet", "--seeds", "0", "1")
    assert start(compare, monkeypatch, tmp_path, *arguments, answer=answer)[0] == 0
    assert len(json.loads((tmp_path / "runs" / "compare" / "c" / "runs.json").read_text())) == 2


def test_arguments_after_the_dashes_go_to_every_run(compare, monkeypatch, tmp_path, capsys):
    status, seen = start(
        compare, monkeypatch, tmp_path, "t.py", "x/c.yaml", "--seeds", "3", "1",
        "--rows", "LightNet", "single frame", "--", "--trainer.max_epochs=2", "--data.workers", "0",
    )  # fmt: skip
    assert status == 0
    assert [(row, seed) for _, row, seed in seen] == [
        ("LightNet", 3), ("single frame", 3), ("LightNet", 1), ("single frame", 1),
    ]  # fmt: skip
    given = seen[0][0]
    assert given.extra == ["--trainer.max_epochs=2", "--data.workers", "0"]
    assert (given.task, given.config, given.jobs) == (Path("t.py"), Path("x/c.yaml"), 1)
    folder = tmp_path / "runs" / "compare" / "c"
    assert len(json.loads((folder / "runs.json").read_text())) == 4
    assert (folder / "table.md").read_text() in capsys.readouterr().out


def test_without_dashes_nothing_is_passed_on(compare, monkeypatch, tmp_path):
    status, seen = start(compare, monkeypatch, tmp_path, "t.py", "c.yaml", "--seeds", "0")
    assert status == 0 and seen[0][0].extra == []
    assert "single frame" not in [row for _, row, _ in seen] and len(seen) == 5


def test_a_failed_run_makes_the_status_1(compare, monkeypatch, tmp_path, capsys):
    def answer(row, seed):
        return {"row": row, "seed": seed, "error": "boom"} if seed else made(row, seed, 0.5)

    arguments = ("t.py", "c.yaml", "--rows", "LightNet", "--seeds", "0", "1")
    status, _ = start(compare, monkeypatch, tmp_path, *arguments, answer=answer)
    out = capsys.readouterr().out
    assert status == 1 and "[2/2] LightNet, seed 1: boom" in out and "mean_dice 0.500" in out


def test_an_unknown_row_is_refused(compare, monkeypatch, tmp_path):
    with pytest.raises(SystemExit) as caught:
        start(compare, monkeypatch, tmp_path, "t.py", "c.yaml", "--rows", "LightNet2")
    assert caught.value.code == 2
