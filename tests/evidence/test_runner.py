"""The runner, with runs that take no time: side by side, over GPUs, resumed."""

import csv
import json
import os
import threading
from argparse import Namespace

import pytest
import torch

from ndlightnet_evidence import runner

HANGS = 600  # seconds after which a test that would never end is ended


def who(seed: int, row: str = "A") -> dict[str, object]:
    return {"row": row, "seed": seed}


@pytest.mark.parametrize(
    "count, named, expected",
    [(0, None, []), (0, "", []), (2, None, ["0", "1"]), (2, "5,GPU-7", ["5", "GPU-7"]), (1, "3,-1", ["3"])],
)
def test_the_gpus_that_may_be_used(monkeypatch, count, named, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert runner.gpus() == expected


@pytest.mark.parametrize(
    "jobs, gpus, shared", [(1, ["0", "1"], ["0"]), (3, ["4", "5"], ["4", "4", "5"]), (2, [], ["none", "none"])]
)
def test_commands_go_to_all_gpus_in_turn(monkeypatch, jobs, gpus, shared):
    """And to as many cores as there are for each."""
    busy, together, done, meet = [], [], [], threading.Barrier(jobs)
    monkeypatch.setattr(runner, "gpus", lambda: gpus)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def one(who):
        environment = runner.environment()
        assert environment["OMP_NUM_THREADS"] == str(6 // jobs) and environment["PATH"] == os.environ["PATH"]
        gpu = environment.get("CUDA_VISIBLE_DEVICES", "none")
        busy.append(gpu)
        meet.wait(HANGS)  # until all jobs are at work
        together.append(sorted(busy))
        meet.wait(HANGS)
        busy.remove(gpu)
        return {"gpu": gpu}

    runner.run_all([who(seed) for seed in range(3 * jobs)], one, done.append, jobs=jobs)
    assert sorted(run["seed"] for run in done) == list(range(3 * jobs))
    assert together == [shared] * 3 * jobs


def test_errors_are_kept_and_the_others_run():
    def one(who):
        if who["seed"] == 0:
            raise runner.RunError("fit failed")
        if who["seed"] == 1:
            raise ValueError("no memory left " + 300 * "x")
        return {"top1": 0.5}

    done = []
    runner.run_all([who(seed) for seed in range(3)], one, done.append)
    assert done[0] == {**who(0), "error": "fit failed"}
    assert done[1]["error"].startswith("ValueError: no memory left") and len(done[1]["error"]) < 210
    assert done[2]["top1"] == 0.5 and done[2]["run_seconds"] >= 0


def start(out, *planned, answer=lambda who: {"top1": 0.5, "cases": [1, 2]}, resume=False, **options):
    """Return the runs that `compare` returns, and those for which it called `one`."""
    started = []

    def one(who):
        started.append(who)
        return answer(who)

    runs = runner.compare(
        Namespace(out=out, resume=resume, **options),
        planned,
        one,
        table=lambda runs: f"{len(runs)} runs\n",
        report=lambda run: f"top1 {run['top1']}",
    )
    return runs, started


def test_results_are_written_after_every_run(tmp_path, capsys):
    out, states = tmp_path / "new" / "out", []

    def answer(who):
        states.append((len(json.loads((out / "runs.json").read_text())), (out / "table.md").read_text()[:6]))
        return {"top1": 0.5, "cases": [1, 2]}

    runs, _ = start(out, who(0), who(1), answer=answer)
    assert states == [(0, "0 runs"), (1, "1 runs")]
    assert json.loads((out / "runs.json").read_text()) == runs
    assert all(run["date"].startswith("20") and "commit" in run for run in runs)
    with open(out / "runs.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["row"], line["seed"], line["top1"]) for line in lines] == [("A", "0", "0.5"), ("A", "1", "0.5")]
    assert "cases" not in lines[0]
    printed = capsys.readouterr().out
    assert "[2/2] A, seed 1: top1 0.5" in printed and (out / "table.md").read_text() in printed


def test_resuming_keeps_good_runs_with_the_same_options(tmp_path, capsys):
    before = [{**who(0, "B"), "top1": 0.25, "options": {}}, {**who(1, "B"), "error": "x"}]
    (tmp_path / "runs.json").write_text(json.dumps(before))
    planned = [who(seed, row) for seed in (0, 1) for row in "AB"]
    runs, started = start(tmp_path, *planned, resume=True)
    assert started == [who(0), who(1), who(1, "B")] and "[4/4] " in capsys.readouterr().out
    assert [(run["row"], run["seed"], run["top1"]) for run in runs] == [
        ("B", 0, 0.25),
        ("A", 0, 0.5),
        ("A", 1, 0.5),
        ("B", 1, 0.5),
    ]
    assert start(tmp_path, *planned, resume=True) == (runs, [])
    runs, started = start(tmp_path, *planned, resume=True, config=tmp_path / "other.yaml")
    assert len(started) == 4 and runs[0]["options"] == {"config": str(tmp_path / "other.yaml")}
    assert len(start(tmp_path, *planned)[1]) == 4  # from the start


def test_the_commit(monkeypatch, tmp_path):
    commit = runner.commit()
    assert commit is None or len(commit.rstrip("+")) >= 7
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert runner.commit() is None
