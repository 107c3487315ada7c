"""Train networks of other libraries with their own attention, and with ours swapped in by one line.

    python tasks/evidence/swap.py                                      two minutes on a GPU
    python tasks/evidence/swap.py --tasks vit --rows own ours GLA SoftmaxAttention

Tasks: "vit", timm's ViT-Ti on the photographs of cifar10, 32 x 32 in patches of --patch (tested on
others, all or --test of them); "unetr", MONAI's UNETR on drawn CT phantoms of --size with seven
labels (tested on others). Both need timm and monai installed, and no network.
Rows: "own", the network as its library builds it; "ours", after `replace_attention(net)`; the name
of a mixer, after `replace_attention(net, NAME)`. All rows of a seed get the same batches.
Steps are replayed from CUDA graphs in bfloat16, so that times are those of the card.
Writes table.md, runs.csv and runs.json under --out.
"""

from __future__ import annotations

import io
import tarfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, pad

from ndlightnet import mixers
from ndlightnet.data.folders import find_root
from ndlightnet.data.made.phantoms import LABELS, draw_phantom
from ndlightnet.integrations import replace_attention
from ndlightnet.training.core.optim import warm_cosine
from ndlightnet_evidence import runner, sets, tables
from ndlightnet_evidence.graphs import Steps
from ndlightnet_evidence.runner import Run

SHOWN = 6  # points of the loss curve
MEASURES = ("train_loss", "test_loss", "top1", "mean_dice", "step_ms", "peak_memory_gb")
Data = tuple[Tensor, Tensor]


def vit(o: Namespace) -> nn.Module:
    import timm

    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=o.patch, num_classes=10, depth=o.depth)


def unetr(o: Namespace) -> nn.Module:
    from monai.networks.nets import UNETR

    heads = o.hidden // 64 or 1
    return UNETR(1, len(LABELS), o.size, 16, o.hidden, 4 * o.hidden, heads)


@cache
def photographs(folder: Path, part: str) -> Data:
    """Return images (n, 3, 32, 32) uint8 and classes (n,)."""
    from PIL import Image

    images, names = [], []
    with tarfile.open(folder / f"{part}.tar.xz") as archive:
        for member in archive:
            if member.isfile():
                file = archive.extractfile(member)
                assert file is not None
                images.append(np.asarray(Image.open(io.BytesIO(file.read())).convert("RGB")))
                names.append(member.name.split("/")[-2])
    number = {name: i for i, name in enumerate(sorted(set(names)))}
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
    return pixels, torch.tensor([number[name] for name in names])


def phantom(size: tuple[int, int, int], seed: int) -> Data:
    """Draw a phantom: image (1, *size), HU / 500 from -2 to 2; labels (*size) int64. Both run to
    the right, front and head."""
    image, label, affine = draw_phantom(np.random.default_rng(seed))
    if affine[0, 0] < 0:
        image, label = image[::-1, ::-1].copy(), label[::-1, ::-1].copy()
    x = torch.from_numpy(image).float()[None, None].clamp(-1000, 1000) / 500
    x = interpolate(x, size, mode="trilinear")[0]
    y = interpolate(torch.from_numpy(label)[None, None].float(), size, mode="nearest")[0, 0]
    return x, y.long()


@cache
def phantoms(size: tuple[int, int, int], seeds: range) -> Data:
    """Return images (n, 1, *size) and labels (n, *size)."""
    draw = partial(phantom, size)
    if len(seeds) < 5:
        pairs = list(map(draw, seeds))
    else:
        pools = {"initializer": torch.set_num_threads, "initargs": (1,)}
        with ProcessPoolExecutor(mp_context=get_context("spawn"), **pools) as pool:
            pairs = list(pool.map(draw, seeds))
    images, labels = zip(*pairs, strict=True)
    return torch.stack(images), torch.stack(labels)


