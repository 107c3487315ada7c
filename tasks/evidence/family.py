"""Every mixer, with one, two and 2 x axes scans, in the same small network: same data, same steps.

python tasks/evidence/family.py configs/fashion_mnist.yaml --seeds 0 1 2
python tasks/evidence/family.py configs/adrenal.yaml --rows Identity SoftmaxAttention "GLA axes"

The config is one of tasks/image_cls.py, which trains one network with all that Lightning has; here
a step is replayed from a CUDA graph, so that a run takes seconds and a time is that of the card.
Rows are those of tasks/evidence/compare.py. A run that is under --out is not made again, one that failed is.
Two cards: CUDA_VISIBLE_DEVICES=0 ... --part 0 2 and CUDA_VISIBLE_DEVICES=1 ... --part 1 2, with the
same --out. Writes table.md, runs.csv and family.png.
"""

from __future__ import annotations

import csv
import gc
import json
import statistics
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import compare
import torch
import yaml
from ndlightnet_evidence.bench.family import SCANS
from ndlightnet_evidence.graphs import Replay, Steps
from torch import Tensor, nn

from ndlightnet import NDLightNet
from ndlightnet.nn import mixers
from ndlightnet.training import ImageData
from ndlightnet.training.measures import scores, state_size
from ndlightnet.training.optim import warm_cosine
from ndlightnet.training.report import write_json

EVALUATION = 200  # images at a time
COLUMNS = ("top1", "balanced_accuracy", "auc", "step_ms", "latency_ms", "peak_mb")


def factory(row: str) -> Callable[[int], nn.Module]:
    """The mixer of a row `NAME` or `NAME scan`."""
    compare.overrides(row)  # an error for a row that there is not
    name, *scan = row.split(" ")
    kind: Any = getattr(mixers, name)
    return partial(kind, scan=scan[0]) if scan else kind


def train(net: nn.Module, data: ImageData, config: dict[str, Any], device: str) -> list[float]:
    """As ImageTask does: AdamW, warm-up and cosine, clipping. Seconds of every step."""
    model, epochs = config["model"], config["trainer"]["max_epochs"]
    entropy = nn.CrossEntropyLoss(label_smoothing=0.1)

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, device == "cuda", cache_enabled=False):
            value: Tensor = entropy(net(images).float(), labels)
        return value

    steps = Steps(net, loss, model["weight_decay"], config["trainer"]["gradient_clip_val"])
    loader = data.train_dataloader()
    total, seconds = epochs * len(loader), []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            moved = [x.to(device, non_blocking=True) for x in batch]
            images, labels, _ = data.on_after_batch_transfer(moved, 0)
            rate = model["lr"] * warm_cosine(len(seconds), total)
            start = time.perf_counter()
            steps(rate, images, labels)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    return seconds


@torch.no_grad()
def evaluate(net: nn.Module, data: ImageData, device: str) -> tuple[dict[str, Any], float]:
    """Scores on the test set, and the median seconds of EVALUATION images."""
    images = data.test_set.images[:, None]

    def answer(x: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, device == "cuda", cache_enabled=False):
            out: Tensor = net((x.float() - data.mean) / data.deviation)
        return out.float().softmax(-1)

    replay = Replay(answer, images[:EVALUATION].to(device))
    found, seconds = [], []
    for part in images.split(EVALUATION):
        part = part.to(device)
        start = time.perf_counter()
        out = replay(part)[: len(part)]
        found.append(out.cpu())
        seconds.append(time.perf_counter() - start)
    return scores(torch.cat(found), data.test_set.labels, data.classes), statistics.median(seconds)


def scratch(device: str) -> None:
    """A small step: what libraries allocate with the first one stays, and is no row's."""
    net = nn.Linear(16, 16).to(device)

    def loss(x: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):
            value: Tensor = net(x).float().square().mean()
        return value

    Steps(net, loss, 0.0, 1.0)(0.0, torch.zeros(16, 16, device=device))


def run(
    row: str, seed: int, config: dict[str, Any], data: ImageData, device: str
) -> dict[str, Any]:
    held = 0
    if device == "cuda":
        scratch(device)
        gc.collect()  # networks and graphs of runs before, which hold each other
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    torch.manual_seed(seed)  # weights, drop path, order and moves of the batches
    net = NDLightNet(**config["model"]["net"]["init_args"], mixer=factory(row)).to(device)
    seconds = train(net.train(), data, config, device)
    result, latency = evaluate(net.eval(), data, device)
    return {
        "row": row, "seed": seed, **{k: v for k, v in result.items() if k != "confusion"},
        "parameters": sum(p.numel() for p in net.parameters()), "state_size": state_size(net),
        "steps": len(seconds), "step_ms": 1e3 * statistics.median(seconds),
        "latency_ms": 1e3 * latency,
        "peak_mb": (torch.cuda.max_memory_allocated() - held) / 1e6 if device == "cuda" else None,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
    }  # fmt: skip


