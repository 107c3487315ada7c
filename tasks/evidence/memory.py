"""Test what the memory of a mixer can hold, and what it can compute.

    memory=tasks/evidence/memory.py
    python $memory recall                                                        on a GPU
    python $memory recall --gap 64 --frames 256 --batch 32 --tests 256           on a CPU
    python $memory associative                         all rows on recall, parity, s3 and "s5 swaps"
    python $memory associative --tasks parity s3 --rows deltanet deltanet_negative

`recall`: a stream is noise in which some frames show one of a few symbols: events. At every frame the
network predicts which symbol came last. It is trained with 1 to --gap frames between events, each
octave alike, and tested k frames after an event with none or many before it.

`associative --tasks recall` is multi-query associative recall (Zoology, arXiv 2312.04927): pairs of a
key and a value, then the keys again, soon after the pairs more often than late; at each the network
predicts the value. Half of --vocab are keys, half values; between the queries are words that are none
of the sequence's keys. Every row reads its tokens plus a causal convolution of 3 of them, so that none
fails because it cannot read the token before. Training takes the numbers of pairs in turn.

"parity", "s3" and "s5 swaps" are word problems (arXiv 2404.08819): tokens are elements of a group
("swaps": those that move two things or none), and at each the network predicts the product of all so
far. Parity needs a memory that can change its sign (arXiv 2411.12537), S5 is not solvable. Training
takes lengths 4, 8, .. --train-length in turn; the test goes on to --test-length, and the accuracy of
a length is that of the later half of positions.

Rows are entries of configs/memory beside this file, or of --file: they differ in the mixer only, the
only memory: there is no MD-TPE. Writes runs.json, runs.csv (without the curves), table.md and
memory.png under --out.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import permutations, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from ndlightnet import NDLightNet
from ndlightnet.training.core.costs import state_size
from ndlightnet.training.core.optim import schedule_factor
from ndlightnet_evidence import catalogue, plots, runner, tables
from ndlightnet_evidence.cuda_graphs import Steps
from ndlightnet_evidence.tables import Run

CONFIGS = Path(__file__).parent / "configs" / "memory"
SYMBOLS, LOUD = 8, 8.0  # an event adds LOUD to its symbol's channel and to one that all share
GROUPS = {"parity": 2, "s3": 3, "s5 swaps": 5}  # things that are permuted
SHARED = {"dim": 32, "depth": 2, "tests": 512}
EVENTS = {"gap": 4096, "frames": 8192, "batch": 8, "steps": 500, "lr": 3e-3}
LENGTHS = {"vocab": 64, "length": 64, "train_length": 64, "test_length": 256}
NUMBERS: dict[str, dict[str, float]] = {
    "recall": {**EVENTS, **SHARED},
    "associative": {**LENGTHS, "batch": 32, "steps": 1500, "lr": 1e-2, **SHARED},
}
REFERENCES = ("guessing", "most frequent so far")

Batch = tuple[Tensor, Tensor, Tensor]  # inputs; answers, -1 where none is asked for; weights


class Task(ABC):
    """What a network learns. arguments: of the network. panels: the values of x of each test, and the
    references, accuracies without any memory, over them. convolved: see `Convolved`."""

    arguments: dict[str, Any]
    x_label: str
    panels: dict[str, tuple[list[int], dict[str, list[float]]]]
    convolved = False

    @abstractmethod
    def batch(self, step: int, batch: int, rng: torch.Generator) -> Batch:
        """Draw a batch for a step of training."""

    @abstractmethod
    def tests(self, panel: str, count: int, batch: int, rng: torch.Generator) -> Iterator[Batch]:
        """Draw `count` test sequences for each x; instead of weights the index of x, as integers."""


class LastEvent(Task):
    """Which of SYMBOLS symbols a stream showed last."""

    x_label = "frames since the last event"

    def __init__(self, o: Namespace) -> None:
        self.gap, self.frames = o.gap, o.frames
        self.arguments = {"in_chans": SYMBOLS + 1, "num_classes": SYMBOLS, "patch_size": 1}
        self.older = {f"after {n} older events" if n else "the first event": n for n in o.older}
        x = [1 << i for i in range(o.gap.bit_length())]
        self.panels = {
            panel: (x, {"guessing": [1 / SYMBOLS] * len(x), "most frequent so far": [most_frequent(n)] * len(x)})
            for panel, n in self.older.items()
        }

    def batch(self, step: int, batch: int, rng: torch.Generator) -> Batch:
        events = event_frames(batch, max(64, self.frames // 16), self.gap, rng)  # more than fit
        cells, answers, age = streams(events, self.frames, rng)
        return cells, answers, (answers >= 0) / (1 + age)  # each octave of ages counts alike

    def tests(self, panel: str, count: int, batch: int, rng: torch.Generator) -> Iterator[Batch]:
        older = self.older[panel]
        fit = max(1, 32 * batch * self.frames // ((older + 1) * self.gap))  # bounds the memory
        for first in range(0, count, fit):
            events = event_frames(min(fit, count - first), older + 1, self.gap, rng)
            queries = events[:, -1:] + torch.tensor(self.panels[panel][0], device=events.device)
            cells, answers, _ = streams(events, int(queries.max()) + 1, rng)
            at_queries = torch.full_like(answers, -1).scatter(1, queries, answers.gather(1, queries))
            index = torch.arange(queries.shape[1], device=events.device).expand_as(queries)
            yield cells, at_queries, torch.zeros_like(answers).scatter(1, queries, index)


def event_frames(batch: int, events: int, gap: int, rng: torch.Generator) -> Tensor:
    """Draw frames (batch, events), increasing: log-uniform gaps of 1 to `gap`, also in front."""
    u = torch.rand(batch, events, generator=rng, device=rng.device)
    return torch.exp(u * math.log(gap + 1)).long().clamp(1, gap).cumsum(1) - 1


def streams(events: Tensor, frames: int, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return cells (batch, SYMBOLS + 1, frames) with events at these frames, without those past the
    end; for every frame the last event's symbol, -1 before the first, and the frames since then."""
    symbols = torch.randint(SYMBOLS, events.shape, generator=rng, device=events.device)
    symbol = torch.full((len(events), frames + 1), -1, device=events.device)
    symbol = symbol.scatter(1, events.clamp(max=frames), symbols)[:, :frames]
    frame = torch.arange(frames, device=events.device)
    last = torch.where(symbol >= 0, frame, -1).cummax(1).values
    answers = symbol.gather(1, last.clamp(min=0))  # frame 0 has -1 where no event came yet
    event = torch.stack([*(symbol == s for s in range(SYMBOLS)), symbol >= 0], 1)
    noise = torch.randn(event.shape, generator=rng, device=events.device)
    return noise + LOUD * event, answers, frame - last


