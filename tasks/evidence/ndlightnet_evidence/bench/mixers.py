"""Times of the family of mixers: their operators beside flash-linear-attention's, and whole layers
over length and over grids."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, normalize

from ndlightnet.nn import mixers as catalogue
from ndlightnet.ops import gated_delta_rule, gated_linear_attention
from ndlightnet.ops.recurrence import wkv
from ndlightnet_evidence import plots
from ndlightnet_evidence.bench import peers
from ndlightnet_evidence.bench.rows import PASSES, Bench, Case, Contender
from ndlightnet_evidence.bench.step import peak
from ndlightnet_evidence.bench.timing import CALLS, Call, backward_call
from ndlightnet_evidence.catalogue import factory, family
from ndlightnet_evidence.runner import write_csv
from ndlightnet_evidence.tables import markdown

Record = dict[str, Any]  # one line of mixers.csv; milliseconds are medians
RULES = (
    ("linear attention", "gated", 0),
    ("TNL", "gated", 1),
    ("GLA, HGRN2", "gated", 64),
    ("DeltaNet", "delta", 0),
    ("gated DeltaNet", "delta", 1),
    ("KDA", "delta", 64),
    ("RWKV-4", "wkv", 0),
)


def operators(
    bench: Bench, shapes: Sequence[tuple[int, int]] = ((4, 16384), (16, 2048)), heads: int = 12, dim: int = 64
) -> None:
    """Time gated linear attention, the delta rules and RWKV-4: the torch form, the same compiled,
    and flash-linear-attention. Floor: inputs read and outputs written once."""
    for batch, length in shapes[:1] if bench.quick else shapes:
        for (row, rule, decays), direction in ((r, p) for r in RULES for p in PASSES):
            case = Case(row, batch, length, heads, dim)
            rows = min(decays, dim)
            inputs = partial(_inputs, bench, case, rule, rows)
            ours = partial(_operator, rule, "torch")
            contenders = [
                Contender("ours", ours),
                Contender("ours", ours, graph=False),
                Contender("fla", partial(_operator, rule, "fla")),
                Contender("compile", peers.compiled(ours)),
            ]
            moved = (3, 8) if rule == "wkv" else (4, 11)  # number of tensors; wkv has no q
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


def mixers(
    bench: Bench,
    lengths: Sequence[int] = (1024, 4096, 16384, 65536),
    grids: Sequence[tuple[int, ...]] = ((64, 64), (16, 32, 32)),
    batch: int = 1,
    dim: int = 768,
) -> None:
    """Time layers with their projections, causal over `lengths` and global over `grids`, forward
    and with the backward pass; bfloat16 autocast on CUDA."""
    shapes = [*(((n,), True) for n in lengths), *((grid, False) for grid in grids)]
    if bench.device.type == "cpu":
        shapes, dim = [s for s in shapes if math.prod(s[0]) <= 4096], min(dim, 128)
    for grid, causal in shapes[:1] if bench.quick else shapes:
        for row in catalogue.__all__ if causal else family():
            name, _, scan = row.partition(" ")
            mixer: Any = factory(row)(dim).to(bench.device)
            x = torch.randn(batch, *grid, dim, device=bench.device, requires_grad=True)
            case = Case(f"{name} causal" if causal else row, batch, math.prod(grid), 1, dim)
            inputs = (x, *(p for p in mixer.parameters() if p.requires_grad))
            layer = partial(_layer, mixer, causal)
            calls = (partial(_calls, make, layer, inputs) for make in CALLS.values())
            forward, both = (
                bench.measure(case, direction, "ours", prepare)
                for direction, prepare in zip(PASSES, calls, strict=True)
            )
            used = peak(backward_call(layer, inputs), bench.device) if both else None
            with torch.autocast(bench.device.type, torch.bfloat16, bench.device.type == "cuda"):
                runs_on = mixer.implementation(x, causal)
            bench.records.append(
                {
                    "mixer": name,
                    "scan": "causal" if causal else scan,
                    "grid": "x".join(map(str, grid)),
                    "tokens": math.prod(grid),
                    "dim": dim,
                    "forward_ms": forward,
                    "both_ms": both,
                    "memory_mb": used and used / 1e6,
                    "parameters": sum(p.numel() for p in mixer.parameters()),
                    "state_size": mixer.state_size,
                    "implementation": runs_on,
                }
            )
        bench.save(bench)


def _layer(mixer: nn.Module, causal: bool, x: Tensor, *_: Tensor) -> Tensor:
    kind = x.device.type
    # the cache of cast weights must not outlive the capture of a graph
    with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda", cache_enabled=False):
        out: Tensor = mixer(x, causal=causal)
    return out.to(x.dtype)


def _calls(make: Callable[..., Call], *given: Any) -> list[Call]:
    return [make(*given)]


def write(records: Sequence[Record], folder: Path) -> None:
    """Write mixers.csv and mixers.png."""
    write_csv(folder / "mixers.csv", records)
    draw(records, folder / "mixers.png")


FIELDS = {"forward, ms": "forward_ms", "forward + backward, ms": "both_ms", "peak memory, MB": "memory_mb"}


def table(records: Sequence[Record]) -> str:
    """Return a Markdown table with a line for each mixer, scan and grid; the reason why kernels do
    not run is in the CSV only."""
    return markdown(
        ["mixer", "scan", "grid", *FIELDS, "parameters", "state", "runs on"],
        [
            [
                r["mixer"],
                r["scan"],
                r["grid"],
                *("" if r[field] is None else f"{r[field]:.4g}" for field in FIELDS.values()),
                str(r["parameters"]),
                "" if r["state_size"] is None else str(r["state_size"]),
                r["implementation"].split(" ")[0],
            ]
            for r in records
        ],
    )


def draw(records: Sequence[Record], path: Path) -> None:
    """Draw milliseconds and peak memory: of the causal form over length, on logarithmic axes;
    below, of all scans on each grid."""
    fields = {title: name for title, name in FIELDS.items() if any(r[name] for r in records)}
    records = [r for r in records if r["mixer"] != "Identity"]
    lines = [r for r in records if r["scan"] == "causal"]
    grids: dict[str, list[Record]] = {}
    for r in records:
        if r["scan"] != "causal":
            grids.setdefault(r["grid"], []).append(r)
    heights = [4.2] * bool(lines)
    heights += [0.2 * len({r["mixer"] for r in found}) + 1.2 for found in grids.values()]
    if not fields or not heights:
        return
    figure = plots.figure(4 * len(fields) + 1.5, sum(heights))
    parts: Any = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, found in zip(parts, [lines] * bool(lines) + [*grids.values()], strict=True):
        panels = part.subplots(1, len(fields), squeeze=False, sharey=found is not lines)[0]
        for axes, (title, field) in zip(panels, fields.items(), strict=True):
            (_lengths if found is lines else _scans)(axes, found, field, title)
        plots.finish(panels)
        plots.legend(part, panels)
    plots.save(figure, path)


def _lengths(axes: Any, records: Sequence[Record], field: str, title: str) -> None:
    for name in dict.fromkeys(r["mixer"] for r in records):
        mine = [r for r in records if r["mixer"] == name and r[field]]
        axes.plot(
            [r["tokens"] for r in mine],
            [r[field] for r in mine],
            label=name,
            **plots.line_style(catalogue.__all__.index(name)),
        )
    lengths = sorted({r["tokens"] for r in records})
    axes.set(xscale="log", yscale="log", title=title, xlabel="tokens, causal")
    axes.set_xticks(lengths, [plots.short(n) for n in lengths])


def _scans(axes: Any, records: Sequence[Record], field: str, title: str) -> None:
    """Plot all scans of each mixer, with the fastest mixer (by its fastest scan) on top."""
    best: dict[str, float] = {}
    for r in records:
        best[r["mixer"]] = min(r["both_ms"] or math.inf, best.get(r["mixer"], math.inf))
    order = sorted(best, key=lambda name: -best[name])
    for scan, color in plots.SCANS.items():
        mine = [r for r in records if r["scan"] == scan and r[field]]
        axes.plot(
            [r[field] for r in mine],
            [order.index(r["mixer"]) for r in mine],
            "o",
            color=color,
            markersize=5,
            label=scan or "all at once",
        )
    axes.set(xscale="log", xlabel=f"{title}, {records[0]['grid']} tokens")
    axes.set_yticks(range(len(order)), order, fontsize=8)
