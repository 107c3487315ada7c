"""Compare every mixer, with one, two and 2 x axes scans, in one small network on the same data.

    python tasks/evidence/family.py configs/fashion_mnist.yaml --seeds 0 1 2
    python tasks/evidence/family.py configs/adrenal.yaml --rows Identity SoftmaxAttention "GLA axes"

The config is one of tasks/image_cls.py, which trains one network by Lightning. Here a step is
replayed from a CUDA graph, so that a run takes seconds and a time is that of the card; all rows
train for the same steps. Rows are mixers, `NAME` or `NAME scan`. A run under --out is repeated only
if it failed. --jobs 2 takes two cards. Writes table.md, runs.csv, runs.json and family.png.
"""

from __future__ import annotations

import gc
import statistics
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from ndlightnet import NDLightNet
from ndlightnet.training import ImageData
from ndlightnet.training.classification.metrics import scores
from ndlightnet.training.core.costs import state_size
from ndlightnet.training.core.optim import warm_cosine
from ndlightnet_evidence import plots, runner, tables
from ndlightnet_evidence.catalogue import factory, family
from ndlightnet_evidence.graphs import Replay, Steps
from ndlightnet_evidence.runner import Run

EVALUATION = 200  # images at a time


@cache
def load(config: Path, root: Path | None, epochs: int | None) -> tuple[dict[str, Any], ImageData]:
    """Return the config's content and its data, loaded once in a process."""
    content = yaml.safe_load(config.read_text())
    content["trainer"]["max_epochs"] = epochs or content["trainer"]["max_epochs"]
    given = content["data"]["init_args"] | ({"root": str(root)} if root else {})
    data = ImageData(**given)
    data.setup("fit")
    return content, data


def train(net: nn.Module, data: ImageData, config: dict[str, Any]) -> list[float]:
    """Train as ImageTask does (AdamW, warm-up, cosine, clipping); return seconds of every step."""
    model, epochs, device = config["model"], config["trainer"]["max_epochs"], runner.device()
    entropy = nn.CrossEntropyLoss(label_smoothing=0.1)

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        return entropy(answer(net, images), labels)

    steps = Steps(net, loss, model["weight_decay"], config["trainer"]["gradient_clip_val"])
    loader = data.train_dataloader()
    total = epochs * len(loader)
    seconds: list[float] = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            moved = [x.to(device, non_blocking=True) for x in batch]
            images, labels, _ = data.on_after_batch_transfer(moved, 0)
            rate = model["lr"] * warm_cosine(len(seconds), total)
            start = time.perf_counter()
            steps(rate, images, labels)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    return seconds


def answer(net: nn.Module, images: Tensor) -> Tensor:
    """Return logits in float32, on a card computed in bfloat16."""
    kind = images.device.type
    with torch.autocast(kind, torch.bfloat16, kind == "cuda", cache_enabled=False):
        out: Tensor = net(images)
    return out.float()


@torch.no_grad()
def evaluate(net: nn.Module, data: ImageData) -> tuple[dict[str, Any], float]:
    """Return scores on the test set, and the median seconds of EVALUATION images."""
    images, device = data.test_set.images[:, None], runner.device()

    def probabilities(x: Tensor) -> Tensor:
        return answer(net, (x.float() - data.mean) / data.std).softmax(-1)

    replay = Replay(probabilities, images[:EVALUATION].to(device))
    found, seconds = [], []
    for part in images.split(EVALUATION):
        part = part.to(device)
        start = time.perf_counter()
        out = replay(part)[: len(part)]
        found.append(out.cpu())
        seconds.append(time.perf_counter() - start)
    return scores(torch.cat(found), data.test_set.labels, data.classes), statistics.median(seconds)


def scratch() -> None:
    """Do a small step, so that what libraries allocate at the first one counts for no row."""
    net = nn.Linear(16, 16).to(runner.device())
    steps = Steps(net, lambda x: answer(net, x).square().mean(), 0.0, 1.0)
    steps(0.0, torch.zeros(16, 16, device=runner.device()))


def run(o: Namespace, who: Run) -> Run:
    config, data = load(o.config, o.root, o.epochs)
    device, held = runner.device(), 0
    if device.type == "cuda":
        scratch()
        gc.collect()  # networks and graphs of earlier runs, which reference each other
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    torch.manual_seed(who["seed"])  # of weights, drop path, order and shifts of the batches
    net = NDLightNet(**config["model"]["net"]["init_args"], mixer=factory(who["row"])).to(device)
    seconds = train(net.train(), data, config)
    result, latency = evaluate(net.eval(), data)
    cuda = device.type == "cuda"
    return {
        **{k: v for k, v in result.items() if k != "confusion"},
        "parameters": sum(p.numel() for p in net.parameters()), "state_size": state_size(net),
        "steps": len(seconds), "step_ms": 1e3 * statistics.median(seconds),
        "latency_ms": 1e3 * latency,
        "peak_memory_gb": (torch.cuda.max_memory_allocated() - held) / 1e9 if cuda else None,
    }  # fmt: skip


def draw(rows: Sequence[str], path: Path, runs: Sequence[Run]) -> None:
    """Draw the accuracy of every row, a point for each seed, sorted by mean, and step times."""
    done = {row: mine for row in rows if (mine := tables.of_row(runs, row))}
    top1, ms = (
        {row: statistics.mean(r[name] for r in mine) for row, mine in done.items()}
        for name in ("top1", "step_ms")
    )
    order = sorted(done, key=lambda row: top1[row])
    figure = plots.figure(9, 0.2 * len(order) + 1.2)
    axes, clock = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for height, row in enumerate(order):
        color = plots.SCANS[row.partition(" ")[2]]
        for r in done[row]:
            axes.plot(r["top1"], height, "o", color=color, markersize=4, alpha=0.5)
        axes.plot(top1[row], height, "|", color=color, markersize=11)
        clock.plot(ms[row], height, "s", color=color, markersize=4)
    axes.set_yticks(range(len(order)), order, fontsize=7)
    axes.set_ylim(-1, len(order))
    for scan, color in plots.SCANS.items():
        axes.plot([], [], "o", color=color, markersize=4, label=scan or "all at once, or none")
    axes.legend(frameon=False, fontsize=7, loc="lower right")
    axes.set_xlabel("accuracy")
    clock.set(xlabel="a training step, ms", xscale="log")
    clock.xaxis.set_major_formatter("{x:g}")
    plots.finish((axes, clock))
    clock.minorticks_on()  # times may lie within a decade
    plots.save(figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--root", type=Path, help="the data; default: as in the config")
    parser.add_argument("--rows", nargs="+", default=family())
    parser.add_argument("--epochs", type=int, help="default: as in the config")
    runner.add_options(parser, "runs/family/CONFIG")
    parser.set_defaults(resume=True)
    o = parser.parse_args(arguments)
    o.out = o.out or Path("runs/family") / o.config.stem
    for row in o.rows:
        factory(row)  # a wrong one fails here
    load(o.config, o.root, o.epochs)  # and so do data that are not there
    runner.compare(
        o, [{"row": row, "seed": seed} for seed, row in product(o.seeds, o.rows)], partial(run, o),
        table=lambda runs: tables.summary(runs, o.rows),
        say=lambda run: f"accuracy {run['top1']:.3f}, {run['run_seconds']:.0f} s",
        draw=partial(draw, o.rows, o.out / "family.png"),
    )  # fmt: skip


if __name__ == "__main__":
    main()
