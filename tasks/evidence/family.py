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
arguments of the network that it changes, or `lr`, or `net`, another network. All rows of a seed
get the same batches, and the schedule follows from --steps, or from --seconds: each row then does
as many steps as it does in this time, alone on the card. A run under --out is repeated only if it
failed; delete --out if a row has changed. Writes table.md, runs.csv, runs.json and family.png; for
text also lengths.png, for class folders also times.png, the accuracy on held-out training images.
"""

from __future__ import annotations

import gc
import os
import statistics
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from ndlightnet.training import AveragedWeights
from ndlightnet.training.core.costs import state_size
from ndlightnet.training.core.optim import warm_cosine
from ndlightnet_evidence import catalogue, plots, runner, sets, tables, turns
from ndlightnet_evidence.graphs import Steps
from ndlightnet_evidence.runner import Run
from ndlightnet_evidence.turns import Work

POINTS = 12  # of the curve over time
LEFT_OUT = ("warmup_epochs", "min_lr", "layer_decay")  # of the tasks' schedule
FULL = 0.5  # share of the card's memory from which on what ended runs have left is freed


@dataclass
class Plan:
    """What all runs share: the config, the rows' changes, the data, the number of steps and, if
    not None, the seconds that a row's steps take instead. compiles: by torch.compile.
    measured: times and memory of each row whose first run has begun."""

    config: dict[str, Any]
    rows: dict[str, dict[str, Any]]
    data: sets.Samples
    steps: int
    seconds: float | None = None
    compiles: bool = False
    measured: dict[str, Run] = field(default_factory=dict)

    @property
    def decay(self) -> Callable[[int], float] | None:
        """The decay of the config's AveragedWeights at each step; None without it."""
        callbacks = self.config["trainer"].get("callbacks") or []
        found = (one for one in callbacks if one["class_path"].endswith(".AveragedWeights"))
        made = [AveragedWeights(**one.get("init_args", {})) for one in found]
        return made[0].decay_of if made else None


def scratch() -> None:
    """Do a small step, so that what libraries allocate at the first one counts for no row."""
    net = nn.Linear(16, 16).to(runner.device())
    steps = Steps(net, lambda x: sets.answer(net, x).square().mean(), 0.0, 1.0)
    steps(0.0, torch.zeros(16, 16, device=runner.device()))


def begin(plan: Plan, row: dict[str, Any], seed: int) -> Steps:
    """Return the steps of a row's network with the weights of a seed."""
    model = plan.config["model"]
    torch.manual_seed(seed)  # of weights and drop path
    net = catalogue.network(model["net"], row).to(runner.device()).train()
    clip = plan.config["trainer"]["gradient_clip_val"]
    loss = partial(plan.data.loss, net)
    steps = Steps(net, loss, model["weight_decay"], clip, plan.decay)
    if plan.compiles:
        # Blocks are alike, so that they are compiled once for all. The graphs of more rows than
        # torch allows by default would silently not be compiled.
        torch._dynamo.config.recompile_limit = 64
        for part in getattr(net, "blocks", [net]):
            part.compile(dynamic=False)
    return steps


def measure(plan: Plan, row: dict[str, Any], seed: int) -> Run:
    """Return the time and memory of a row's step, on a network that serves for nothing else."""
    held, cuda = 0, runner.device().type == "cuda"
    first, *batches = plan.data.batches(seed, 1 + sets.TIMED)
    if cuda:
        scratch()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    steps = begin(plan, row, seed)
    steps(0.0, *first)  # captures the graph
    times = [turns.seconds(partial(steps, 0.0, *batch)) for batch in batches]
    peak = {"peak_memory_gb": (torch.cuda.max_memory_allocated() - held) / 1e9} if cuda else {}
    return {"step_ms": 1e3 * statistics.median(times), **peak}


def run(plan: Plan, who: Run) -> Work:
    """Train as the tasks do (AdamW, warm-up, cosine, clipping), and test."""
    row, seed, first = plan.rows[who["row"]], who["seed"], who["row"] not in plan.measured
    if torch.cuda.is_available() and (torch.cuda.memory_reserved() > FULL * torch.cuda.mem_get_info()[1]):
        gc.collect()  # networks and graphs of earlier runs, which reference each other
        torch.cuda.empty_cache()
    if first:
        plan.measured[who["row"]] = measure(plan, row, seed)
    own = plan.measured[who["row"]]
    count = plan.steps if plan.seconds is None else int(1e3 * plan.seconds / own["step_ms"])
    steps, curve = begin(plan, row, seed), []
    net, highest = steps.averaged, row.get("lr", plan.config["model"]["lr"])
    for number, batch in enumerate(plan.data.batches(seed, count), 1):
        steps(highest * warm_cosine(number - 1, count), *batch)
        yield turns.AHEAD
        if number * POINTS // count > (number - 1) * POINTS // count:
            found = yield from plan.data.validate(net.eval())
            steps.net.train()
            if found:
                curve.append([number * own["step_ms"] / 1e3, found[plan.data.measures[0]]])
    result = yield from plan.data.test(net.eval(), first)
    return {
        **{k: v for k, v in result.items() if k != "confusion"},
        **(own if first else {}),
        **({"curve": curve} if curve else {}),
        "steps": count,
        "parameters": sum(p.numel() for p in net.parameters()),
        "state_size": state_size(net),
    }


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
    if any("curve" in run for run in found):
        plots.times(found, rows, path / "times.png")


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
    return {f"{name}, lr {lr:g}": {**row, "lr": lr} for name, row in rows.items() for lr in rates} or rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="in the config, such as data.init_args.batch_size=16"
    )
    parser.add_argument("--file", type=Path, help="a YAML file of rows")
    parser.add_argument("--rows", nargs="+", help="default: those of --file, or all mixers")
    parser.add_argument("--lr", nargs="+", type=float, default=[], help="each row at each of these")
    parser.add_argument("--steps", type=int, help="default: as in the config")
    parser.add_argument("--seconds", type=float, help="as many steps as each row does in this time")
    parser.add_argument("--compile", action="store_true", help="each row by torch.compile")
    runner.add_options(parser, "runs/family/CONFIG")
    parser.set_defaults(resume=True)
    o = parser.parse_args(arguments)
    o.out = o.out or Path("runs/family") / o.config.stem
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # else 8 streams share a queue
    rows = at_rates(catalogue.changes(o.file, o.rows), o.lr)  # a wrong one fails here
    config = read_config(o.config, o.set)
    if left := [name for name in LEFT_OUT if config["model"].get(name) is not None]:
        parser.error(f"{o.config}: model.{left[0]}: expected null, the schedule has it not")
    data = sets.load(config)
    names = list(rows)
    plan = Plan(config, rows, data, o.steps or data.steps, o.seconds, o.compile)
    measures = (*data.measures, "step_ms", "latency_ms", "peak_memory_gb")
    runner.compare(
        o,
        [{"row": row, "seed": seed} for seed, row in product(o.seeds, names)],
        partial(run, plan),
        do=turns.run_all,
        table=lambda runs: tables.summary(runs, names, measures),
        say=partial(say, measures[0]),
        draw=partial(draw, names, measures[0], o.out),
    )


if __name__ == "__main__":
    main()
