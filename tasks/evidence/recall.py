"""Test how long a stream's memory holds the last event, and whether older events disturb it.

    recall=tasks/evidence/recall.py
    python $recall                                                                  on a GPU
    python $recall --gap 64 --frames 256 --batch 32 --steps 400 --streams 256 \
        --rows plain "window 8" "forget 0.2" "forget 0.05" identity                 on a CPU

A stream is noise in which some frames show one of a few symbols: events. At every frame the network
predicts which symbol came last. It is trained on streams with 1 to --gap frames between events,
each octave alike, and tested k frames after an event with none or many before it. Rows differ in
the mixer only, which is the only memory: there is no MD-TPE, and MD-LRPE in "cosine" and "rotary"
only.

Rows: "plain" (keys alone weight the frames), "window FRAMES", "forget RATE", "forget R1,R2,.."
(rates of the heads in turn), "cosine" (plain with MD-LRPE), "softmax", "rotary" (softmax with
MD-LRPE), "identity" (no memory). Writes table.md, runs.csv, runs.json and recall.png under --out.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from ndlightnet import Identity, LightNetAttention, NDLightNet, SoftmaxAttention
from ndlightnet_evidence import plots, runner, tables
from ndlightnet_evidence.runner import Run

SYMBOLS, LOUD = 8, 8.0  # an event adds LOUD to its symbol's channel and to one that all share
ROWS = ["plain", "window 64", "forget 0.02", "forget 0.2,0.02,0.002,0.0002", "forget 0.002", "identity"]
NUMBERS = {
    "gap": 4096,
    "frames": 8192,
    "batch": 8,
    "steps": 500,
    "lr": 3e-3,
    "dim": 32,
    "heads": 8,
    "depth": 2,
    "streams": 512,
}


def event_frames(batch: int, events: int, gap: int, rng: torch.Generator) -> Tensor:
    """Draw frames (batch, events), increasing: log-uniform gaps of 1 to `gap`, also in front."""
    u = torch.rand(batch, events, generator=rng, device=rng.device)
    return torch.exp(u * math.log(gap + 1)).long().clamp(1, gap).cumsum(1) - 1


def streams(at: Tensor, frames: int, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return cells (batch, SYMBOLS + 1, frames) with events at frames `at`, without those past the
    end; for every frame the last event's symbol, -1 before the first, and the frames since then."""
    symbols = torch.randint(SYMBOLS, at.shape, generator=rng, device=at.device)
    shown = torch.full((len(at), frames + 1), -1, device=at.device)
    shown = shown.scatter(1, at.clamp(max=frames), symbols)[:, :frames]
    now = torch.arange(frames, device=at.device)
    last = torch.where(shown >= 0, now, -1).cummax(1).values
    label = shown.gather(1, last.clamp(min=0))  # frame 0 shows -1 where no event came yet
    event = torch.stack([*(shown == s for s in range(SYMBOLS)), shown >= 0], 1)
    noise = torch.randn(event.shape, generator=rng, device=at.device)
    return noise + LOUD * event, label, now - last


