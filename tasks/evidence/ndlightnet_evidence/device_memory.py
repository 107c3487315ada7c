"""Memory of a GPU and of its host, in bytes."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def total() -> int:
    return torch.cuda.get_device_properties(0).total_memory


def peak(action: Callable[[], Any]) -> tuple[float, int]:
    """Return the seconds of the second call, and the most memory of the GPU in both."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    action()
    torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cuda.max_memory_allocated()


def saved_bytes(make: Callable[..., Callable[[], None]], net: nn.Module, tokens: int) -> list[int]:
    """Return the size of each tensor that a step on so many tokens saves for its backward. make:
    returns a step of a network, a number of tokens, and a context of the forward."""
    sizes: list[int] = []

    def count(x: Tensor) -> Tensor:
        sizes.append(x.nbytes)
        return x

    make(net, tokens, torch.autograd.graph.saved_tensors_hooks(count, lambda x: x))()
    return sizes


def pinned(sizes: Sequence[int], factor: float) -> int:
    """Return the pinned memory of tensors of `factor` times these sizes: powers of two."""
    return sum(2 ** math.ceil(math.log2(max(1, size * factor))) for size in sizes)


def pinned_peak() -> float:
    """Return the most that torch has pinned."""
    return torch.cuda.host_memory_stats().get("allocated_bytes.peak", math.nan)


def process_peak() -> int:
    """Return the most memory of this process, with what is pinned."""
    return _line("/proc/self/status", "VmHWM")


def free_host() -> int:
    return _line("/proc/meminfo", "MemAvailable")


def _line(file: str, name: str) -> int:
    """Return the number of a line in kB as bytes."""
    lines = Path(file).read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])
