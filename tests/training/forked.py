"""Functions in processes of their own, forked from one that has imported torch, Lightning and MONAI."""

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

SECONDS = 300  # that processes may take
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["lightning.pytorch.cli", "monai.transforms", "matplotlib.pyplot", "torch.utils.tensorboard", "ndlightnet.training"]
)


def _main(log: Path, environment: dict[str, str], function: Callable[..., int | None], arguments: tuple) -> None:
    with open(log, "a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ |= environment
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of loaders, as in any process
    sys.exit(function(*arguments))


def run_forked(log: Path, function: Callable[..., int | None], *arguments: object, count: int = 1) -> list[int]:
    """The exit statuses of `count` processes that call `function`, several with the variables that torchrun sets. What
    they print goes to `log`."""
    processes = []
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    for rank in range(count):
        names = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "tests"}
        environment = {name: str(value) for name, value in names.items()} if count > 1 else {}
        processes.append(PROCESSES.Process(target=_main, args=(log, environment, function, arguments)))
        processes[-1].start()
    end = time.monotonic() + SECONDS
    while any(process.is_alive() for process in processes) and time.monotonic() < end:
        if any(process.exitcode for process in processes):
            break  # the others would wait for it
        time.sleep(0.05)
    for process in processes:
        process.kill()
        process.join()
    print(log.read_text()[-3000:])  # pytest shows it where a test fails
    return [process.exitcode for process in processes]
