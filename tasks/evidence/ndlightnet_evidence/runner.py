"""Do the runs of a comparison, one after the other or several side by side, and store the results.

A run is a dict: what identifies it ("row", "seed" and the like, `tables.IDENTITY`), then what was
measured, or "error", or "missing" if no time was left; and its date, commit and options.
"""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from datetime import date
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ndlightnet.data.errors import atomic_write
from ndlightnet_evidence import tables

Run = dict[str, Any]
# options that choose the runs, and do not change how one is done
CHOICES = (
    "rows",
    "family",
    "tasks",
    "nets",
    "sides",
    "largest",
    "lr",
    "seeds",
    "jobs",
    "minutes",
    "resume",
    "out",
    "file",
)
_worker = threading.local()  # number of the job that this thread or process does


class RunError(Exception):
    """Raised if a run has no result; its message says why."""


def add_options(parser: ArgumentParser, out: str, seeds: Sequence[int] | None = (0, 1, 2)) -> None:
    """Add the options of all comparisons. seeds: the default seeds; None: no option --seeds."""
    if seeds:
        parser.add_argument("--seeds", nargs="+", type=int, default=seeds)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, over all GPUs in turn")
    parser.add_argument("--minutes", type=float, default=math.inf, help="then no run is begun")
    parser.add_argument("--resume", action="store_true", help="do what is not under --out yet, with the same options")
    parser.add_argument("--out", type=Path, help=f"default: {out}")


def compare(
    o: Namespace,
    wanted: Sequence[Run],
    one: Callable[[Run], Any],
    *,
    table: Callable[[list[Run]], str],
    say: Callable[[Run], str],
    draw: Callable[[list[Run]], None] = lambda runs: None,
    lines: Callable[[Run], Iterable[Run]] = lambda run: [run],
    do: Callable[..., None] | None = None,
) -> list[Run]:
    """Do the `wanted` runs by one(who), which returns what it measured or raises; return all runs.

    o: the options of `add_options`. After every run, runs.json holds all runs so far, runs.csv
    their `lines`, and table.md their `table`. At the end `draw` is called with the runs that have a
    result. do: `run_all`, which is the default, or another function that does the runs.
    """
    o.out.mkdir(parents=True, exist_ok=True)
    options = {key: value for key, value in vars(o).items() if key not in CHOICES}
    options = json.loads(json.dumps(options, default=str))
    file, at = o.out / "runs.json", {"commit": commit(), "options": options}
    known = json.loads(file.read_text()) if o.resume and file.exists() else []
    runs = [run for run in known if tables.complete(run) and run.get("options") == options]
    done = [tables.identity(run) for run in runs]
    left = [who for who in wanted if who not in done]
    total = len(runs) + len(left)

    def save() -> None:
        with atomic_write(file) as draft:
            draft.write_text(json.dumps(runs, indent=1) + "\n")
        good = [run for run in runs if tables.complete(run)]
        write_csv(o.out / "runs.csv", [line for run in good for line in lines(run)])
        (o.out / "table.md").write_text(table(runs) + tables.notes(runs))

    def keep(run: Run) -> None:
        runs.append({**run, "date": date.today().isoformat(), **at})
        save()
        said = "no time was left" if "missing" in run else run.get("error") or say(run)
        print(f"[{len(runs)}/{total}] {tables.name(run)}: {said}", flush=True)

    save()
    (do or run_all)(left, one, keep, jobs=o.jobs, minutes=o.minutes)
    if good := [run for run in runs if tables.complete(run)]:
        draw(good)
    print((o.out / "table.md").read_text())
    return runs


