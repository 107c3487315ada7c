"""The family of mixers: their operators beside flash-linear-attention's, and whole layers over
length and over grids."""

from __future__ import annotations

import csv
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, normalize

from ndlightnet.bench import peers
from ndlightnet.bench.output import tokens
from ndlightnet.bench.rows import PASSES, Bench, Case, Contender
from ndlightnet.bench.step import peak
from ndlightnet.bench.timing import Call, backward_call, forward_call
from ndlightnet.nn import mixers as catalogue
from ndlightnet.nn.mixers.mixer import Scan
from ndlightnet.ops import gated_delta_rule, gated_linear_attention

RULES = (
    ("linear attention", "gated", 0), ("TNL", "gated", 1), ("GLA, HGRN2", "gated", 64),
    ("DeltaNet", "delta", 0), ("gated DeltaNet", "delta", 1), ("KDA", "delta", 64),
)  # fmt: skip


def operators(
    bench: Bench, shapes: Sequence[tuple[int, int]] = ((4, 16384), (16, 2048)), heads: int = 12,
    dim: int = 64,
) -> None:  # fmt: skip
    """Gated linear attention and the delta rules: the torch form, the same compiled, and
    flash-linear-attention. Floor: inputs read, outputs written, once."""
    for batch, length in shapes[:1] if bench.quick else shapes:
        for (row, rule, decays), direction in ((r, p) for r in RULES for p in PASSES):
            case = Case(row, batch, length, heads, dim)
            rows = min(decays, dim)
            inputs = partial(_inputs, bench, case, rule, rows)
            ours = partial(_operator, rule, "torch")
            contenders = [
                Contender("ours", ours), Contender("ours", ours, graph=False),
                Contender("fla", partial(_operator, rule, "fla")),
                Contender("compile", peers.compiled(ours)),
            ]  # fmt: skip
            numbers = {"fwd": 4, "fwd+bwd": 11}[direction] * case.numel() * inputs()[0].itemsize
            numbers += 4 * sum(x.numel() for x in inputs()[3:]) * (1 if direction == "fwd" else 3)
            bench.compare(case, direction, contenders, inputs, numbers)


def _inputs(bench: Bench, case: Case, rule: str, rows: int) -> tuple[Tensor, ...]:
    shape = (case.batch, case.length, case.heads, case.dim)
    draw = partial(torch.randn, device=bench.device)
    dtype = torch.float32 if bench.device.type == "cpu" else torch.bfloat16
    xs = [draw(shape), normalize(draw(shape), dim=-1), draw(shape)]
    xs = [x.to(dtype) for x in xs]
    xs += [torch.sigmoid(draw(shape[:3]))] if rule == "delta" else []
    xs += [logsigmoid(draw(*shape[:3], rows)) / 16] if rows else []
    return tuple(x.requires_grad_() for x in xs)


