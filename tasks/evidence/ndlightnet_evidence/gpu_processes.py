"""Jobs on several GPUs, each process with one, that may run out of memory."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist

from ndlightnet_evidence.tables import Run

LIMIT = 240  # seconds of a job; the first one compiles kernels


def launch(count: int, job: Callable[..., Run], **options: Any) -> Run:
    """Do job(**options) in so many processes, which are ended then. Return the result of the first
    process, or the "error" of the one that fails first."""
    spawn = get_context("spawn")  # CUDA does not survive a fork
    results = spawn.Queue()
    port = 29500 + os.getpid() % 1000
    workers = [spawn.Process(target=_work, args=(rank, count, port, results, job, options)) for rank in range(count)]
    for worker in workers:
        worker.start()
    end = time.monotonic() + LIMIT
    try:
        while time.monotonic() < end:
            try:
                run: Run = results.get(timeout=1)
                return run
            except queue.Empty:
                codes = [worker.exitcode for worker in workers]
                if any(codes):
                    return {"error": f"processes ended with {codes}"}
        return {"error": f"no answer within {LIMIT} s"}
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def _work(rank: int, count: int, port: int, results: Any, job: Callable[..., Run], options: Run) -> None:
    device = torch.device("cuda", rank) if torch.cuda.is_available() else None
    if device is not None:
        torch.cuda.set_device(device)
    if count > 1:
        backend, address = "nccl" if device else "gloo", f"tcp://127.0.0.1:{port}"
        dist.init_process_group(backend, address, rank=rank, world_size=count, device_id=device)
    try:
        run = job(**options)
    except Exception as error:  # the others wait for this process, and are ended
        results.put({"error": f"{type(error).__name__}: {error}".splitlines()[0][:100]})
        raise
    if rank == 0:
        results.put(run)
    if count > 1:
        time.sleep(LIMIT)  # ended by `launch`: a process that leaves early is an error of the others
