"""Times of calls: CUDA graphs between events, or the clock for a CPU."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Call = Callable[[], Any]
SLOW = 0.2  # seconds of a call from which on launches cost little, and a graph much memory
LEFT_OUT = "left out"  # mode of what is too slow or too large
LAP = 0.01  # seconds between two events, at least; of a CPU's calls ten times as many


class Timing(NamedTuple):
    """Time of a call. ms: median, on a CPU the least, None if it has no time. mode: "graph", "eager" or LEFT_OUT."""

    ms: float | None
    mode: str
    note: str = ""


class Absent(Exception):
    """Raised with the reason why something is not timed."""


def reason(error: BaseException) -> str:
    """Return what went wrong, in one line."""
    lines = str(error).strip().splitlines() or [""]
    name = "" if isinstance(error, Absent) else f"{type(error).__name__}: "
    return f"{name}{lines[0]}"[:200]


def time_calls(calls: Sequence[Call], device: torch.device, graph: bool = True, laps: int = 7) -> Timing:
    """Return the median time of one call. The calls do the same work on different data in turn, so
    that none finds its data in the cache. graph: whether to try to replay them from a graph."""
    return _on_cuda(calls, graph, laps) if device.type == "cuda" else _on_cpu(calls, laps)


def _on_cuda(calls: Sequence[Call], graph: bool, laps: int) -> Timing:
    stream = torch.cuda.Stream()  # graphs cannot be captured on the default one
    stream.wait_stream(torch.cuda.current_stream())
    mode, note = "eager", ""

    def in_turn() -> None:
        for call in calls:
            call()

    with torch.cuda.stream(stream):
        calls[0]()  # compiles and tunes
        work: Call = in_turn
        if _lap(calls[0], 1) < SLOW:
            in_turn()
            if graph:
                try:
                    work, mode = _capture(calls, stream), "graph"
                except Exception as error:
                    torch.cuda.synchronize()
                    # ending a broken capture raises once more
                    note = f"not captured ({reason(error.__context__ or error)})"
        seconds = _lap(work, 1)
        times = min(1000, int(LAP / seconds) + 1)
        if seconds < 2 * SLOW:
            _lap(work, times)  # the clocks of an idle card rise first
            laps = laps if seconds < LAP else min(laps, 3)
            seconds = statistics.median(_lap(work, times) for _ in range(laps))
    torch.cuda.synchronize()
    return Timing(1e3 * seconds / len(calls), mode, note)


def _capture(calls: Sequence[Call], stream: torch.cuda.Stream) -> Call:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        # held until the end: outputs written repeatedly to one address would stay in the cache
        held = [call() for call in calls]
    del held
    return graph.replay


def _lap(work: Call, times: int) -> float:
    """Return the mean seconds of one of `times` runs, on the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / times


def _on_cpu(calls: Sequence[Call], laps: int) -> Timing:
    least, done, begun = math.inf, 0, time.perf_counter()
    while done <= laps or time.perf_counter() - begun < 10 * LAP:
        for call in calls:
            start = time.perf_counter()
            call()
            least, done = min(least, time.perf_counter() - start), done + 1
        if time.perf_counter() - begun > 2:  # slow: its first run is as good as any
            break
    return Timing(1e3 * least, "eager")  # others may use the cores


def forward_call(run: Callable[..., Any], inputs: Sequence[Tensor]) -> Call:
    """Return a call of the forward pass as in inference: nothing is saved for a backward pass."""

    def call() -> Any:
        with torch.no_grad():
            return run(*inputs)

    return call


def backward_call(run: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Call:
    """Return a call of forward and backward. The output has the first input's shape and dtype."""
    leaves = [x for x in inputs if x.requires_grad]
    grad = torch.randn_like(inputs[0])
    return lambda: torch.autograd.grad(run(*inputs), leaves, grad)


CALLS = {"fwd": forward_call, "fwd+bwd": backward_call}


def copy_rate(device: torch.device, laps: int = 7) -> float:
    """Return the bytes a second, read plus written, of a copy that no cache holds."""
    size = 2**30 if device.type == "cuda" else 2**28
    source = torch.randn(size // 4, device=device)  # zeros and ones would be cheaper to move
    target = torch.empty_like(source)
    # by a kernel: as a node of a CUDA graph, copy_ is a memcpy at two thirds of the rate
    ms = time_calls([lambda: torch.add(source, 1, out=target)], device, laps=laps).ms
    assert ms
    return 2 * source.nbytes / ms * 1e3
