"""tasks/evidence/compare.py: its table, its arguments, and what it does with a run that fails."""

import argparse
import inspect
import itertools
import json
import sys
import threading
from pathlib import Path

import compare
import pytest
import torch

from ndlightnet.nn import mixers

ROOT = Path(__file__).parents[2]


def made(row: str, seed: int, dice: float, **more: object) -> dict[str, object]:
    return {"row": row, "seed": seed, "mean_dice": dice, "parameters": 1_234_567, **more}


def cells(line: str) -> list[str]:
    assert line.startswith("|") and line.endswith("|")
    return [cell.strip() for cell in line[1:-1].split("|")]


def test_table_of_means_deviations_and_seeds():
    runs = [
        made("A", 2, 0.9, mean_hd95_mm=3.0), made("A", 0, 0.5, mean_hd95_mm=1.0),
        made("A", 1, 0.7, mean_hd95_mm=2.0), made("B", 0, 0.25, mean_hd95_mm=4.5),
        {"row": "B", "seed": 1, "error": "x"}, {"row": "C", "seed": 0, "error": "x"},
        {"row": "B", "seed": 2, "missing": True}, {"row": "D", "seed": 0, "missing": True},
    ]  # fmt: skip
    lines = compare.table(runs, ["A", "B", "C", "D"]).splitlines()
    head, rule, a, b, c, d = lines[:6]
    assert cells(head) == ["", "parameters", "mean_dice", "mean_hd95_mm", "mean_dice per seed"]
    assert set(cells(rule)) == {"---"}
    assert cells(a) == ["A", "1.23 M", "0.700 ± 0.200", "2.000 ± 1.000", "0.500, 0.700, 0.900"]
    assert cells(b) == ["B", "1.23 M", "0.250", "4.500", "0.250"]  # one seed has no deviation
    assert cells(c)[:2] == ["C", "failed"] and not any(cells(c)[2:])
    assert cells(d)[:2] == ["D", "not run"] and not any(cells(d)[2:])
    assert len({len(cells(line)) for line in (head, rule, a, b, c, d)}) == 1
    assert [line for line in lines[6:] if line] == [
        "Failed: B (seed 1), C (seed 0).",
        "Not run, no time was left: B (seed 2), D (seed 0).",
    ]


def test_table_of_what_other_tasks_measure():
    """Whatever of the known measures is in metrics.json, other entries are left out."""
    run = {"row": "A", "seed": 0, "mse": 0.5, "bits_per_byte": 1.25, "latency_ms": 3.5, "auc": 0.9,
           "step_ms": 2.0, "mae": 0.25, "peak_memory_gb": None, "columns": ["x"]}  # fmt: skip
    head, _, line = compare.table([run], ["A"]).splitlines()
    assert dict(zip(cells(head), cells(line), strict=True)) == {
        "": "A", "parameters": "none", "auc": "0.900", "bits_per_byte": "1.250", "mse": "0.500",
        "mae": "0.250", "step_ms": "2.000", "latency_ms": "3.500", "peak_memory_gb": "none",
        "auc per seed": "0.900",
    }  # fmt: skip


def test_table_keeps_the_order_of_the_rows_and_shows_what_is_measured():
    runs = [{"row": row, "seed": 0, "top1": 0.5, "parameters": 10**6} for row in "AB"]
    head, _, *lines = compare.table(runs, ["B", "A"]).splitlines()
    assert cells(head) == ["", "parameters", "top1", "top1 per seed"]
    assert [cells(line)[0] for line in lines] == ["B", "A"]


def test_table_when_all_failed():
    lines = compare.table([{"row": "A", "seed": 0, "error": "x"}], ["A"]).splitlines()[:3]
    assert len({len(cells(line)) for line in lines}) == 1 and cells(lines[2])[1] == "failed"