def shifted(x: Tensor, rng: torch.Generator) -> Tensor:
    """Shift images (n, c, h, w) by up to 4 pixels, and mirror half of them."""
    n, _, height, width = x.shape
    dy, dx = torch.randint(9, (2, n, 1), generator=rng, device=x.device)
    rows = dy + torch.arange(height, device=x.device)
    columns = dx + torch.arange(width, device=x.device)
    mirrored = torch.rand(n, 1, generator=rng, device=x.device) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    each = torch.arange(n, device=x.device)[:, None, None]
    return pad(x, [4] * 4)[each, :, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)


def classes_loss(logits: Tensor, label: Tensor) -> Tensor:
    return cross_entropy(logits.float(), label)


def voxels_loss(logits: Tensor, label: Tensor) -> Tensor:
    """Return cross entropy + 1 - the mean Dice of probabilities, without the background's."""
    logits = logits.float()
    names = torch.arange(logits.shape[1], device=label.device).view(1, -1, *[1] * (label.ndim - 1))
    p, truth, space = logits.softmax(1), label[:, None] == names, tuple(range(2, logits.ndim))
    overlap, sizes = (p * truth).sum(space), p.sum(space) + truth.sum(space)
    dice = (2 * overlap + 1) / (sizes + 1)
    return cross_entropy(logits, label) + 1 - dice[:, 1:].mean()


