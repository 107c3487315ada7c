"""Time of a call on a GPU, and memory of the GPU and its host in bytes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def seconds(call: Callable[[], Any]) -> float:
    """Return how long a call takes, with what the card does for it."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def peak(action: Callable[[], Any]) -> tuple[float, int]:
    """Return the seconds of the second call, and the most memory of the GPU in both."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    action()
    return seconds(action), torch.cuda.max_memory_allocated()


def process_peak() -> int:
    """Return the most memory of this process, with what is pinned."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
