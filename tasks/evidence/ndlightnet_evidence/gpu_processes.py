"""Jobs on several GPUs, each process with one, that may run out of memory."""

from __future__ import annotations

import gc
import queue
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist

from ndlightnet_evidence.tables import Run

LIMIT = 240  # seconds of a job; the first one compiles kernels
END = 20  # seconds in which processes that are done end
Store = dist.TCPStore  # type: ignore[attr-defined]


def launch(count: int, job: Callable[..., Run], **options: Any) -> Run:
    """Do job(**options) in so many processes. Return the result of the first process, or the "error" of the one that
    fails first; the others, which may wait for it, are ended then."""
    spawn = get_context("spawn")  # CUDA does not survive a fork
    results = spawn.Queue()
    # here, not in a worker: the others would report its loss
    store = Store("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = count, store.port, results, job, options
    workers = [spawn.Process(target=_work, args=(rank, *shared)) for rank in range(count)]
    for worker in workers:
        worker.start()
    end = time.monotonic() + LIMIT
    try:
        while time.monotonic() < end:
            try:
                run: Run = results.get(timeout=1)
                end = time.monotonic() + END
                while "error" not in run and time.monotonic() < end and any(w.is_alive() for w in workers):
                    time.sleep(0.1)
                return run
            except queue.Empty:
                codes = [worker.exitcode for worker in workers]
                if any(codes):
                    return {"error": f"processes ended with {codes}"}
        return {"error": f"no answer within {LIMIT} s"}
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join()


def _work(rank: int, count: int, port: int, results: Any, job: Callable[..., Run], options: Run) -> None:
    device = torch.device("cuda", rank) if torch.cuda.is_available() else None
    if device is not None:
        torch.cuda.set_device(device)
    if count > 1:
        store = Store("127.0.0.1", port)
        backend = "nccl" if device else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=count, store=store, device_id=device)
    try:
        run = job(**options)
        if count > 1:
            gc.collect()  # a group waits for the CUDA graphs that hold its collectives
            dist.barrier()
    except Exception as error:
        traceback.print_exc()
        results.put({"error": f"{type(error).__name__}: {error}".splitlines()[0][:100]})
        time.sleep(LIMIT)  # until `launch` ends all: leaving now would be an error of those that wait
    else:
        if rank == 0:
            results.put(run)
        if count > 1:
            dist.destroy_process_group()