def run_all(
    wanted: Sequence[Run],
    one: Callable[[Run], Run],
    done: Callable[[Run], None],
    *,
    jobs: int = 1,
    minutes: float = math.inf,
    processes: bool = True,
) -> None:
    """Do the `wanted` runs by `one`, and call `done` with each run as it ends.

    processes: `one` does the work itself, and jobs side by side are processes to which it is
    pickled; else `one` starts commands, and jobs are threads.
    """
    start = partial(_start, one, time.monotonic() + 60 * minutes, processes)
    if jobs == 1:
        for who in wanted:
            done(start(who))
        return
    spawn = get_context("spawn")  # CUDA and threads do not survive a fork
    numbers = spawn.SimpleQueue()
    for job in range(jobs):
        numbers.put(job)
    kind: Any = partial(ProcessPoolExecutor, mp_context=spawn) if processes else ThreadPoolExecutor
    with kind(jobs, initializer=_begin, initargs=(numbers, jobs, processes)) as pool:
        found = {pool.submit(start, who): who for who in wanted}
        try:
            for future in as_completed(found):
                try:
                    done(future.result())
                except BrokenExecutor as error:  # a process was killed
                    done({**found[future], "error": f"{type(error).__name__}: {error}"})
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _begin(numbers: Any, jobs: int, process: bool) -> None:
    _worker.number, _worker.jobs = numbers.get(), jobs
    if process:
        torch.set_num_threads(_threads())
        if cards := torch.cuda.device_count():
            torch.cuda.set_device(_worker.number % cards)


def _start(one: Callable[[Run], Run], over: float, here: bool, who: Run) -> Run:
    begun = time.monotonic()
    if begun >= over:
        return {**who, "missing": True}
    try:
        found = one(who)
    except Exception as error:  # a run that fails does not end the others
        return {**who, **failure(error)}
    where = {"device": device_name()} if here else {}  # else this process does not use CUDA
    return {**who, "run_seconds": time.monotonic() - begun, **found, **where}


def failure(error: Exception) -> Run:
    """Return what a run that raised `error` holds."""
    short = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"[:200]
    return {"error": short}


def _threads() -> int:
    return max(1, (os.cpu_count() or 1) // getattr(_worker, "jobs", 1))


def gpus() -> list[str]:
    """Return the GPUs that may be used, as CUDA_VISIBLE_DEVICES names them."""
    count, named = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(i) for i in range(count)]


def environment() -> dict[str, str]:
    """Return the environment of a command of `one`: its share of the cores, one GPU if any."""
    own, found = {"OMP_NUM_THREADS": str(_threads())}, gpus()
    if found:
        own["CUDA_VISIBLE_DEVICES"] = found[getattr(_worker, "number", 0) % len(found)]
    return {**os.environ, **own}


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def commit() -> str | None:
    """Return this repository's commit, with a + if its files were changed; None without git."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        hash_, changes = (
            subprocess.run([*git, *command], capture_output=True, text=True, check=True).stdout
            for command in (["rev-parse", "--short", "HEAD"], ["status", "-s", "-uno"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return hash_.strip() + ("+" if changes.strip() else "")


def say_curves(run: Run) -> str:
    """Return the results of a run with "curves", in a few lines."""
    said = f"loss {run['loss']:.3f}, {run['run_seconds']:.0f} s"
    for panel, curve in run["curves"].items():
        right = " ".join(f"{value:.2f}" for value in curve["accuracy"])
        said += f"\n  {panel}, by {curve['x_label']}: {right}"
    return said


def curve_lines(run: Run) -> Iterable[Run]:
    """Yield a line of CSV for each point of a run's "curves"."""
    for panel, curve in run["curves"].items():
        numbers = {key: values for key, values in curve.items() if key != "x_label"}
        for values in zip(*numbers.values(), strict=True):
            yield {**tables.identity(run), "panel": panel, **dict(zip(numbers, values, strict=True))}


def write_csv(path: Path, lines: Sequence[Run]) -> None:
    """Write the numbers and texts of `lines`; nested values are left out."""
    plain = [
        {key: value for key, value in line.items() if not isinstance(value, dict | list | tuple)} for line in lines
    ]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for line in plain for key in line)))
        writer.writeheader()
        writer.writerows(plain)
