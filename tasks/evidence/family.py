"""Train many networks that differ in one thing, on the same batches, in seconds a run.

    family=tasks/evidence/family.py
    python $family configs/fashion_mnist.yaml                 every mixer of the catalogue
    python $family configs/adrenal.yaml --rows Identity SoftmaxAttention "GLA axes" --steps 296
    python $family configs/adrenal.yaml --file tasks/evidence/configs/ladder/grids.yaml --jobs 8
    python $family configs/enwik8.yaml --file .../text.yaml --rows softmax LightNet --lr 1e-3 2e-3

The config is one of tasks/image_cls.py, volume_cls.py, video_cls.py or text_lm.py, which train one
network by Lightning. Here a step is replayed from a CUDA graph, and --jobs N trains N networks on
one card at once, each on a CUDA stream of its own; a run draws and gives what it gives alone. The
times and the memory of a row are those of its first run, measured while nothing else runs.

A row is a mixer, `NAME` or `NAME scan`, or an entry of --file, a YAML file: a name, and the
arguments of the network that it changes, or `lr`. All rows of a seed get the same batches, and the
schedule follows from --steps. A run under --out is repeated only if it failed; delete --out if a
row has changed. Writes table.md, runs.csv, runs.json and family.png; for text also lengths.png.
"""

from __future__ import annotations

import gc
import os
import statistics
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from ndlightnet.training.core.costs import state_size
from ndlightnet.training.core.optim import warm_cosine
from ndlightnet_evidence import catalogue, plots, runner, sets, tables, turns
from ndlightnet_evidence.graphs import Steps
from ndlightnet_evidence.runner import Run
from ndlightnet_evidence.turns import Work

FULL = 0.5  # share of the card's memory from which on what ended runs have left is freed


@dataclass
class Plan:
    """What all runs share: the config, the rows' changes, the data and the number of steps.
    measured: times and memory of each row whose first run has begun."""

    config: dict[str, Any]
    rows: dict[str, dict[str, Any]]
    data: sets.Samples
    steps: int
    measured: dict[str, Run] = field(default_factory=dict)


def scratch() -> None:
    """Do a small step, so that what libraries allocate at the first one counts for no row."""
    net = nn.Linear(16, 16).to(runner.device())
    steps = Steps(net, lambda x: sets.answer(net, x).square().mean(), 0.0, 1.0)
    steps(0.0, torch.zeros(16, 16, device=runner.device()))


def run(plan: Plan, who: Run) -> Work:
    """Train as the tasks do (AdamW, warm-up, cosine, clipping), and test."""
    row, model, first = plan.rows[who["row"]], plan.config["model"], who["row"] not in plan.measured
    own = plan.measured.setdefault(who["row"], {}) if first else {}
    device, held, batches = runner.device(), 0, plan.data.batches(who["seed"], plan.steps)
    if device.type == "cuda":
        if torch.cuda.memory_reserved() > FULL * torch.cuda.mem_get_info()[1]:
            gc.collect()  # networks and graphs of earlier runs, which reference each other
            torch.cuda.empty_cache()
        if first:
            scratch()
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
    torch.manual_seed(who["seed"])  # of weights and drop path
    net = catalogue.network(model["net"], row).to(device).train()
    clip = plan.config["trainer"]["gradient_clip_val"]
    steps = Steps(net, partial(plan.data.loss, net), model["weight_decay"], clip)
    times: list[float] = []
    for number, batch in enumerate(batches):
        rate = row.get("lr", model["lr"]) * warm_cosine(number, plan.steps)
        step = partial(steps, rate, *batch)
        if not first or number > sets.TIMED:
            step()
            yield turns.AHEAD
        elif number == 0:  # which captures the graph
            step()
        else:
            times.append(turns.seconds(step))
            own["step_ms"] = 1e3 * statistics.median(times)
        if first and number == sets.TIMED and device.type == "cuda":
            own["peak_memory_gb"] = (torch.cuda.max_memory_allocated() - held) / 1e9
    result = yield from plan.data.test(net.eval(), first)
    return {
        **{k: v for k, v in result.items() if k != "confusion"}, **own, "steps": plan.steps,
        "parameters": sum(p.numel() for p in net.parameters()), "state_size": state_size(net),
    }  # fmt: skip


