"""Train many networks that differ in one thing, on the same batches, in seconds a run.

    family=tasks/evidence/family.py
    python $family configs/fashion_mnist.yaml                 every mixer of the catalogue
    python $family configs/adrenal.yaml --rows Identity SoftmaxAttention "GLA axes" --steps 296
    python $family configs/adrenal.yaml --file tasks/evidence/configs/ladder/grids.yaml
    python $family configs/enwik8.yaml --file .../text.yaml --rows softmax text_mixer --lr 1e-3 2e-3

The config is one of tasks/image_cls.py, volume_cls.py or text_lm.py, which train one
network by Lightning. Here a step is replayed from a CUDA graph. Its time is that of a row's first
run, without waiting for data.

A row is a mixer, `NAME` or `NAME scan`, or an entry of --file, a YAML file: a name, and the
arguments of the network that it changes, or `lr`, or `net`, another network. All rows of a seed
get the same batches, and the schedule follows from --steps, or from --seconds: each row then does
as many steps as it does in this time. A run under --out is repeated only if it failed; delete --out
if a row has changed. Writes table.md, runs.csv, runs.json and family.png; for text also
lengths.png, for images with --seconds also times.png, the accuracy on held-out training images.
"""

from __future__ import annotations

import gc
import statistics
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml

from ndlightnet.training import AveragedWeights
from ndlightnet.training.core.optim import schedule_factor
from ndlightnet_evidence import catalogue, plots, runner, sets, tables
from ndlightnet_evidence.cuda_graphs import Steps, seconds
from ndlightnet_evidence.tables import Run

POINTS = 12  # of the curve over time
TIMED = 20  # steps
NOT_SCHEDULED = ("warmup_epochs", "min_lr", "layer_decay")  # of the tasks' schedule


@dataclass
class Study:
    """What all runs share: options, config, data, rows, and milliseconds of a step of the rows measured."""

    o: Namespace
    config: dict[str, Any]
    data: sets.Samples
    rows: dict[str, dict[str, Any]]
    step_ms: dict[str, float] = field(default_factory=dict)

    @property
    def decay(self) -> Callable[[int], float] | None:
        """The decay of the config's AveragedWeights at each step; None without it."""
        for callback in self.config["trainer"].get("callbacks") or []:
            if callback["class_path"].endswith(".AveragedWeights"):
                return AveragedWeights(**callback.get("init_args", {})).decay_of
        return None

    def begin(self, row: dict[str, Any], seed: int) -> Steps:
        """Return the steps of a row's network with the weights of a seed."""
        if torch.cuda.is_available():
            gc.collect()  # networks and graphs of earlier runs, which reference each other: no worker may free them
            torch.cuda.empty_cache()
        model = self.config["model"]
        torch.manual_seed(seed)  # of weights and drop path
        net = catalogue.network(model["net"], row).to(runner.device()).train()
        clip = self.config["trainer"]["gradient_clip_val"]
        betas = tuple(model.get("betas", (0.9, 0.999)))
        steps = Steps(net, partial(self.data.loss, net), model["weight_decay"], clip, self.decay, betas)
        if self.o.compile:
            # Blocks are alike, so that they are compiled once for all. The graphs of more rows than
            # torch allows by default would silently not be compiled.
            torch._dynamo.config.recompile_limit = 64
            for block in getattr(net, "blocks", [net]):
                block.compile(dynamic=False)
        return steps

    def measure(self, row: dict[str, Any], seed: int) -> float:
        """Return the milliseconds of a row's step, on a network that serves for nothing else."""
        steps = self.begin(row, seed)
        first, *batches = self.data.batches(seed, 1 + TIMED)
        steps(0.0, *first)  # captures the graph
        return 1e3 * statistics.median(seconds(partial(steps, 0.0, *batch)) for batch in batches)

    def run(self, spec: Run) -> Run:
        """Train as the tasks do (AdamW, warm-up, cosine, clipping), and test."""
        row, seed, data, o = self.rows[spec["row"]], spec["seed"], self.data, self.o
        first = spec["row"] not in self.step_ms
        if first:
            self.step_ms[spec["row"]] = self.measure(row, seed)
        ms = self.step_ms[spec["row"]]
        count = int(1e3 * o.seconds / ms) if o.seconds else o.steps or data.steps
        steps, curve = self.begin(row, seed), []
        net, highest = steps.averaged, row.get("lr", self.config["model"]["lr"])
        for number, batch in enumerate(data.batches(seed, count), 1):
            steps(highest * schedule_factor(number - 1, count), *batch)
            if o.seconds and number * POINTS // count > (number - 1) * POINTS // count:
                if scores := data.validate(net.eval()):
                    curve.append([number * ms / 1e3, scores["top1"]])
                steps.net.train()
        return {
            **{k: v for k, v in data.test(net.eval()).items() if k != "confusion"},
            **({"step_ms": ms} if first else {}),
            **({"curve": curve} if curve else {}),
            "steps": count,
            "parameters": sum(p.numel() for p in net.parameters()),
            "device": runner.device_name(),
        }