def test_table_with_a_measure_that_is_null():
    """metrics.json has null where no class has a distance, as after a network that says nothing."""
    runs = [made("A", 0, 0.5, mean_hd95_mm=None), made("A", 1, 0.5, mean_hd95_mm=2.0)]
    line = compare.table(runs, ["A"]).splitlines()[2]
    assert cells(line)[2].startswith("0.500")
    line = compare.table(runs[:1], ["A"]).splitlines()[2]
    assert cells(line)[2] == "0.500"


SEQUENTIAL = [name for name in mixers.__all__
              if "scan" in inspect.signature(getattr(mixers, name)).parameters]  # fmt: skip


def mixer_of(arguments: list[str]) -> dict[str, object]:
    """What a row's only argument says."""
    name, _, value = arguments[0].partition("=")
    assert len(arguments) == 1 and name == "--model.net.init_args.mixer"
    return json.loads(value)


@pytest.mark.parametrize("name", mixers.__all__)
def test_a_row_for_every_mixer(name):
    path = f"ndlightnet.nn.mixers.{name}"
    assert mixer_of(compare.overrides(name)) == {"class_path": path, "init_args": {}}


class InTurn(torch.nn.Module):
    """What a mixer that reads tokens in turn looks like from outside."""

    def __init__(self, dim: int, *, scan: str = "both") -> None:
        super().__init__()


@pytest.fixture
def catalogue(monkeypatch):
    """The catalogue of mixers with one of them that reads tokens in turn."""
    monkeypatch.setattr(mixers, "InTurn", InTurn, raising=False)
    names = ["InTurn", "LightNetAttention", "SoftmaxAttention", "Identity"]
    monkeypatch.setattr(mixers, "__all__", names)


@pytest.mark.parametrize("scan", ["raster", "both", "axes"])
def test_a_row_for_every_scan(catalogue, scan):
    found = mixer_of(compare.overrides(f"InTurn {scan}"))
    path = "ndlightnet.nn.mixers.InTurn"
    assert found == {"class_path": path, "init_args": {"scan": scan}}


def test_the_family(catalogue):
    assert compare.family() == [
        "Identity", "SoftmaxAttention", "LightNetAttention", "InTurn raster", "InTurn both",
        "InTurn axes",
    ]  # fmt: skip


def test_the_family_is_the_whole_catalogue():
    rows = compare.family()
    assert len(rows) == len(set(rows)) == len(mixers.__all__) + 2 * len(SEQUENTIAL)
    for row in rows:
        found = mixer_of(compare.overrides(row))
        getattr(mixers, str(found["class_path"]).rsplit(".")[-1])(64, **found["init_args"])


@pytest.mark.parametrize(
    "row, text",
    [
        ("LightNet axes", "expected LightNet, softmax attention, "),
        ("InTurn zigzag", "expected InTurn, InTurn raster, InTurn both, InTurn axes"),
        ("InTurn both axes", "expected InTurn, InTurn raster"),
        ("InTurn ", "expected InTurn, InTurn raster"),
        ("LightNetAttention both", "expected LightNetAttention"),
        ("Nothing", "single frame, padded, InTurn, LightNetAttention"),
    ],
)
def test_a_row_that_is_none(catalogue, row, text):
    with pytest.raises(ValueError) as caught:
        compare.overrides(row)
    assert str(caught.value).startswith(f"row {row!r}: ") and text in str(caught.value)


TASK = """
import json, os, sys
from pathlib import Path
option = "--trainer.default_root_dir="
root = next(Path(a[len(option):]) for a in sys.argv if a.startswith(option))
with open(root / "calls.jsonl", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
assert Path(sys.path[0]) == Path(sys.argv[0]).parent and __name__ == "__main__"
print("to stdout"); print("to stderr", file=sys.stderr)
if sys.argv[1] == "FAIL":
    END
if sys.argv[1] == "test":
    where = {k: os.environ.get(k) for k in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")}
    found = {"top1": 0.75, "parameters": 5, "process": os.getpid(), "where": where}
    (root / "metrics.json").write_text(json.dumps(found))
sys.exit(0)
"""