def _operator(rule: str, impl: Any, q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
    if rule == "gated":
        return gated_linear_attention(q, k, v, *more, impl=impl)[0]
    return gated_delta_rule(q, k, v, *more, impl=impl)[0]


class Record(NamedTuple):
    """One line of mixers.csv. ms: medians; memory: peak of forward and backward pass."""

    mixer: str
    scan: str
    grid: str
    tokens: int
    dim: int
    forward_ms: float | None
    both_ms: float | None
    memory_mb: float | None
    parameters: int
    state_size: int | None
    implementation: str


def rows(causal: bool) -> Iterable[tuple[str, str, Callable[[int], nn.Module]]]:
    """Every mixer of the catalogue: causal, or with each scan that it takes."""
    for name in catalogue.__all__:
        kind = getattr(catalogue, name)
        if causal:
            yield name, "causal", kind
        elif "scan" in inspect.signature(kind).parameters:
            for scan in get_args(Scan):
                yield name, scan, partial(kind, scan=scan)
        else:
            yield name, "", kind


def mixers(
    bench: Bench,
    lengths: Sequence[int] = (1024, 4096, 16384, 65536),
    grids: Sequence[tuple[int, ...]] = ((64, 64), (16, 32, 32)), batch: int = 1, dim: int = 768,
) -> None:  # fmt: skip
    """Layers with their projections, causal over `lengths` and seeing all of `grids`, forward and
    with backward pass; bfloat16 autocast on CUDA."""
    shapes = [*(((n,), True) for n in lengths), *((grid, False) for grid in grids)]
    if bench.device.type == "cpu":
        shapes, dim = [s for s in shapes if math.prod(s[0]) <= 4096], min(dim, 128)
    for grid, causal in shapes[:1] if bench.quick else shapes:
        for name, scan, kind in rows(causal):
            mixer: Any = kind(dim).to(bench.device)
            x = torch.randn(batch, *grid, dim, device=bench.device, requires_grad=True)
            case = Case(f"{name} {scan}".strip(), batch, math.prod(grid), 1, dim)
            run = partial(_layer, mixer, causal)
            parameters = [p for p in mixer.parameters() if p.requires_grad]
            used: list[float | None] = []
            times = [
                bench.measure(case, direction, "ours", partial(_calls, direction, run, x,
                              parameters, used), bench.device)
                for direction in PASSES
            ]  # fmt: skip
            with torch.autocast(bench.device.type, torch.bfloat16, bench.device.type == "cuda"):
                runs_on = mixer.implementation(x)
            bench.records.append(Record(
                name, scan, "x".join(map(str, grid)), math.prod(grid), dim, times[0], times[1],
                used[-1] if used else None, sum(p.numel() for p in mixer.parameters()),
                mixer.state_size, runs_on,
            ))  # fmt: skip
        bench.save(bench)


def _layer(mixer: nn.Module, causal: bool, x: Tensor, *_: Tensor) -> Tensor:
    kind = x.device.type
    # the cache of cast weights must not outlive the capture of a graph
    with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda", cache_enabled=False):
        out: Tensor = mixer(x, causal=causal)
    return out.to(x.dtype)


def _calls(
    direction: str, run: Callable[..., Tensor], x: Tensor, parameters: list[Tensor],
    used: list[float | None],
) -> tuple[list[Call], str]:  # fmt: skip
    make = backward_call if direction == "fwd+bwd" else forward_call
    call = make(run, (x, *parameters))
    if direction == "fwd+bwd":
        bytes_ = peak(call, x.device)
        used.append(None if bytes_ is None else bytes_ / 1e6)
    return [call], ""


def write(records: Sequence[Record], folder: Path) -> None:
    """mixers.csv, and mixers.png where more than one length was measured."""
    with open(folder / "mixers.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Record._fields)
        writer.writerows(records)
    draw([r for r in records if r.scan == "causal"], folder / "mixers.png")


STYLES = {
    "SoftmaxAttention": ("#009E73", "^"), "LightNetAttention": ("#0072B2", "o"),
    "LinearAttention": ("#56B4E9", "o"), "CosformerAttention": ("#56B4E9", "s"),
    "LrpeAttention": ("#56B4E9", "D"), "TNL": ("#E69F00", "o"),
    "GLA": ("#E69F00", "s"), "HGRN2": ("#E69F00", "D"),
    "DeltaNet": ("#D55E00", "o"), "GatedDeltaNet": ("#D55E00", "s"),
    "KimiDeltaAttention": ("#D55E00", "D"), "S4": ("#CC79A7", "o"),
    "S5": ("#CC79A7", "s"), "Mamba": ("#CC79A7", "D"),
    "RWKV4": ("#CC79A7", "v"), "LAVO": ("#000000", "v"),
}  # fmt: skip


def draw(records: Sequence[Record], path: Path) -> None:
    """Milliseconds and peak memory over length, of the causal form, on logarithmic axes."""
    from matplotlib.figure import Figure

    panels = {"forward, ms": "forward_ms", "forward + backward, ms": "both_ms",
              "peak memory, MB": "memory_mb"}  # fmt: skip
    panels = {title: name for title, name in panels.items()
              if any(getattr(record, name) for record in records)}  # fmt: skip
    if not panels:
        return
    figure = Figure(figsize=(4 * len(panels) + 1.5, 4.2), layout="constrained", facecolor="white")
    axes_of = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, field) in zip(axes_of, panels.items(), strict=True):
        for name in dict.fromkeys(record.mixer for record in records):
            if name == "Identity":
                continue
            points = [(r.tokens, getattr(r, field)) for r in records if r.mixer == name]
            points = [(n, value) for n, value in points if value]
            color, marker = STYLES.get(name, ("#777777", "x"))
            axes.plot(*zip(*points, strict=True) if points else ((), ()), color=color,
                      marker=marker, markersize=4.5, linewidth=1.2, label=name)  # fmt: skip
        lengths = sorted({r.tokens for r in records})
        axes.set(xscale="log", yscale="log", title=title, xlabel="tokens")
        axes.set_xticks(lengths, [tokens(n) for n in lengths])
        axes.minorticks_off()
        axes.grid(color="#DDDDDD", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes_of[0].get_legend_handles_labels(), loc="outside right center",
                  frameon=False, fontsize=8)  # fmt: skip
    figure.savefig(path, dpi=120)
