"""A job of several processes, which imports little, as each of them does."""

import atexit
import os
import sys
import time

import torch.distributed as dist


def job(n: int, end: str) -> dict[str, int]:
    # one write: print's two could have another process's between them
    atexit.register(lambda: sys.stderr.write("group\n" if dist.is_initialized() else "no group\n"))
    if end == "dies":
        os._exit(3)
    if end == "fails" and dist.get_rank() == 1:
        raise MemoryError("no memory left")
    if end == "fails":
        time.sleep(600)  # until it is ended
    return {"n": 2 * n, "world": dist.get_world_size()}
