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

from ndlightnet.nn import mixers as catalogue
from ndlightnet.nn.mixers.mixer import Scan
from ndlightnet.ops import gated_delta_rule, gated_linear_attention, wkv
from ndlightnet_evidence.bench import peers
from ndlightnet_evidence.bench.output import markdown, tokens
from ndlightnet_evidence.bench.rows import PASSES, Bench, Case, Contender
from ndlightnet_evidence.bench.step import peak
from ndlightnet_evidence.bench.timing import Call, backward_call, forward_call

RULES = (
    ("linear attention", "gated", 0), ("TNL", "gated", 1), ("GLA, HGRN2", "gated", 64),
    ("DeltaNet", "delta", 0), ("gated DeltaNet", "delta", 1), ("KDA", "delta", 64),
    ("RWKV-4", "wkv", 0),
)  # fmt: skip


def operators(
    bench: Bench, shapes: Sequence[tuple[int, int]] = ((4, 16384), (16, 2048)), heads: int = 12,
    dim: int = 64,
) -> None:  # fmt: skip
    """Gated linear attention, the delta rules and RWKV-4: the torch form, the same compiled, and
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
            moved = (3, 8) if rule == "wkv" else (4, 11)  # tensors: no q
            numbers = moved[direction != "fwd"] * case.numel() * inputs()[0].itemsize
            numbers += 4 * sum(x.numel() for x in inputs()[3:]) * (1 if direction == "fwd" else 3)
            bench.compare(case, direction, contenders, inputs, numbers)


def _inputs(bench: Bench, case: Case, rule: str, rows: int) -> tuple[Tensor, ...]:
    shape = (case.batch, case.length, case.heads, case.dim)
    draw = partial(torch.randn, device=bench.device)
    dtype = torch.float32 if bench.device.type == "cpu" else torch.bfloat16
    if rule == "wkv":  # k, v, decay, bonus
        k, v = (draw(*shape[:2], case.heads * case.dim).to(dtype) for _ in range(2))
        made = (k, v, *draw(2, case.heads * case.dim))
        return tuple(x.detach().requires_grad_() for x in made)
    xs = [draw(shape), normalize(draw(shape), dim=-1), draw(shape)]
    xs = [x.to(dtype) for x in xs]
    xs += [torch.sigmoid(draw(shape[:3]))] if rule == "delta" else []
    xs += [logsigmoid(draw(*shape[:3], rows)) / 16] if rows else []
    return tuple(x.requires_grad_() for x in xs)


def _operator(rule: str, impl: Any, *inputs: Tensor) -> Tensor:
    if rule == "wkv":
        return (peers.fla_rwkv4 if impl == "fla" else wkv.means)(*inputs)
    run: Any = gated_linear_attention if rule == "gated" else gated_delta_rule
    out: Tensor = run(*inputs, impl=impl)[0]
    return out


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
                runs_on = mixer.implementation(x, causal)
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
    """mixers.csv and mixers.png."""
    with open(folder / "mixers.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Record._fields)
        writer.writerows(records)
    draw(records, folder / "mixers.png")


def table(records: Sequence[Record]) -> str:
    """Markdown: a line for each mixer, scan and grid; the reason why kernels do not run is left to
    the CSV."""
    head = ["mixer", "scan", "grid", "forward, ms", "forward + backward, ms", "peak memory, MB",
            "parameters", "state", "runs on"]  # fmt: skip
    return markdown(head, [
        [r.mixer, r.scan, r.grid, *("" if ms is None else f"{ms:.3f}"
                                    for ms in (r.forward_ms, r.both_ms)),
         "" if r.memory_mb is None else f"{r.memory_mb:.0f}", str(r.parameters),
         "" if r.state_size is None else str(r.state_size), r.implementation.split(" ")[0]]
        for r in records
    ])  # fmt: skip


SCANS = {"": "#000000", "raster": "#56B4E9", "both": "#0072B2", "axes": "#D55E00"}
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
    """Milliseconds and peak memory: of the causal form over length, on logarithmic axes; below, of
    all scans on each grid."""
    from matplotlib.figure import Figure

    fields = {"forward, ms": "forward_ms", "forward + backward, ms": "both_ms",
              "peak memory, MB": "memory_mb"}  # fmt: skip
    fields = {title: name for title, name in fields.items()
              if any(getattr(record, name) for record in records)}  # fmt: skip
    lines = [r for r in records if r.scan == "causal" and r.mixer != "Identity"]
    others = [r for r in records if r.scan != "causal" and r.mixer != "Identity"]
    grids = list(dict.fromkeys(r.grid for r in others))
    heights = [4.2] * bool(lines) + [0.2 * len({r.mixer for r in others}) + 1.2] * len(grids)
    if not fields or not heights:
        return
    figure = Figure(figsize=(4 * len(fields) + 1.5, sum(heights)), layout="constrained",
                    facecolor="white")  # fmt: skip
    parts = list(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    if lines:
        _lengths(parts.pop(0), lines, fields)
    for part, grid in zip(parts, grids, strict=True):
        _scans(part, [r for r in others if r.grid == grid], fields)
    figure.savefig(path, dpi=120)


def _lengths(part: Any, records: Sequence[Record], fields: dict[str, str]) -> None:
    panels = part.subplots(1, len(fields), squeeze=False)[0]
    for axes, (title, field) in zip(panels, fields.items(), strict=True):
        for name in dict.fromkeys(record.mixer for record in records):
            points = [(r.tokens, getattr(r, field)) for r in records if r.mixer == name]
            points = [(n, value) for n, value in points if value]
            color, marker = STYLES.get(name, ("#777777", "x"))
            axes.plot(*zip(*points, strict=True) if points else ((), ()), color=color,
                      marker=marker, markersize=4.5, linewidth=1.2, label=name)  # fmt: skip
        lengths = sorted({r.tokens for r in records})
        axes.set(xscale="log", yscale="log", title=title, xlabel="tokens, causal")
        axes.set_xticks(lengths, [tokens(n) for n in lengths])
    _finish(part, panels)


def _scans(part: Any, records: Sequence[Record], fields: dict[str, str]) -> None:
    """The fastest mixer (by its fastest scan) on top."""
    best: dict[str, float] = {}
    for r in records:
        ms = r.both_ms or math.inf
        best[r.mixer] = min(ms, best.get(r.mixer, ms))
    order = sorted(best, key=lambda name: -best[name])
    panels = part.subplots(1, len(fields), squeeze=False, sharey=True)[0]
    for axes, (title, field) in zip(panels, fields.items(), strict=True):
        for scan, color in SCANS.items():
            found = [r for r in records if r.scan == scan and getattr(r, field)]
            axes.plot([getattr(r, field) for r in found], [order.index(r.mixer) for r in found],
                      "o", color=color, markersize=5, label=scan or "all at once")  # fmt: skip
        axes.set(xscale="log", xlabel=f"{title}, {records[0].grid} tokens")
        axes.set_yticks(range(len(order)), order, fontsize=8)
    _finish(part, panels)


def _finish(part: Any, panels: Any) -> None:
    for axes in panels:
        axes.minorticks_off()
        axes.grid(color="#DDDDDD", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    part.legend(*panels[0].get_legend_handles_labels(), loc="outside right center",
                frameon=False, fontsize=8)  # fmt: skip
