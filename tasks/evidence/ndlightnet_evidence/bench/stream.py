"""Benchmark of video frame by frame: frames per second, and memory over a long stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ndlightnet.models import NDLightNet
from ndlightnet.nn.mixers import LightNetAttention
from ndlightnet_evidence import plots
from ndlightnet_evidence.bench.rows import Bench, Case
from ndlightnet_evidence.bench.timing import Call

PATCH, RECENT = (1, 16, 16), 16
FACT = "memory in MB after frames:"
WINDOWS = {"": None, f", window {RECENT}": RECENT}


def stream(
    bench: Bench, size: int = 224, dim: int = 384, depth: int = 12, frames: int = 100_000, at_once: int = 64
) -> None:
    """Time NDLightNet-S, bf16 autocast, on one video: a frame from the State of those before, and
    the last 16 frames anew. Then record the memory over `frames` frames, `at_once` at a time."""
    tokens = (size // PATCH[1]) ** 2

    def network(window: int | None) -> NDLightNet:
        mixer = partial(LightNetAttention, impl=bench.impl, window=window)
        model = NDLightNet(3, 3, 400, patch_size=PATCH, embed_dim=dim, depth=depth, mixer=mixer, causal=True)
        return model.to(bench.device).eval()

    def clip(frames: int) -> torch.Tensor:
        return torch.randn(1, 3, frames, size, size, device=bench.device)

    def call(run: Callable[..., Any], *inputs: Any) -> list[Call]:
        def now() -> Any:
            # the cache of cast weights must not outlive a capture
            amp = torch.autocast(bench.device.type, torch.bfloat16, cache_enabled=False)
            with torch.no_grad(), amp:
                return run(*inputs)

        return [now]

    def from_state(window: int | None) -> list[Call]:
        model = network(window)
        (before,) = call(model.advance, clip(RECENT + 1), model.init_state(1))
        return call(model.advance, clip(1), before()[1])

    ways: dict[str, tuple[int, Callable[[], list[Call]]]] = {
        f"one frame of a stream{more}": (tokens, partial(from_state, window)) for more, window in WINDOWS.items()
    }
    ways[f"the last {RECENT} frames anew"] = (RECENT * tokens, lambda: call(network(None), clip(RECENT)))
    for graph in (True, False):
        for name, (length, prepare) in ways.items():
            row = name + ("" if graph else ", without a graph")
            case = Case(row, 1, length, dim // 64, 64)
            if ms := bench.measure(case, "fwd", "ours", prepare, graph=graph):
                bench.facts[f"frames a second, {row}"] = 1e3 / ms
    for more, window in WINDOWS.items():
        _long(bench, network(window), clip(at_once), frames, more)


@torch.no_grad()
def _long(bench: Bench, model: NDLightNet, clip: torch.Tensor, frames: int, more: str) -> None:
    """Record the memory in use over `frames` frames: of the card, or of the state on a CPU."""
    flow, done, marks = model.stream(), 0, [frames * i // 50 for i in range(1, 51)]
    start = time.monotonic()
    for mark in marks:
        while done < mark:
            with torch.autocast(bench.device.type, torch.bfloat16):
                flow(clip)
            done += clip.shape[2]
        if bench.device.type == "cuda":
            used = torch.cuda.memory_allocated(bench.device)
        else:
            used = sum(x.nbytes for x in tree_leaves(flow.state_dict()) if torch.is_tensor(x))
        bench.facts[f"{FACT} {done}{more}"] = used / 1e6
    rate = done / (time.monotonic() - start)
    bench.facts[f"frames a second, stream{more}, {clip.shape[2]} frames at once"] = rate


def draw(facts: dict[str, float], path: Path) -> None:
    """Draw the memory in use over frames."""
    points: dict[str, list[tuple[int, float]]] = {}
    for fact, value in facts.items():
        if fact.startswith(FACT):
            number, _, window = fact.removeprefix(FACT).partition(", ")
            points.setdefault(window or "all frames", []).append((int(number), value))
    lines = {
        label: plots.Line([n for n, _ in line], torch.tensor([[used for _, used in line]]))
        for label, line in points.items()
    }
    most = max(value for line in points.values() for _, value in line)
    plots.draw(path, [plots.Panel("frames", lines, ylabel="memory in use, MB", ylim=(0, 1.15 * most))])
