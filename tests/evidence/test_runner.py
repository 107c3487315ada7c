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


def spec(seed: int, row: str = "A") -> dict[str, object]:
    return {"row": row, "seed": seed}


@pytest.mark.parametrize(
    "count, named, expected",
    [(0, None, []), (0, "", []), (2, None, ["0", "1"]), (2, "5,GPU-7", ["5", "GPU-7"]), (1, "3,-1", ["3"])],
)
def test_the_gpus_that_may_be_used(monkeypatch, count, named, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(os, "environ", {} if named is None else {"CUDA_VISIBLE_DEVICES": named})
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

    def one(run):
        environment = runner.environment()
        assert environment["OMP_NUM_THREADS"] == str(6 // jobs) and environment["PATH"] == os.environ["PATH"]
        gpu = environment.get("CUDA_VISIBLE_DEVICES", "none")
        busy.append(gpu)
        meet.wait(HANGS)  # until all jobs are at work
        together.append(sorted(busy))
        meet.wait(HANGS)
        busy.remove(gpu)
        return {"gpu": gpu}

    runner.run_all([spec(seed) for seed in range(3 * jobs)], one, done.append, jobs=jobs)
    assert sorted(run["seed"] for run in done) == list(range(3 * jobs))
    assert together == [shared] * 3 * jobs


@pytest.fixture
def compare(tmp_path):
    """compare(specs, one) -> the runs, and the specs that were not taken from the disk."""

    def compare(specs, one=lambda run: {"top1": 0.5, "cases": [1, 2]}, resume=True, **options):
        started = []
        runs = runner.compare(
            Namespace(out=tmp_path / "new" / "out", resume=resume, **options),
            specs,
            lambda run: started.append(run) or one(run),
            table=lambda runs: f"{len(runs)} runs\n",
            report=lambda run: f"top1 {run['top1']}",
        )
        return runs, started

    return compare


def test_results_and_errors_are_written_after_every_run(compare, tmp_path, capsys):
    out, states = tmp_path / "new" / "out", []

    def one(run):
        states.append((len(json.loads((out / "runs.json").read_text())), (out / "table.md").read_text()[:6]))
        if run["seed"] == 1:
            raise runner.RunError("fit failed")
        if run["seed"] == 2:
            raise ValueError("no memory left " + 300 * "x")
        return {"top1": 0.5, "cases": [1, 2]}

    runs, _ = compare([spec(seed) for seed in range(4)], one)
    assert states == [(n, f"{n} runs") for n in range(4)] and json.loads((out / "runs.json").read_text()) == runs
    assert [run.get("top1") for run in runs] == [0.5, None, None, 0.5] and runs[0]["run_seconds"] >= 0
    assert runs[1]["error"] == "fit failed"
    assert runs[2]["error"].startswith("ValueError: no memory left") and len(runs[2]["error"]) < 210
    assert all(run["date"].startswith("20") and "commit" in run for run in runs)
    with open(out / "runs.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["row"], line["seed"], line["top1"]) for line in lines] == [("A", "0", "0.5"), ("A", "3", "0.5")]
    printed = capsys.readouterr().out
    assert "cases" not in lines[0] and "[4/4] A, seed 3: top1 0.5" in printed and "Failed: A, seed 1" in printed


def test_resuming_keeps_good_runs_with_the_same_options(compare):
    def fail(run):
        raise ValueError

    compare([spec(0, "B")], config="c.yaml")
    compare([spec(1, "B")], fail, config="c.yaml")
    planned = [spec(seed, row) for seed in (0, 1) for row in "AB"]
    runs, started = compare(planned, config="c.yaml")
    assert started == [spec(0), spec(1), spec(1, "B")] and (runs[0]["row"], runs[0]["seed"]) == ("B", 0)
    assert compare(planned, config="c.yaml") == (runs, [])
    runs, started = compare(planned, config="other.yaml")
    assert len(started) == 4 and runs[0]["options"] == {"config": "other.yaml"}
    assert len(compare(planned, config="other.yaml", resume=False)[1]) == 4  # from the start


def test_the_commit(monkeypatch, tmp_path):
    commit = runner.commit()
    assert commit is None or len(commit.rstrip("+")) >= 7
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert runner.commit() is None
