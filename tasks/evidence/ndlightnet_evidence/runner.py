"""Do the runs of a comparison, one after the other or several side by side, and store the results.

A run is a dict: what identifies it (`tables.IDENTITY`), then what was measured, or "error"; and its
date, commit and options.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import date
from pathlib import Path

import torch

from ndlightnet.data.errors import atomic_write
from ndlightnet_evidence import tables
from ndlightnet_evidence.tables import Run

# options that choose the runs, and do not change how one is done
CHOICES = ("rows", "tasks", "rates", "seeds", "jobs", "resume", "out", "file")
_job = threading.local()  # number of the job that this thread does, and how many there are


class RunError(Exception):
    """Raised if a run has no result; its message says why."""


def add_options(parser: ArgumentParser, out: str, seeds: Sequence[int] | None = (0, 1, 2)) -> None:
    """Add the options of all comparisons. seeds: the default seeds; None: no option --seeds."""
    if seeds:
        parser.add_argument("--seeds", nargs="+", type=int, default=seeds)
    parser.add_argument("--resume", action="store_true", help="do what is not under --out yet, with the same options")
    parser.add_argument("--out", type=Path, help=f"default: {out}")


def compare(
    o: Namespace,
    planned: Sequence[Run],
    one: Callable[[Run], Run],
    *,
    table: Callable[[list[Run]], str],
    report: Callable[[Run], str],
    draw: Callable[[list[Run]], None] = lambda runs: None,
    jobs: int = 1,
) -> list[Run]:
    """Do the `planned` runs by one(run), which returns what it measured or raises; return all runs.

    o: the options of `add_options`. After every run, runs.json holds all runs so far, runs.csv the
    numbers of those with a result, and table.md their `table`. At the end `draw` is called with the
    runs that have a result. jobs: as in `run_all`.
    """
    o.out.mkdir(parents=True, exist_ok=True)
    options = {key: value for key, value in vars(o).items() if key not in CHOICES}
    options = json.loads(json.dumps(options, default=str))
    file, origin = o.out / "runs.json", {"commit": commit(), "options": options}
    stored = json.loads(file.read_text()) if o.resume and file.exists() else []
    runs = [run for run in stored if tables.complete(run) and run.get("options") == options]
    done = [tables.identity(run) for run in runs]
    remaining = [run for run in planned if run not in done]
    total = len(runs) + len(remaining)

    def save() -> None:
        with atomic_write(file) as draft:
            draft.write_text(json.dumps(runs, indent=1) + "\n")
        write_csv(o.out / "runs.csv", [run for run in runs if tables.complete(run)])
        (o.out / "table.md").write_text(table(runs) + tables.notes(runs))

    def keep(run: Run) -> None:
        runs.append({**run, "date": date.today().isoformat(), **origin})
        save()
        print(f"[{len(runs)}/{total}] {tables.name(run)}: {run.get('error') or report(run)}", flush=True)

    save()
    run_all(remaining, one, keep, jobs=jobs)
    if complete := [run for run in runs if tables.complete(run)]:
        draw(complete)
    print((o.out / "table.md").read_text())
    return runs


def run_all(planned: Sequence[Run], one: Callable[[Run], Run], done: Callable[[Run], None], *, jobs: int = 1) -> None:
    """Do the `planned` runs by `one`, and call `done` with each run as it ends. Several jobs are
    threads, in which `one` only starts commands."""
    if jobs == 1:
        for run in planned:
            done(_start(one, run))
        return
    numbers = iter(range(jobs))
    with ThreadPoolExecutor(jobs, initializer=lambda: _begin(next(numbers), jobs)) as pool:
        futures = [pool.submit(_start, one, run) for run in planned]
        try:
            for future in as_completed(futures):
                done(future.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _begin(number: int, jobs: int) -> None:
    _job.number, _job.count = number, jobs


def _start(one: Callable[[Run], Run], run: Run) -> Run:
    begin = time.monotonic()
    try:
        result = one(run)
    except Exception as error:  # a run that fails does not end the others
        short = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"[:200]
        return {**run, "error": short}
    return {**run, "run_seconds": time.monotonic() - begin, **result}


def gpus() -> list[str]:
    """Return the GPUs that may be used, as CUDA_VISIBLE_DEVICES names them."""
    count, names = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return names.split(",")[:count] if names else [str(i) for i in range(count)]


def environment() -> dict[str, str]:
    """Return the environment of a command of `one`: its share of the cores, one GPU if any."""
    threads = max(1, (os.cpu_count() or 1) // getattr(_job, "count", 1))
    share, cards = {"OMP_NUM_THREADS": str(threads)}, gpus()
    if cards:
        share["CUDA_VISIBLE_DEVICES"] = cards[getattr(_job, "number", 0) % len(cards)]
    return {**os.environ, **share}


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


def write_csv(path: Path, lines: Sequence[Run]) -> None:
    """Write the numbers and texts of `lines`; nested values are left out."""
    plain = [
        {key: value for key, value in line.items() if not isinstance(value, dict | list | tuple)} for line in lines
    ]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for line in plain for key in line)))
        writer.writeheader()
        writer.writerows(plain)