def mixer(row: str, heads: int) -> Callable[[int], nn.Module]:
    kind, _, value = row.partition(" ")
    code = "cosine" if kind == "cosine" else None
    lightnet = partial(LightNetAttention, heads=heads, lrpe=code, local=None)
    softmax = partial(SoftmaxAttention, heads=max(1, heads // 4), rotary=kind == "rotary")

    # the kernels' tiles would be almost empty: a frame is one token, a head has few channels
    torch_form = partial(lightnet, impl="torch")
    if kind == "window":
        return partial(torch_form, window=int(value))
    if kind == "forget":
        rates = [float(rate) for rate in value.split(",")]
        return partial(torch_form, forget=(rates * heads)[:heads])
    rest: dict[str, Any] = {
        "plain": lightnet,
        "cosine": lightnet,
        "softmax": softmax,
        "rotary": softmax,
        "identity": Identity,
    }
    return rest[kind]


def logits(net: NDLightNet, cells: Tensor) -> Tensor:
    """Return the output of the head at every frame, (batch, frames, SYMBOLS)."""
    return net.get_classifier()(net.forward_features(cells))


def train(net: NDLightNet, rng: torch.Generator, o: Namespace) -> float:
    """Train the network and return the mean loss of the last steps."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=o.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, o.lr, total_steps=o.steps)
    losses = []
    for _ in range(o.steps):
        at = event_frames(o.batch, max(64, o.frames // 16), o.gap, rng)  # more than fit
        cells, label, age = streams(at, o.frames, rng)
        each = cross_entropy(logits(net, cells).mT, label, ignore_index=-1, reduction="none")
        weight = (label >= 0) / (1 + age)  # each octave of ages counts alike
        loss = (weight * each).sum() / weight.sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return float(torch.stack(losses[-50:]).mean())


@torch.no_grad()
def accuracy(net: NDLightNet, older: int, rng: torch.Generator, o: Namespace) -> list[float]:
    """Return the share of right answers k frames after an event with `older` events before it."""
    fit = max(1, 32 * o.batch * o.frames // ((older + 1) * o.gap))  # bounds the memory
    hits = []
    for done in range(0, o.streams, fit):
        at = event_frames(min(fit, o.streams - done), older + 1, o.gap, rng)
        queries = at[:, -1:] + torch.tensor(o.k, device=at.device)
        cells, label, _ = streams(at, int(queries.max()) + 1, rng)
        hits.append((logits(net, cells).argmax(-1) == label).gather(1, queries))
    return [round(x, 4) for x in torch.cat(hits).double().mean(0).tolist()]


def most_frequent(older: int) -> float:
    """Return how often the most frequent symbol is the last: best for a memory without order."""
    rng = torch.Generator().manual_seed(0)
    shown = torch.randint(SYMBOLS, (20_000, older + 1), generator=rng)
    return float(one_hot(shown, SYMBOLS).sum(1).amax(1).double().mean()) / (older + 1)


def run(o: Namespace, who: Run) -> Run:
    """Train and test a row; return its curve for each number of older events."""
    torch.manual_seed(who["seed"])
    device = runner.device()
    make = mixer(who["row"], o.heads)
    net = NDLightNet(
        1, SYMBOLS + 1, SYMBOLS, patch_size=1, embed_dim=o.dim, depth=o.depth, mixer=make, tpe=False, causal=True
    ).to(device)
    rng = torch.Generator(device)
    loss, curves = train(net, rng.manual_seed(who["seed"]), o), {}
    for older in o.older:
        right = accuracy(net.eval(), older, rng.manual_seed(10**6 + who["seed"]), o)
        curves[f"after {older} older events" if older else "the first event"] = {
            "x_label": "frames since the last event",
            "x": o.k,
            "accuracy": right,
            "most frequent so far": [most_frequent(older)] * len(o.k),
            "chance": [1 / SYMBOLS] * len(o.k),
        }
    return {"loss": loss, "curves": curves}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=ROWS)
    parser.add_argument("--older", nargs="+", type=int, default=[0, 64], help="events before it")
    for name, number in NUMBERS.items():
        parser.add_argument(f"--{name}", type=type(number), default=number, help=f"{number}")
    runner.add_options(parser, "runs/recall")
    o = parser.parse_args(arguments)
    o.out = o.out or Path("runs/recall")
    o.k = [1 << i for i in range(o.gap.bit_length())]
    for row in o.rows:
        mixer(row, o.heads)  # a wrong one fails here
    runner.compare(
        o,
        [{"row": row, "seed": seed} for seed, row in product(o.seeds, o.rows)],
        partial(run, o),
        table=lambda runs: tables.curves(runs, o.rows),
        say=runner.say_curves,
        draw=lambda runs: plots.curves(runs, o.rows, o.out / "recall.png", ["chance", "most frequent so far"]),
        lines=runner.curve_lines,
    )


if __name__ == "__main__":
    main()