def options(
    tmp_path: Path, fail: str = "nothing", end: str = "sys.exit(1)", jobs: int = 1
) -> argparse.Namespace:
    task = tmp_path / "task.py"
    task.write_text(TASK.replace("FAIL", fail).replace("END", end))
    return argparse.Namespace(
        task=task, config=tmp_path / "c.yaml", out=tmp_path / "out", jobs=jobs,
        extra=["--trainer.max_epochs=1"], checkpoint="last", minutes=float("inf"), folds=None,
        rows={"LightNet": [], "without MD-TPE": ["--model.net.init_args.tpe=false"]},
    )  # fmt: skip


def who(row: str, seed: int) -> dict[str, object]:
    return {"row": row, "seed": seed}


def calls(root: Path) -> list[list[str]]:
    return [json.loads(line) for line in (root / "calls.jsonl").read_text().splitlines()]


def test_one_run_fits_then_tests_the_last_checkpoint(tmp_path):
    found = compare.one_run(options(tmp_path), who("without MD-TPE", 7), "3")
    assert found.pop("seconds") > 0 and found.pop("process") > 0
    assert found.pop("where")["CUDA_VISIBLE_DEVICES"] == "3"
    assert found == {"row": "without MD-TPE", "seed": 7, "top1": 0.75, "parameters": 5}
    root = tmp_path / "out" / "without_MD-TPE-7"
    common = [
        "--config", str(tmp_path / "c.yaml"), "--model.net.init_args.tpe=false",
        "--seed_everything=7", f"--trainer.default_root_dir={root}", "--trainer.max_epochs=1",
    ]  # fmt: skip
    last = f"--ckpt_path={root}/checkpoints/last.ckpt"
    assert calls(root) == [["fit", *common], ["test", last, *common]]
    log = (root / "log.txt").read_text()
    assert log.count("to stdout") == log.count("to stderr") == 2


@pytest.mark.parametrize("end", ["sys.exit(1)", "raise ValueError", "os._exit(9)"])
@pytest.mark.parametrize("fail, runs", [("fit", 1), ("test", 2)])
def test_one_run_that_fails(tmp_path, fail, runs, end):
    root = tmp_path / "out" / "LightNet-0"
    root.mkdir(parents=True)
    (root / "metrics.json").write_text('{"top1": 1.0}')  # of an earlier run
    found = compare.one_run(options(tmp_path, fail, end), who("LightNet", 0), None)
    assert set(found) == {"row", "seed", "error"}
    assert found["error"] == f"{fail} failed, see {root}/log.txt"
    assert len(calls(root)) == runs and "to stderr" in (root / "log.txt").read_text()


def test_one_run_without_a_result(tmp_path):
    given = options(tmp_path, "test", "sys.exit(0)")
    (tmp_path / "out" / "LightNet-0").mkdir(parents=True)
    (tmp_path / "out" / "LightNet-0" / "metrics.json").write_text('{"top1": 1.0}')
    found = compare.one_run(given, who("LightNet", 0), None)
    assert set(found) == {"row", "seed", "error"} and found["error"].startswith("no result (")