def draw(rows: Sequence[str], measure: str, path: Path, runs: Sequence[Run]) -> None:
    """Draw the measure of every row, a point for each seed, sorted by mean, and step times; for
    text also bits per byte over the length of the windows."""
    found = [run for run in runs if run[measure] is not None]
    done = {row: mine for row in rows if (mine := tables.of_row(found, row))}
    mean = {row: statistics.mean(r[measure] for r in mine) for row, mine in done.items()}
    order = sorted(done, key=lambda row: mean[row])
    figure = plots.figure(9, 0.2 * len(order) + 1.2)
    axes, clock = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for height, row in enumerate(order):
        color = plots.SCANS.get(row.rpartition(" ")[2], plots.BLACK)
        for r in done[row]:
            axes.plot(r[measure], height, "o", color=color, markersize=4, alpha=0.5)
            if "step_ms" in r:
                clock.plot(r["step_ms"], height, "s", color=color, markersize=4)
        axes.plot(mean[row], height, "|", color=color, markersize=11)
    axes.set_yticks(range(len(order)), order, fontsize=7)
    axes.set_ylim(-1, len(order))
    for scan, color in plots.SCANS.items():
        axes.plot([], [], "o", color=color, markersize=4, label=scan or "all at once, or none")
    axes.legend(frameon=False, fontsize=7, loc="lower right")
    axes.set_xlabel(measure.replace("_", " ").replace("top1", "accuracy"))
    clock.set(xlabel="a training step, ms", xscale="log")
    clock.xaxis.set_major_formatter("{x:g}")
    plots.finish((axes, clock))
    clock.minorticks_on()  # times may lie within a decade
    plots.save(figure, path / "family.png")
    if measure == "bits_per_byte":
        plots.lengths(found, rows, path / "lengths.png")


def say(measure: str, run: Run) -> str:
    time = f", {run['step_ms']:.2f} ms a step" if "step_ms" in run else ""
    return f"{measure} {tables.number(run[measure])}, {run['run_seconds']:.0f} s{time}"


def read_config(path: Path, changes: Sequence[str]) -> dict[str, Any]:
    """Read a config, with changes such as `data.init_args.batch_size=16`."""
    config: dict[str, Any] = yaml.safe_load(path.read_text())
    for change in changes:
        name, _, value = change.partition("=")
        *folders, last = name.split(".")
        place = config
        for folder in folders:
            place = place[folder]
        place[last] = yaml.safe_load(value)
    return config


def at_rates(rows: dict[str, Any], rates: Sequence[float]) -> dict[str, Any]:
    """Return each row at each learning rate; the rows as they are without rates."""
    return {f"{name}, lr {lr:g}": {**row, "lr": lr} for name, row in rows.items() for lr in rates} \
        or rows  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE",
                        help="in the config, such as data.init_args.batch_size=16")  # fmt: skip
    parser.add_argument("--file", type=Path, help="a YAML file of rows")
    parser.add_argument("--rows", nargs="+", help="default: those of --file, or all mixers")
    parser.add_argument("--lr", nargs="+", type=float, default=[], help="each row at each of these")
    parser.add_argument("--steps", type=int, help="default: as in the config")
    runner.add_options(parser, "runs/family/CONFIG")
    parser.set_defaults(resume=True)
    o = parser.parse_args(arguments)
    o.out = o.out or Path("runs/family") / o.config.stem
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # else 8 streams share a queue
    rows = at_rates(catalogue.changes(o.file, o.rows), o.lr)  # a wrong one fails here
    config = read_config(o.config, o.set)
    data = sets.load(config)
    plan, names = Plan(config, rows, data, o.steps or data.steps), list(rows)
    measures = (*data.measures, "step_ms", "latency_ms", "peak_memory_gb")
    runner.compare(
        o, [{"row": row, "seed": seed} for seed, row in product(o.seeds, names)],
        partial(run, plan), do=turns.run_all,
        table=lambda runs: tables.summary(runs, names, measures),
        say=partial(say, measures[0]),
        draw=partial(draw, names, measures[0], o.out),
    )  # fmt: skip


if __name__ == "__main__":
    main()