class Task:
    """Data of a task on a device, its network, its loss and its test."""

    def __init__(self, name: str, o: Namespace, device: torch.device) -> None:
        self.name, self.batch = name, o.batch if name == "vit" else o.volumes
        self.lr = o.lr if name == "vit" else o.unetr_lr
        self.make: Callable[[], nn.Module] = partial({"vit": vit, "unetr": unetr}[name], o)
        self.loss = classes_loss if name == "vit" else voxels_loss
        if name == "vit":
            folder = find_root(o.data)
            parts = [photographs(folder, part) for part in ("train", "test")]
            if o.test:
                x, y = parts[1]
                some = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[: o.test]
                parts[1] = x[some], y[some]
        else:
            kinds = range(o.cases), range(1000, 1000 + max(1, o.cases // 4))
            parts = [phantoms(tuple(o.size), seeds) for seeds in kinds]
        (self.x, self.y), self.test = ([part.to(device) for part in pair] for pair in parts)

    def inputs(self, x: Tensor) -> Tensor:
        return x if x.is_floating_point() else (x.float() / 255 - 0.5) / 0.25

    def draw(self, rng: torch.Generator) -> Data:
        """Return a batch for training."""
        at = torch.randint(len(self.y), (self.batch,), generator=rng, device=self.y.device)
        x = self.inputs(self.x[at])
        return (shifted(x, rng) if self.name == "vit" else x), self.y[at]

    @torch.no_grad()
    def measure(self, net: nn.Module, amp: torch.autocast) -> dict[str, float]:
        """Return the loss and the accuracy or Dice of the test data."""
        losses, right = [], []
        for x, y in zip(*(part.split(self.batch) for part in self.test), strict=True):
            with amp:
                logits = net(self.inputs(x))
            losses.append(self.loss(logits, y) * len(y))
            guess = logits.argmax(1)
            right.append((guess == y).double() if self.name == "vit" else hard_dice(guess, y))
        score = "top1" if self.name == "vit" else "mean_dice"
        count = len(self.test[1])
        return {"test_loss": float(torch.stack(losses).sum() / count), score: float(torch.cat(right).mean())}


def hard_dice(guess: Tensor, truth: Tensor) -> Tensor:
    """Return the mean Dice over the labels of each case, (n,)."""
    dice = []
    for label in range(1, len(LABELS)):
        a, b = ((x == label).flatten(1) for x in (guess, truth))
        dice.append((2 * (a & b).sum(1) + 1) / (a.sum(1) + b.sum(1) + 1))
    return torch.stack(dice, 1).double().mean(1)


def run(o: Namespace, tasks: dict[str, Task], who: Run) -> Run:
    """Train and test a row."""
    device, task = runner.device(), tasks[who["task"]]
    amp = sets.bfloat16(device)
    torch.manual_seed(who["seed"])
    net = task.make()
    if who["row"] == "ours":
        replace_attention(net)
    elif who["row"] != "own":
        replace_attention(net, who["row"])
    net = net.to(device).train()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with amp:
            logits = net(x)
        return task.loss(logits, y)

    rng = torch.Generator(device).manual_seed(who["seed"])
    steps, losses, timed = Steps(net, loss, o.weight_decay, 1.0), [], o.steps // 2
    marks: list[Any] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for step in range(o.steps):
        if marks and step == timed:
            marks[0].record()
        value = steps(task.lr * warm_cosine(step, o.steps), *task.draw(rng))
        losses.append(value.clone())
    found: dict[str, Any] = {}
    if marks:
        marks[1].record()
        torch.cuda.synchronize()
        found["step_ms"] = marks[0].elapsed_time(marks[1]) / (o.steps - timed)
        found["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 2**30
    curve = torch.stack(losses).tolist()
    each = max(1, o.steps // SHOWN)
    return {
        "parameters": sum(p.numel() for p in net.parameters()),
        "train_loss": float(np.mean(curve[-each:])),
        "losses": curve,
        **found,
        **task.measure(net.eval(), amp),
    }


def table(o: Namespace, runs: Sequence[Run]) -> str:
    """Return the tables of each task: what was measured, and the loss over the steps."""
    parts = []
    for task in o.tasks:
        mine = [run for run in runs if run["task"] == task]
        each = max(1, o.steps // SHOWN)
        firsts = range(0, o.steps - each + 1, each)
        body = []
        for row in o.rows:
            done = tables.of_row(mine, row)
            spans = ([np.mean(r["losses"][at : at + each]) for r in done] for at in firsts)
            body.append([row, *(tables.spread(values) for values in spans)])
        head = ["training loss, steps", *(f"{at + 1} to {at + each}" for at in firsts)]
        parts.append(f"### {task}\n\n{tables.summary(mine, o.rows, MEASURES)}\n{tables.markdown(head, body)}")
    line = "Lines changed from own to ours: 1, `replace_attention(net)`."
    return "\n".join([*parts, line]) + "\n"


def say(run: Run) -> str:
    time = f", {run['step_ms']:.2f} ms a step" if "step_ms" in run else ""
    score = next(f"{key} {run[key]:.3f}" for key in ("top1", "mean_dice") if key in run)
    return f"loss {run['train_loss']:.3f}, {score}, {run['run_seconds']:.0f} s{time}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add = partial(parser.add_argument, help="default: %(default)s")
    add("--tasks", nargs="+", choices=("vit", "unetr"), default=["vit", "unetr"])
    add("--rows", nargs="+", default=["own", "ours"])
    add("--steps", type=int, default=300)
    add("--data", type=Path, default=Path("cifar10"))
    add("--batch", type=int, default=512)
    add("--patch", type=int, default=4)
    add("--depth", type=int, default=12)
    add("--test", type=int, default=0)
    add("--lr", type=float, default=1e-3)
    add("--weight-decay", type=float, default=0.05)
    add("--size", type=int, nargs=3, default=(96, 80, 64))
    add("--hidden", type=int, default=384)
    add("--cases", type=int, default=32)
    add("--volumes", type=int, default=2)
    add("--unetr-lr", type=float, default=5e-4)
    runner.add_options(parser, "runs/swap")
    o = parser.parse_args(arguments)
    o.out = o.out or Path("runs/swap")
    for row in o.rows:
        if row not in ("own", "ours") and row not in mixers.__all__:
            parser.error(f"--rows {row}: expected own, ours or one of {', '.join(mixers.__all__)}")
    device = runner.device()
    tasks = {name: Task(name, o, device) for name in o.tasks}
    wanted = product(o.tasks, o.seeds, o.rows)
    runner.compare(
        o,
        [{"row": row, "task": task, "seed": seed} for task, seed, row in wanted],
        partial(run, o, tasks),
        table=partial(table, o),
        say=say,
        lines=lambda run: [{key: value for key, value in run.items() if key != "losses"}],
    )


if __name__ == "__main__":
    main()