@pytest.mark.parametrize(
    "count, named, expected",
    [(0, None, []), (0, "", []), (2, None, ["0", "1"]), (2, "5,GPU-7", ["5", "GPU-7"]),
     (1, "3,-1", ["3"])],
)  # fmt: skip
def test_the_gpus_that_may_be_used(monkeypatch, count, named, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert compare.gpus() == expected


HANGS = 600  # seconds after which a test that would never end is ended


def in_turn(monkeypatch, jobs: int, runs: int, gpus: list[str], minutes=float("inf")):
    """The runs that `all_runs` makes, and the GPUs in use while each of them was."""
    busy, together, done, meet = [], [], [], threading.Barrier(jobs)

    def one_run(options, who, gpu):
        busy.append(gpu)
        meet.wait(HANGS)  # until all jobs are at work
        together.append(sorted(busy, key=str))
        meet.wait(HANGS)
        busy.remove(gpu)
        return {**who, "gpu": gpu}

    monkeypatch.setattr(compare, "one_run", one_run)
    monkeypatch.setattr(compare, "gpus", lambda: gpus)
    given = argparse.Namespace(jobs=jobs, minutes=minutes)
    compare.all_runs(given, [who("LightNet", seed) for seed in range(runs)], done.append)
    return done, together


@pytest.mark.parametrize(
    "jobs, gpus, shared",
    [(1, ["0", "1"], ["0"]), (2, ["4", "5"], ["4", "5"]), (4, ["4", "5"], ["4", "4", "5", "5"]),
     (3, ["0", "1"], ["0", "0", "1"]), (2, [], [None, None])],
)  # fmt: skip
def test_runs_go_to_all_gpus_in_turn(monkeypatch, jobs, gpus, shared):
    done, together = in_turn(monkeypatch, jobs, 3 * jobs, gpus)
    assert sorted(run["seed"] for run in done) == list(range(3 * jobs))
    assert together == [shared] * 3 * jobs


def test_no_run_begins_when_the_minutes_are_over(monkeypatch):
    now = itertools.count()
    monkeypatch.setattr(compare.time, "monotonic", lambda: 60.0 * next(now))
    done, _ = in_turn(monkeypatch, 1, 5, [], minutes=3)  # asked at the minutes 1, 2, 3, ..
    assert [run["seed"] for run in done if "gpu" in run] == [0, 1]
    late = [{"row": "LightNet", "seed": seed, "missing": True} for seed in (2, 3, 4)]
    assert done[2:] == late


def start(monkeypatch, tmp_path, *arguments: str, answer=None) -> tuple[int, list]:
    seen = []

    def one_run(options, who, gpu):
        row, seed = who["row"], who["seed"]
        seen.append((options, row, seed))
        return answer(row, seed) if answer else made(row, seed, 0.5)

    monkeypatch.setattr(compare, "one_run", one_run)
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "compare" / "c"
    folder.mkdir(parents=True, exist_ok=True)  # which one_run would have made
    return compare.main(), seen


def test_a_run_with_a_null_is_shown_and_saved(monkeypatch, tmp_path):
    def answer(row, seed):
        return made(row, seed, None if seed else 0.5, mean_hd95_mm=None)

    arguments = ("t.py", "c.yaml", "--rows", "LightNet", "--seeds", "0", "1")
    assert start(monkeypatch, tmp_path, *arguments, answer=answer)[0] == 0
    assert len(json.loads((tmp_path / "runs" / "compare" / "c" / "runs.json").read_text())) == 2


def test_arguments_after_the_dashes_go_to_every_run(monkeypatch, tmp_path, capsys):
    status, seen = start(
        monkeypatch, tmp_path, "t.py", "x/c.yaml", "--seeds", "3", "1",
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


@pytest.mark.parametrize("given", ["--data.init_args.fold=0", "--data.fold"])
def test_a_fold_after_the_dashes_is_refused(monkeypatch, tmp_path, capsys, given):
    """The task would write it beside where its checkpoint is looked for, after a whole training."""
    with pytest.raises(SystemExit):
        start(monkeypatch, tmp_path, "t.py", "c.yaml", "--", given)
    assert "--data.init_args.fold after --: expected --folds" in capsys.readouterr().err
    other = "--data.init_args.folds=3"
    assert start(monkeypatch, tmp_path, "t.py", "c.yaml", "--", other)[0] == 0


def test_without_dashes_nothing_is_passed_on(monkeypatch, tmp_path):
    status, seen = start(monkeypatch, tmp_path, "t.py", "c.yaml", "--seeds", "0")
    assert status == 0 and seen[0][0].extra == []
    assert "single frame" not in [row for _, row, _ in seen] and len(seen) == 5


def test_a_failed_run_makes_the_status_1(monkeypatch, tmp_path, capsys):
    def answer(row, seed):
        return {"row": row, "seed": seed, "error": "boom"} if seed else made(row, seed, 0.5)

    arguments = ("t.py", "c.yaml", "--rows", "LightNet", "--seeds", "0", "1")
    status, _ = start(monkeypatch, tmp_path, *arguments, answer=answer)
    out = capsys.readouterr().out
    assert status == 1 and "[2/2] LightNet, seed 1: boom" in out and "mean_dice 0.500" in out


def test_results_are_written_after_every_run(monkeypatch, tmp_path):
    folder = tmp_path / "runs" / "compare" / "c"

    def all_runs(options, wanted, done):
        for count, who in enumerate(wanted, 1):
            done(made(who["row"], who["seed"], 0.5))
            assert len(json.loads((folder / "runs.json").read_text())) == count
            assert (folder / "table.md").read_text().endswith(", ".join(["0.500"] * count) + " |\n")

    monkeypatch.setattr(compare, "all_runs", all_runs)
    start(monkeypatch, tmp_path, "t.py", "c.yaml", "--rows", "LightNet")


def test_going_on(monkeypatch, tmp_path, capsys):
    """Good runs are kept, failed and missing ones are done."""
    folder = tmp_path / "runs" / "compare" / "c"
    folder.mkdir(parents=True)
    before = [made("padded", 0, 0.25), {"row": "padded", "seed": 1, "error": "x"},
              {"row": "LightNet", "seed": 0, "missing": True}]  # fmt: skip
    (folder / "runs.json").write_text(json.dumps(before))
    arguments = ("t.py", "c.yaml", "--rows", "LightNet", "padded", "--seeds", "0", "1", "--resume")
    status, seen = start(monkeypatch, tmp_path, *arguments)
    assert status == 0 and "[4/4] " in capsys.readouterr().out
    done = [("LightNet", 0), ("LightNet", 1), ("padded", 1)]
    assert [(row, seed) for _, row, seed in seen] == done
    runs = json.loads((folder / "runs.json").read_text())
    found = [(run["row"], run["seed"], run["mean_dice"]) for run in runs]
    assert found == [("padded", 0, 0.25), *((row, seed, 0.5) for row, seed in done)]
    status, seen = start(monkeypatch, tmp_path, *arguments)
    assert (status, seen) == (0, []) and json.loads((folder / "runs.json").read_text()) == runs
    assert len(start(monkeypatch, tmp_path, *arguments[:-1])[1]) == 4  # from the start


def test_what_is_missing_is_said(monkeypatch, tmp_path, capsys):
    arguments = ("t.py", "c.yaml", "--rows", "LightNet", "--seeds", "4", "--minutes", "0")
    status, seen = start(monkeypatch, tmp_path, *arguments)
    out = capsys.readouterr().out
    assert (status, seen) == (0, [])
    assert "[1/1] LightNet, seed 4: no time was left" in out
    assert "Not run, no time was left: LightNet (seed 4)." in out


def test_the_family_as_an_option(monkeypatch, tmp_path, catalogue):
    arguments = ("t.py", "c.yaml", "--seeds", "0", "--family", "--rows", "LightNet", "InTurn axes")
    _, seen = start(monkeypatch, tmp_path, *arguments)
    assert [row for _, row, _ in seen] == [
        "LightNet", "InTurn axes", "Identity", "SoftmaxAttention", "LightNetAttention",
        "InTurn raster", "InTurn both",
    ]  # fmt: skip


def test_an_unknown_row_is_refused(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        start(monkeypatch, tmp_path, "t.py", "c.yaml", "--rows", "LightNet2")
    assert caught.value.code == 2 and "row 'LightNet2': expected " in capsys.readouterr().err
