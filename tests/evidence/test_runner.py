"""The runner, with runs that take no time: side by side, over GPUs, resumed, out of time."""

import csv
import itertools
import json
import os
import threading
import time
from argparse import ArgumentParser, Namespace
from functools import partial

import pytest
import torch

from ndlightnet_evidence import runner, tables

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
    "jobs, gpus, shared",
    [
        (1, ["0", "1"], ["0"]),
        (2, ["4", "5"], ["4", "5"]),
        (4, ["4", "5"], ["4", "4", "5", "5"]),
        (3, ["0", "1"], ["0", "0", "1"]),
        (2, [], ["none", "none"]),
    ],
)
def test_commands_go_to_all_gpus_in_turn(monkeypatch, jobs, gpus, shared):
    """And to as many cores as there are for each."""
    busy, together, done, meet = [], [], [], threading.Barrier(jobs)
    monkeypatch.setattr(runner, "gpus", lambda: gpus)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def one(who):
        own = runner.environment()
        assert own["OMP_NUM_THREADS"] == str(6 // jobs) and own["PATH"] == os.environ["PATH"]
        gpu = own.get("CUDA_VISIBLE_DEVICES", "none")
        busy.append(gpu)
        meet.wait(HANGS)  # until all jobs are at work
        together.append(sorted(busy))
        meet.wait(HANGS)
        busy.remove(gpu)
        return {"gpu": gpu}

    wanted = [who(seed) for seed in range(3 * jobs)]
    runner.run_all(wanted, one, done.append, jobs=jobs, processes=False)
    assert sorted(run["seed"] for run in done) == list(range(3 * jobs))
    assert together == [shared] * 3 * jobs


def test_no_run_begins_when_the_minutes_are_over(monkeypatch):
    now, done = itertools.count(), []
    monkeypatch.setattr(runner.time, "monotonic", lambda: 30.0 * next(now))
    # asked at 0.5 and 1.5 minutes; each run looks at the clock when it begins and when it ends
    runner.run_all([who(s) for s in range(4)], lambda who: {}, done.append, minutes=2, processes=False)
    assert [run["seed"] for run in done if "run_seconds" in run] == [0, 1]
    assert done[2:] == [{**who(seed), "missing": True} for seed in (2, 3)]


def test_errors_are_told_and_the_others_run():
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
    assert done[2]["top1"] == 0.5 and done[2]["device"] == runner.device_name()


def test_an_interrupt_starts_nothing_more():
    begun = []

    def one(who):
        begun.append(who["seed"])
        time.sleep(0.05)
        return {}

    def done(run):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run_all([who(seed) for seed in range(20)], one, done, jobs=2, processes=False)
    assert len(begun) < 10


@pytest.mark.slow
def test_jobs_that_are_processes(tmp_path, monkeypatch):
    """Two of them, each with its part of the runs; one that dies is told and ends nothing else."""
    (tmp_path / "doing.py").write_text(
        "import os, time, torch\n"
        "def one(who):\n"
        "    time.sleep(1.0 if who['row'] == 'dies' else 0.2)\n"
        "    if who['row'] == 'dies':\n"
        "        os._exit(3)\n"
        "    return {'process': os.getpid(), 'threads': torch.get_num_threads()}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from doing import one

    done = []
    wanted = [*(who(seed) for seed in range(8)), who(8, "dies")]
    runner.run_all(wanted, one, done.append, jobs=2)
    *good, died = done
    assert len({run["process"] for run in good} - {os.getpid()}) == 2 and len(good) == 8
    assert {run["threads"] for run in good} == {max(1, os.cpu_count() // 2)}
    assert died["row"] == "dies" and died["error"].startswith("BrokenProcessPool")


def options(out, *arguments: str) -> Namespace:
    parser = ArgumentParser()
    runner.add_options(parser, "runs")
    return parser.parse_args(["--out", str(out), *arguments])


def start(o, *wanted, answer=lambda who: {"top1": 0.5}, **more):
    """The runs that `compare` makes, and of whom it asked one."""
    asked = []

    def one(who):
        asked.append(who)
        return answer(who)

    table = more.pop("table", lambda runs: f"{len(runs)} runs\n")
    runs = runner.compare(
        o,
        wanted,
        one,
        table=table,
        say=lambda run: f"top1 {run['top1']}",
        do=partial(runner.run_all, processes=False),
        **more,
    )
    return runs, asked


def test_results_are_written_after_every_run(tmp_path, capsys):
    out, seen = tmp_path / "new" / "out", []

    def answer(who):
        seen.append((len(json.loads((out / "runs.json").read_text())), (out / "table.md").read_text()[:6]))
        return {"top1": 0.5, "cases": [1, 2]}

    runs, _ = start(options(out), who(0), who(1), who(2), answer=answer)
    assert seen == [(0, "0 runs"), (1, "1 runs"), (2, "2 runs")]
    assert json.loads((out / "runs.json").read_text()) == runs
    assert all(run["date"].startswith("20") and "commit" in run for run in runs)
    with open(out / "runs.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["row"], line["seed"], line["top1"]) for line in lines] == [
        ("A", "0", "0.5"),
        ("A", "1", "0.5"),
        ("A", "2", "0.5"),
    ]
    assert "cases" not in lines[0]
    printed = capsys.readouterr().out
    assert "[3/3] A, seed 2: top1 0.5" in printed and (out / "table.md").read_text() in printed


def test_resuming(tmp_path, capsys):
    """Good runs are kept, failed and missing ones are done."""
    before = [{**who(0, "B"), "top1": 0.25, "options": {}}, {**who(1, "B"), "error": "x"}, {**who(0), "missing": True}]
    (tmp_path / "runs.json").write_text(json.dumps(before))
    wanted = [who(seed, row) for seed in (0, 1) for row in "AB"]
    runs, asked = start(options(tmp_path, "--resume"), *wanted)
    assert asked == [who(0), who(1), who(1, "B")] and "[4/4] " in capsys.readouterr().out
    assert [(run["row"], run["seed"], run["top1"]) for run in runs] == [
        ("B", 0, 0.25),
        ("A", 0, 0.5),
        ("A", 1, 0.5),
        ("B", 1, 0.5),
    ]
    assert start(options(tmp_path, "--resume"), *wanted) == (runs, [])
    other = options(tmp_path, "--resume")
    other.config = tmp_path / "other.yaml"
    runs, asked = start(other, *wanted)
    assert len(asked) == 4 and runs[0]["options"] == {"config": str(other.config)}
    assert start(other, *wanted) == (runs, [])
    assert len(start(options(tmp_path), *wanted)[1]) == 4  # from the start


def test_what_failed_or_was_not_run_is_said(tmp_path, capsys):
    def answer(who):
        raise runner.RunError("boom")

    runs, asked = start(options(tmp_path, "--minutes", "0"), who(4))
    assert asked == [] and "[1/1] A, seed 4: no time was left" in capsys.readouterr().out
    runs, _ = start(options(tmp_path), who(4), answer=answer, draw=lambda runs: 1 / 0)
    assert runs[0]["error"] == "boom" and "[1/1] A, seed 4: boom" in capsys.readouterr().out
    assert (tmp_path / "table.md").read_text().endswith("\nFailed: A, seed 4 (boom).\n")


def test_curves_are_lines_and_words():
    curve = {"x_label": "pairs", "x": [2, 4], "accuracy": [1.0, 0.5], "guess": [0.1, 0.2]}
    run = {**who(3), "lr": 0.1, "loss": 0.25, "run_seconds": 2.0, "curves": {"recall": curve}}
    common = {**who(3), "lr": 0.1, "panel": "recall"}
    assert list(runner.curve_lines(run)) == [
        {**common, "x": 2, "accuracy": 1.0, "guess": 0.1},
        {**common, "x": 4, "accuracy": 0.5, "guess": 0.2},
    ]
    assert runner.say_curves(run) == "loss 0.250, 2 s\n  recall, by pairs: 1.00 0.50"


def test_the_commit(monkeypatch, tmp_path):
    found = runner.commit()
    assert found is None or len(found.rstrip("+")) >= 7
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert runner.commit() is None
    assert tables.notes([{**who(0), "date": "2026-01-01", "commit": None}]) == "\n2026-01-01.\n"
