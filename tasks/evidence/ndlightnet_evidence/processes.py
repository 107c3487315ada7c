"""Jobs on several GPUs, each process with one, that may run out of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Run = dict[str, Any]
LIMIT = 240  # seconds of a job; the first one compiles kernels


def launch(script: str, count: int, options: Run) -> Run:
    """Run `script --process OPTIONS FILE` in so many processes. Return what the first one answers,
    or the "error" of the first that fails; then all are ended."""
    port = str(29500 + os.getpid() % 1000)
    processes, files = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(count):
            env = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            files.append(Path(folder) / f"{rank}.json")
            command = [sys.executable, script, "--process", json.dumps(options), str(files[-1])]
            processes.append(subprocess.Popen(command, env=env))
        end, found = time.monotonic() + LIMIT, {"error": f"no answer within {LIMIT} s"}
        while time.monotonic() < end:
            answers = [json.loads(file.read_text()) for file in files if file.exists()]
            failed = [answer for answer in answers if "error" in answer]
            codes = [process.poll() for process in processes]
            if failed or files[0].exists():
                found = failed[0] if failed else json.loads(files[0].read_text())
                break
            if any(code not in (None, 0) for code in codes):
                found = {"error": f"processes ended with {codes}"}
                break
            time.sleep(0.3)
        for process in processes:
            process.kill()
            process.wait()
        return found


def answer(jobs: Mapping[str, Callable[..., Run]], options: str, file: Path) -> None:
    """Do one of the jobs in a process that `launch` started."""
    given = json.loads(options)
    rank, several = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) > 1
    torch.cuda.set_device(rank)
    if several:
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    try:
        found = jobs[given.pop("job")](**given)
    except torch.OutOfMemoryError as error:
        found = {"error": str(error).splitlines()[0][:60]}
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(found))
    if rank == 0 or "error" in found:
        draft.rename(file)
    time.sleep(LIMIT if several else 0)  # ended by the process that started it