def most_frequent(older: int) -> float:
    """Return how often the most frequent symbol is the last: best for a memory without order."""
    symbols = torch.randint(SYMBOLS, (20_000, older + 1), generator=torch.Generator().manual_seed(0))
    return float(one_hot(symbols, SYMBOLS).sum(1).amax(1).double().mean()) / (older + 1)


class Sequences(Task):
    """A task on tokens whose sequences have a level, the x of its tests. late: the share of tokens
    in front whose answers do not count in a test."""

    levels: list[int]
    late = 0.0

    @abstractmethod
    def draw(self, level: int, batch: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw tokens and answers (batch, length)."""

    def batch(self, step: int, batch: int, rng: torch.Generator) -> Batch:
        tokens, answers = self.draw(self.levels[step % len(self.levels)], batch, rng)
        return tokens, answers, (answers >= 0).float()

    def tests(self, panel: str, count: int, batch: int, rng: torch.Generator) -> Iterator[Batch]:
        for index, level in enumerate(self.panels[panel][0]):
            for first in range(0, count, batch):
                tokens, answers = self.draw(level, min(batch, count - first), rng)
                answers[:, : int(self.late * answers.shape[1])] = -1
                yield tokens, answers, torch.full_like(answers, index)


class Recall(Sequences):
    """Recall: `pairs` pairs, then as many queries. Queries are at every other token after the
    pairs: at the g-th of these positions, if it is free, with probability ~ g^-0.99."""

    x_label, convolved = "pairs", True

    def __init__(self, o: Namespace) -> None:
        if min(o.pairs) < 1 or 4 * max(o.pairs) > min(o.length, o.vocab):
            raise ValueError(
                f"pairs={o.pairs} with length={o.length}, vocab={o.vocab}: expected 1 or more, and "
                "4 tokens and 4 words or more for each"
            )
        self.words, self.length, self.levels = o.vocab, o.length, o.pairs
        self.arguments = {"vocab_size": o.vocab, "num_classes": o.vocab}
        self.panels = {"recall": (o.pairs, {"guessing": [1 / pairs for pairs in o.pairs]})}

    def draw(self, level: int, batch: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        half, device = self.words // 2, rng.device
        random = torch.rand(batch, half, generator=rng, device=device)
        words = torch.cat([random.argsort(1), torch.arange(half, 2 * half, device=device).expand(batch, half)], 1)
        keys = words[:, :level]
        values = torch.randint(half, 2 * half, keys.shape, generator=rng, device=device)
        filler = torch.randint(level, 2 * half, (batch, self.length), generator=rng, device=device)
        tokens = words.gather(1, filler)
        tokens[:, : 2 * level] = torch.stack([keys, values], 2).flatten(1)
        gaps = torch.arange(1, (self.length - 2 * level) // 2 + 1, device=device)
        weights = (gaps**-0.99).expand(batch, -1)
        queries = 2 * level + 2 * torch.multinomial(weights, level, generator=rng)
        return tokens.scatter(1, queries, keys), torch.full_like(tokens, -1).scatter(1, queries, values)


class Products(Sequences):
    """Word problem: elements of a group, and at each of them the product of all so far."""

    x_label, late = "length", 0.5

    def __init__(self, o: Namespace, group: str) -> None:
        moves = list(permutations(range(GROUPS[group])))  # the identity is the first
        number = {p: i for i, p in enumerate(moves)}
        self.table = torch.tensor([[number[tuple(p[i] for i in q)] for q in moves] for p in moves])
        swaps = [n for n, p in enumerate(moves) if sum(i != j for i, j in enumerate(p)) <= 2]
        self.letters = torch.tensor(swaps if group == "s5 swaps" else range(len(moves)))
        self.levels, lengths = octaves(o.train_length), octaves(o.test_length)
        if not self.levels or not lengths:
            raise ValueError(f"train_length={o.train_length}, test_length={o.test_length}: expected 4 or more")
        self.arguments = {"vocab_size": len(moves), "num_classes": len(moves)}
        self.panels = {
            f"{group}, trained to {o.train_length}": (lengths, {"guessing": [1 / len(moves)] * len(lengths)})
        }

    def draw(self, level: int, batch: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        letters, table = self.letters.to(rng.device), self.table.to(rng.device)
        tokens = letters[torch.randint(len(letters), (batch, level), generator=rng, device=rng.device)]
        products, step = tokens, 1
        while step < level:  # products of the last 2, 4, 8, .. tokens
            joined = table[products[:, :-step], products[:, step:]]
            products, step = torch.cat([products[:, :step], joined], 1), 2 * step
        return tokens, products.clone()


def octaves(top: int) -> list[int]:
    return [1 << i for i in range(2, top.bit_length())]


def task_of(o: Namespace, name: str) -> Task:
    return {"last event": LastEvent, "recall": Recall}[name](o) if name not in GROUPS else Products(o, name)


class Convolved(nn.Module):
    """A mixer that reads tokens plus a causal convolution of 3 of them, channel by channel."""

    def __init__(self, dim: int, mixer: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv, self.mixer = nn.Conv1d(dim, dim, 3, padding=2, groups=dim), mixer(dim)
        self.state_size = self.mixer.state_size

    def forward(self, x: Tensor, *, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        near = self.conv(x.mT)[..., : x.shape[1]].mT
        out: Tensor = self.mixer(x + near, mask=mask, causal=causal)
        return out


def network(o: Namespace, task: Task, row: dict[str, Any]) -> NDLightNet:
    mixer = catalogue.resolve(row["mixer"], "mixer")
    mixer = partial(Convolved, mixer=mixer) if task.convolved else mixer
    return NDLightNet(1, **task.arguments, embed_dim=o.dim, depth=o.depth, mixer=mixer, tpe=False, causal=True)


def logits(net: NDLightNet, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the output of the head at every token, or at those of a mask."""
    features = net.forward_features(inputs)
    out: Tensor = net.get_classifier()(features if mask is None else features[mask])
    return out


def train(net: NDLightNet, task: Task, rng: torch.Generator, o: Namespace) -> float:
    """Train the network and return the mean loss of the last steps."""

    def loss(inputs: Tensor, answers: Tensor, weights: Tensor) -> Tensor:
        each = cross_entropy(logits(net, inputs).mT, answers, ignore_index=-1, reduction="none")
        return (weights * each).sum() / weights.sum()

    steps, losses = Steps(net, loss, weight_decay=0.01, clip=1.0), []
    for step in range(o.steps):
        losses.append(steps(o.lr * schedule_factor(step, o.steps), *task.batch(step, o.batch, rng)).clone())
    return float(torch.stack(losses[-50:]).mean())


@torch.no_grad()
def accuracy(net: NDLightNet, task: Task, panel: str, rng: torch.Generator, o: Namespace) -> list[float]:
    """Return the share of right answers for each x of a panel."""
    right, total = torch.zeros(2, len(task.panels[panel][0]), dtype=torch.float64, device=rng.device)
    for inputs, answers, index in task.tests(panel, o.tests, o.batch, rng):
        queries = answers >= 0
        hits = (logits(net, inputs, queries).argmax(-1) == answers[queries]).double()
        right.index_add_(0, index[queries], hits)
        total.index_add_(0, index[queries], torch.ones_like(hits))
    return [round(x, 4) for x in (right / total).tolist()]


def run(o: Namespace, rows: dict[str, Any], spec: Run) -> Run:
    """Train and test a row on a task; return its curve of each panel."""
    task, device = task_of(o, spec["task"]), runner.device()
    torch.manual_seed(spec["seed"])
    net = network(o, task, rows[spec["row"]]).to(device)
    rng = torch.Generator(device)
    loss, curves = train(net, task, rng.manual_seed(spec["seed"]), o), {}
    for panel, (x, references) in task.panels.items():
        right = accuracy(net.eval(), task, panel, rng.manual_seed(10**6 + spec["seed"]), o)
        curves[panel] = {"x_label": task.x_label, "x": x, "accuracy": right, **references}
    size = sum(p.numel() for p in net.parameters())
    facts = {"state": state_size(net), "parameters": size, "device": runner.device_name()}
    return {"loss": loss, **facts, "curves": curves}


def draw(rows: Sequence[str], path: Path, runs: Sequence[Run]) -> None:
    panels = []
    for title, first in tables.panels(runs).items():
        lines = {}
        for row in rows:
            curves = [run["curves"].get(title) for run in tables.of_row(runs, row)]
            if seeds := [curve["accuracy"] for curve in curves if curve]:
                lines[row] = plots.Line(first["x"], torch.tensor(seeds))
        for name in [name for name in REFERENCES if name in first]:
            lines[name] = plots.Line(first["x"], torch.tensor([first[name]]), reference=True)
        panels.append(plots.Panel(first["x_label"], lines, title, "accuracy", base=2, ylim=(0, 1.03)))
    plots.draw(path, panels)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    experiments = parser.add_subparsers(dest="experiment", required=True)
    for name, numbers in NUMBERS.items():
        options = experiments.add_parser(name)
        options.add_argument("--file", type=Path, default=CONFIGS / f"{name}.yaml", help="a YAML file of rows")
        options.add_argument("--rows", nargs="+", help="default: all of the file")
        for number, default in numbers.items():
            flag = f"--{number.replace('_', '-')}"
            options.add_argument(flag, type=type(default), default=default, help="default: %(default)s")
        runner.add_options(options, f"runs/memory/{name}")
        if name == "recall":
            options.add_argument("--older", nargs="+", type=int, default=[0, 64], help="events before the last one")
            options.set_defaults(tasks=["last event"])
        else:
            options.add_argument("--tasks", nargs="+", choices=["recall", *GROUPS], default=["recall", *GROUPS])
            options.add_argument("--pairs", nargs="+", type=int, default=[4, 8, 16])
    o = parser.parse_args(arguments)
    o.out = o.out or Path("runs/memory") / o.experiment
    try:
        rows = catalogue.changes(o.file, o.rows)
        for name, row in product(o.tasks, rows):
            network(o, task_of(o, name), rows[row])  # wrong arguments fail here
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    runner.compare(
        o,
        [{"task": task, "row": row, "seed": seed} for task, seed, row in product(o.tasks, o.seeds, rows)],
        partial(run, o, rows),
        report=lambda run: f"loss {run['loss']:.3f}, {run['run_seconds']:.0f} s",
        table=lambda runs: tables.curves(runs, list(rows), ("state", "parameters")),
        draw=lambda runs: draw(list(rows), o.out / "memory.png", runs),
    )


if __name__ == "__main__":
    main()
