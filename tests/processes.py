"""Tests on several processes (torch.distributed with gloo): they start and end together."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

ROOT = Path(__file__).parents[1]
# that processes may take; the longest session, of tests/parallel, takes 38 on two cores, 56 beside two other runs
SECONDS = 400


class StallError(Exception):
    """Processes have neither failed nor ended in time."""


def run(module: str, folder: Path, count: int, *arguments: str, failures: int = 0) -> list[Any]:
    """Run `python -m module FOLDER RANK COUNT arguments` for each rank; return the JSON that each
    has written to FOLDER. failures: how many of them are expected to fail; when more do, the others
    are ended, as they would only wait for those."""
    folder.mkdir(parents=True)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    processes = []
    for rank in range(count):
        command = [sys.executable, "-m", module, str(folder), str(rank), str(count), *arguments]
        processes.append(subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True))
    name = " ".join([module, *arguments])
    end = time.monotonic() + SECONDS
    codes: list[int | None] = [None]
    try:
        while None in codes and sum(bool(code) for code in codes) <= failures:
            if time.monotonic() > end:
                for process in processes:
                    signal_all(process, signal.SIGABRT)  # prints where their threads are
                    time.sleep(1)  # and the next one after it
                raise StallError(f"{name}: exit codes {codes} after {SECONDS} s")
            time.sleep(0.05)
            codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            signal_all(process, signal.SIGKILL)
            process.wait()
    assert sum(bool(code) for code in codes) == failures, f"{name}: exit codes {codes}"
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


def signal_all(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a process, which leads a session of its own, and to all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def run_once(module: str, tmp_path: Path, count: int, *arguments: str) -> list[Any]:
    """Return what `run` returns; all tests of one run of pytest share the processes, also those of
    other workers. Processes that stall are run once more, with a warning: gloo's did once, on two
    busy cores, and nobody knows why. A failure is final."""
    session = tmp_path.parent  # with pytest-xdist the session's folder has one for each worker
    session = session.parent if session.name.startswith("popen-") else session
    name = "_".join([module, str(count), *arguments])
    file = session / f"{name}.json"
    with FileLock(f"{file}.lock"):
        if not file.exists():
            file.write_text("null")  # unless this ends well
            try:
                results = run(module, session / name, count, *arguments)
            except StallError as stall:
                warnings.warn(f"run once more: {stall}", stacklevel=2)
                results = run(module, session / f"{name}_again", count, *arguments)
            file.write_text(json.dumps(results))
    results = json.loads(file.read_text())
    assert results is not None, f"the processes of {name} failed in another test"
    return results
