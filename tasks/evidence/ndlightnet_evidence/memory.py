"""Memory of a GPU and of its host."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def of_device() -> int:
    return torch.cuda.get_device_properties(0).total_memory


def peak(action: Callable[[], Any]) -> tuple[float, int]:
    """Return seconds of the second call, and bytes of the GPU at most in both."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    action()
    torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cuda.max_memory_allocated()


def kept(step: Callable[..., Callable[[], None]], net: nn.Module, tokens: int) -> list[int]:
    """Return the bytes of each tensor that a step on so many tokens keeps for its backward. step:
    makes one, of a network, tokens, and a context of its forward."""
    sizes: list[int] = []

    def count(x: Tensor) -> Tensor:
        sizes.append(x.numel() * x.element_size())
        return x

    step(net, tokens, torch.autograd.graph.saved_tensors_hooks(count, lambda x: x))()
    return sizes


def pinned(sizes: Sequence[int], times: float) -> int:
    """Return the pinned memory that tensors of so many times these bytes take: powers of two."""
    return sum(2 ** math.ceil(math.log2(max(1, n * times))) for n in sizes)


def of_process() -> int:
    """Return the largest memory of this process so far, with what is pinned."""
    return _line("/proc/self/status", "VmHWM")


def pinned_peak() -> float:
    """Return the most that torch has pinned so far."""
    return torch.cuda.host_memory_stats().get("allocated_bytes.peak", math.nan)


def free() -> int:
    return _line("/proc/meminfo", "MemAvailable")


def _line(file: str, name: str) -> int:
    """Return the bytes that a line tells in kB."""
    lines = Path(file).read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])