def draw(rows: Sequence[str], measure: str, path: Path, runs: Sequence[Run]) -> None:
    """Draw the measure of every row, a point for each seed, sorted by mean, and step times; for
    text also bits per byte over the length of windows, and accuracy over time."""
    runs = [run for run in runs if run[measure] is not None]
    by_row = {row: of_row for row in rows if (of_row := tables.of_row(runs, row))}
    mean = {row: statistics.mean(run[measure] for run in of_row) for row, of_row in by_row.items()}
    order = sorted(by_row, key=lambda row: mean[row])
    figure = plots.figure(9, 0.2 * len(order) + 1.2)
    axes, clock = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for height, row in enumerate(order):
        color = plots.SCANS.get(row.rpartition(" ")[2], plots.BLACK)
        for run in by_row[row]:
            axes.plot(run[measure], height, "o", color=color, markersize=4, alpha=0.5)
            if "step_ms" in run:
                clock.plot(run["step_ms"], height, "s", color=color, markersize=4)
        axes.plot(mean[row], height, "|", color=color, markersize=11)
    axes.set_yticks(range(len(order)), order, fontsize=7)
    axes.set_ylim(-1, len(order))
    for scan, color in plots.SCANS.items():
        axes.plot([], [], "o", color=color, markersize=4, label=scan or "all at once, or none")
    axes.legend(frameon=False, fontsize=7, loc="lower right")
    axes.set_xlabel(measure.replace("_", " ").replace("top1", "accuracy"))
    clock.set(xlabel="a training step, ms", xscale="log")
    plots.finish((axes, clock))
    plots.save(figure, path / "family.png")
    if measure == "bits_per_byte":
        lines = {row: plots.Line.over_fields(of_row, "bits_") for row, of_row in by_row.items()}
        plots.draw(path / "lengths.png", [plots.Panel("bytes in a window", lines, ylabel="bits per byte", base=2)])
    if lines := {row: plots.Line.over_curves(of_row) for row, of_row in by_row.items() if "curve" in of_row[0]}:
        label = "accuracy on held-out training images"
        plots.draw(path / "times.png", [plots.Panel("seconds of training", lines, ylabel=label)])


def report(measure: str, run: Run) -> str:
    step = f", {run['step_ms']:.2f} ms a step" if "step_ms" in run else ""
    return f"{measure} {tables.number(run[measure])}, {run['run_seconds']:.0f} s{step}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--file", type=Path, help="a YAML file of rows")
    parser.add_argument("--rows", nargs="+", help="default: those of --file, or all mixers")
    parser.add_argument("--lr", dest="rates", nargs="+", type=float, default=[], help="each row at each of these")
    parser.add_argument("--steps", type=int, help="default: as in the config")
    parser.add_argument("--seconds", type=float, help="as many steps as each row does in this time")
    parser.add_argument("--compile", action="store_true", help="each row by torch.compile")
    runner.add_options(parser, "runs/family/CONFIG")
    parser.set_defaults(resume=True)
    o = parser.parse_args(arguments)
    o.out = o.out or Path("runs/family") / o.config.stem
    config = yaml.safe_load(o.config.read_text())
    for name in NOT_SCHEDULED:
        if config["model"].get(name) is not None:
            parser.error(f"{o.config}: model.{name}: expected null, which the schedule here is for")
    try:
        rows, data = catalogue.changes(o.file, o.rows), sets.load(config)
    except ValueError as error:
        parser.error(str(error))
    rows = {f"{name}, lr {lr:g}": {**row, "lr": lr} for name, row in rows.items() for lr in o.rates} or rows
    names, study = list(rows), Study(o, config, data, rows)
    measures = data.measures
    runner.compare(
        o,
        [{"row": row, "seed": seed} for seed, row in product(o.seeds, names)],
        study.run,
        table=lambda runs: tables.summary(runs, names, (*measures, "step_ms")),
        report=partial(report, measures[0]),
        draw=partial(draw, names, measures[0], o.out),
    )


if __name__ == "__main__":
    main()