def table(runs: Sequence[dict[str, Any]], rows: Sequence[str]) -> str:
    """Markdown: mean and deviation over seeds; of times and memory the mean."""
    shown = [c for c in COLUMNS if any(r.get(c) is not None for r in runs)]
    lines = [f"| mixer | parameters | state | {' | '.join(shown)} | per seed |"]
    lines.append("|---|---|---|" + "---|" * (len(shown) + 1))
    for row in rows:
        mine = sorted((r for r in runs if r["row"] == row), key=lambda r: r["seed"])
        if not mine or "error" in mine[0]:
            lines.append(f"| {row} | {mine[0]['error'] if mine else 'not run'} |")
            continue
        cells = []
        for column in shown:
            values = [r[column] for r in mine]
            digits = 1 if column.endswith(("ms", "mb")) else 3
            cell = f"{statistics.mean(values):.{digits}f}"
            if digits == 3 and len(values) > 1:
                cell += f" ± {statistics.stdev(values):.3f}"
            cells.append(cell)
        state = mine[0]["state_size"]
        seeds = ", ".join(f"{r[shown[0]]:.3f}" for r in mine)
        lines.append(
            f"| {row} | {mine[0]['parameters'] / 1e6:.2f} M | {'-' if state is None else state} | "
            f"{' | '.join(cells)} | {seeds} |"
        )
    return "\n".join(lines) + "\n"


def draw(runs: Sequence[dict[str, Any]], rows: Sequence[str], path: Path) -> None:
    """Accuracy of every row, each seed a point, sorted by the mean, beside the time of a step."""
    from matplotlib.figure import Figure

    done = {row: [r for r in runs if r["row"] == row and "error" not in r] for row in rows}
    mean = {
        row: [statistics.mean(r[name] for r in mine) for name in ("top1", "step_ms")]
        for row, mine in done.items() if mine
    }  # fmt: skip
    order = sorted(mean, key=lambda row: mean[row][0])
    figure = Figure(figsize=(9, 0.2 * len(order) + 1.2), layout="constrained", facecolor="white")
    axes, clock = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for place, row in enumerate(order):
        color = SCANS[row.partition(" ")[2]]
        for r in done[row]:
            axes.plot(r["top1"], place, "o", color=color, markersize=4, alpha=0.5)
        axes.plot(mean[row][0], place, "|", color=color, markersize=11)
        clock.plot(mean[row][1], place, "s", color=color, markersize=4)
    axes.set_yticks(range(len(order)), order, fontsize=7)
    axes.set_ylim(-1, len(order))
    for scan, color in SCANS.items():
        axes.plot([], [], "o", color=color, markersize=4, label=scan or "all at once, or none")
    axes.legend(frameon=False, fontsize=7, loc="lower right")
    axes.set_xlabel("accuracy")
    clock.set(xlabel="a training step, ms", xscale="log")
    clock.xaxis.set_major_formatter("{x:g}")
    for panel in (axes, clock):
        panel.grid(color="#EEEEEE", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def save(o: Namespace) -> None:
    found = [json.loads(file.read_text()) for file in sorted(o.out.glob("runs/*.json"))]
    runs = [r for r in found if r["row"] in o.rows]
    (o.out / "table.md").write_text(table(runs, o.rows))
    names = ["row", "seed", "parameters", "state_size", *COLUMNS]
    with open(o.out / "runs.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(runs)
    draw(runs, o.rows, o.out / "family.png")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--root", type=Path, help="the data; default: as in the config")
    parser.add_argument("--rows", nargs="+", default=compare.family())
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, help="default: as in the config")
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="no new run starts after so many"
    )
    parser.add_argument("--part", nargs=2, type=int, default=(0, 1), metavar=("I", "N"),
                        help="every N-th run from the I-th on")  # fmt: skip
    parser.add_argument("--out", type=Path, help="default: runs/family/CONFIG")
    o = parser.parse_args(arguments)
    o.out = o.out or Path("runs/family") / o.config.stem
    for row in o.rows:
        factory(row)  # a wrong one fails here
    config = yaml.safe_load(o.config.read_text())
    config["trainer"]["max_epochs"] = o.epochs or config["trainer"]["max_epochs"]
    config["data"]["init_args"] |= {"root": str(o.root)} if o.root else {}
    data = ImageData(**config["data"]["init_args"])
    data.setup("fit")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    (o.out / "runs").mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    part, parts = o.part
    for seed, row in list(product(o.seeds, o.rows))[part::parts]:
        file = o.out / "runs" / f"{row.replace(' ', '_')}-{seed}.json"
        if time.monotonic() - begun > 60 * o.minutes:
            break
        if file.exists() and "error" not in json.loads(file.read_text()):
            continue
        start = time.monotonic()
        try:
            result = run(row, seed, config, data, device)
        except Exception as error:  # one row's failure is not the others'
            result = {"row": row, "seed": seed, "error": f"{type(error).__name__}: {error}"[:200]}
        write_json(file, result)
        said = result.get("error") or f"accuracy {result['top1']:.3f}"
        print(f"{row}, seed {seed}: {said}, {time.monotonic() - start:.0f} s", flush=True)
    save(o)
    print((o.out / "table.md").read_text())


if __name__ == "__main__":
    main()
