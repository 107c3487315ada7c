"""Test what a mixer's memory can hold (recall of pairs), and compute (products in groups).

    associative=tasks/evidence/associative.py
    python $associative                         all rows on recall, parity, s3 and "s5 swaps"
    python $associative --tasks recall --rows softmax linear deltanet --seeds 0
    python $associative --tasks parity s3 --rows deltanet deltanet_negative my.yaml

A run takes 15 seconds to 4 minutes on a CPU.

"recall" is multi-query associative recall (Zoology, arXiv 2312.04927): pairs of a key and a value,
then the keys again, soon after the pairs more often than late; at each the network predicts the
value. Half of --vocab are keys (8192 words in the paper, fewer here so that they are learnt
sooner), half values; between the queries are words that are none of the sequence's keys. Every row
reads its tokens plus a causal convolution of 3 of them, so that none fails because it cannot read
the token before. Training takes the numbers of pairs in turn.

"parity", "s3", "a5", "s5" and "s5 swaps" are word problems (arXiv 2404.08819): tokens are elements
of a group ("swaps": those that move two things or none), and at each the network predicts the
product of all so far. Parity needs a memory that can change its sign (arXiv 2411.12537), A5 and S5
are not solvable. Training takes lengths 4, 8, .. --train-length in turn; the test goes on to
--test-length, and the accuracy of a length is that of the later half of positions.

Rows are the YAMLs of configs/associative beside this file, by their names, or other such files: a
name and a mixer. They differ in the mixer only; there is no MD-TPE. The state is how many numbers a
layer's mixer stores for one sequence: with --dim 32 a memory of 1024 for all but identity, softmax,
LAVO, RWKV-4, S5 and GLA (512), and some more for the sums, or the last tokens, that some also
store.

Writes runs.json and runs.csv (all runs; "whole" is the share of sequences without any mistake),
table.md and associative.png (each row at the best of its learning rates) under --out.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import permutations, product
from pathlib import Path

import torch
import yaml
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ndlightnet import NDLightNet
from ndlightnet.training.core.costs import state_size
from ndlightnet.training.core.optim import warm_cosine
from ndlightnet_evidence import plots, runner, tables
from ndlightnet_evidence.graphs import Steps
from ndlightnet_evidence.runner import Run

CONFIGS = Path(__file__).parent / "configs" / "associative"
TASKS = ["recall", "parity", "s3", "s5 swaps", "s5", "a5"]
NUMBERS = {
    "vocab": 64,
    "length": 64,
    "train-length": 64,
    "test-length": 256,
    "batch": 32,
    "steps": 1500,
    "dim": 32,
    "depth": 2,
    "tests": 512,
}


class Recall:
    """Recall: `pairs` pairs, then as many queries. Queries are at every other token after the
    pairs: at the g-th of these positions, if it is free, with probability ~ g^-0.99."""

    x_label, late = "pairs", 0.0

    def __init__(self, o: Namespace) -> None:
        self.words = self.classes = o.vocab
        self.length, self.levels, self.tests = o.length, o.pairs, o.pairs
        self.guess = [1 / max(1, pairs) for pairs in o.pairs]  # one of the values shown
        if min(o.pairs) < 1 or 4 * max(o.pairs) > min(o.length, o.vocab):
            raise ValueError(
                f"pairs={o.pairs} with length={o.length}, vocab={o.vocab}: expected 1 or more, and "
                "4 tokens and 4 words or more for each"
            )

    def batch(self, pairs: int, batch: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw tokens and answers (batch, length); answer -1: no query."""
        half, device = self.words // 2, rng.device
        random = torch.rand(batch, half, generator=rng, device=device)
        words = torch.cat([random.argsort(1), torch.arange(half, 2 * half, device=device).expand(batch, half)], 1)
        keys = words[:, :pairs]
        values = torch.randint(half, 2 * half, keys.shape, generator=rng, device=device)
        shape = (batch, self.length)
        filler = torch.randint(pairs, 2 * half, shape, generator=rng, device=device)
        tokens = words.gather(1, filler)
        tokens[:, : 2 * pairs] = torch.stack([keys, values], 2).flatten(1)
        gaps = torch.arange(1, (self.length - 2 * pairs) // 2 + 1, device=device)
        weights = (gaps**-0.99).expand(batch, -1)
        at = 2 * pairs + 2 * torch.multinomial(weights, pairs, generator=rng)
        return tokens.scatter(1, at, keys), torch.full_like(tokens, -1).scatter(1, at, values)


class Tracking:
    """Word problem: elements of a group, and at each of them the product of all so far."""

    x_label, late = "length", 0.5

    def __init__(self, o: Namespace, group: str) -> None:
        size = {"parity": 2, "s3": 3, "a5": 5, "s5": 5, "s5 swaps": 5}[group]
        moves = list(permutations(range(size)))  # the identity is the first
        if group == "a5":
            moves = [p for p in moves if even(p)]
        number = {p: i for i, p in enumerate(moves)}
        self.table = torch.tensor([[number[tuple(p[i] for i in q)] for q in moves] for p in moves])
        few = [sum(i != j for i, j in enumerate(p)) <= 2 for p in moves]
        every = torch.arange(len(moves))
        self.letters = every[torch.tensor(few)] if group == "s5 swaps" else every
        self.words = self.classes = len(moves)
        self.levels, self.tests = octaves(o.train_length), octaves(o.test_length)
        self.guess = [1 / len(moves)] * len(self.tests)
        if not self.levels or not self.tests:
            raise ValueError(f"train_length={o.train_length}, test_length={o.test_length}: expected 4 or more")

    def batch(self, length: int, batch: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw tokens and return them with their products, (batch, length)."""
        letters, table = self.letters.to(rng.device), self.table.to(rng.device)
        shape = (batch, length)
        tokens = letters[torch.randint(len(letters), shape, generator=rng, device=rng.device)]
        products, step = tokens, 1
        while step < length:  # products of the last 2, 4, 8, .. tokens
            joined = table[products[:, :-step], products[:, step:]]
            products, step = torch.cat([products[:, :step], joined], 1), 2 * step
        return tokens, products


def even(p: Sequence[int]) -> bool:
    return sum(p[i] > p[j] for j in range(len(p)) for i in range(j)) % 2 == 0


def octaves(top: int) -> list[int]:
    return [1 << i for i in range(2, top.bit_length())]


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


def load(row: str, dim: int) -> tuple[str, Callable[[int], nn.Module]]:
    """Return the name and the mixer of a YAML file, given by path or by its name in `CONFIGS`."""
    path = next((p for p in (CONFIGS / f"{row}.yaml", Path(row)) if p.is_file()), None)
    if path is None:
        known = ", ".join(sorted(p.stem for p in CONFIGS.glob("*.yaml")))
        raise ValueError(f"row {row}: expected a YAML file or one of {known}")
    try:
        file = yaml.safe_load(path.read_text())
        module, _, name = file["mixer"]["class_path"].rpartition(".")
        mixer = partial(getattr(import_module(module), name), **file["mixer"].get("init_args", {}))
        mixer(dim)  # wrong arguments fail here
        return str(file["row"]), mixer
    except (yaml.YAMLError, ImportError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error


def train(net: NDLightNet, task: Recall | Tracking, lr: float, rng: torch.Generator, o: Namespace) -> float:
    """Train the network and return the mean loss of the last steps."""

    def loss(tokens: Tensor, answers: Tensor) -> Tensor:
        logits = net.get_classifier()(net.forward_features(tokens))
        return cross_entropy(logits.mT, answers, ignore_index=-1)

    steps, losses = Steps(net, loss, weight_decay=0.01, clip=1.0), []
    for step in range(o.steps):
        tokens, answers = task.batch(task.levels[step % len(task.levels)], o.batch, rng)
        losses.append(steps(lr * warm_cosine(step, o.steps), tokens, answers).clone())
    return float(torch.stack(losses[-50:]).mean())


@torch.no_grad()
def measure(net: NDLightNet, task: Recall | Tracking, rng: torch.Generator, o: Namespace) -> dict[str, list[float]]:
    """Return the share of right answers, and of sequences without errors, for each test."""
    found: dict[str, list[float]] = {"accuracy": [], "whole": []}
    for x in task.tests:
        parts = []  # 1 right, 0 wrong, nan not asked
        for done in range(0, o.tests, o.batch):
            tokens, answers = task.batch(x, min(o.batch, o.tests - done), rng)
            asked = answers >= 0
            logits = net.get_classifier()(net.forward_features(tokens)[asked])
            hits = logits.argmax(-1) == answers[asked]
            empty = torch.full(answers.shape, torch.nan, device=answers.device)
            parts.append(empty.masked_scatter(asked, hits.float()))
        right = torch.cat(parts)
        found["accuracy"].append(round(float(right[:, int(task.late * x) :].nanmean()), 4))
        found["whole"].append(round(float((right != 0).all(1).float().mean()), 4))
    return found


def best(runs: Sequence[Run]) -> list[Run]:
    """Return the runs of each row and task at the learning rate with the best mean accuracy."""
    rates: dict[tuple[str, str], dict[float, list[Run]]] = {}
    for run in filter(tables.complete, runs):
        rates.setdefault((run["task"], run["row"]), {}).setdefault(run["lr"], []).append(run)

    def mean(seeds: list[Run]) -> float:
        return sum(sum(c["accuracy"]) for r in seeds for c in r["curves"].values()) / len(seeds)

    return [run for row in rates.values() for run in max(row.values(), key=mean)]


def task_of(o: Namespace, name: str) -> Recall | Tracking:
    return Recall(o) if name == "recall" else Tracking(o, name)


def run(o: Namespace, who: Run) -> Run:
    """Train and test a row on a task; return its curve over pairs or lengths."""
    task, device = task_of(o, who["task"]), runner.device()
    mixer = dict(load(row, o.dim) for row in o.rows)[who["row"]]
    torch.manual_seed(who["seed"])
    reads = partial(Convolved, mixer=mixer) if who["task"] == "recall" else mixer
    net = NDLightNet(
        1,
        num_classes=task.classes,
        vocab_size=task.words,
        embed_dim=o.dim,
        depth=o.depth,
        mixer=reads,
        tpe=False,
        causal=True,
    ).to(device)
    rng = torch.Generator(device)
    loss = train(net, task, who["lr"], rng.manual_seed(who["seed"]), o)
    right = measure(net.eval(), task, rng.manual_seed(10**6 + who["seed"]), o)
    trained = "" if who["task"] == "recall" else f", trained to {o.train_length}"
    curve = {"x_label": task.x_label, "x": task.tests, **right, "guessing": task.guess}
    size = sum(p.numel() for p in net.parameters())
    return {"loss": loss, "state": state_size(net), "parameters": size, "curves": {who["task"] + trained: curve}}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS[:4])
    parser.add_argument("--rows", nargs="+", default=sorted(p.stem for p in CONFIGS.glob("*.yaml")))
    parser.add_argument("--lr", nargs="+", type=float, default=[1e-2])
    parser.add_argument("--pairs", nargs="+", type=int, default=[4, 8, 16])
    for name, number in NUMBERS.items():
        parser.add_argument(f"--{name}", type=type(number), default=number, help=f"{number}")
    runner.add_options(parser, "runs/associative")
    o = parser.parse_args(arguments)
    o.out = o.out or Path("runs/associative")
    try:
        rows = [load(row, o.dim)[0] for row in o.rows]
        if len(set(rows)) < len(rows):
            raise ValueError(f"rows {o.rows}: expected names that differ")
        for name in o.tasks:
            task_of(o, name)
    except ValueError as error:
        parser.error(str(error))
    wanted = [
        {"task": task, "row": row, "seed": seed, "lr": lr}
        for task, seed, row, lr in product(o.tasks, o.seeds, rows, o.lr)
    ]
    runner.compare(
        o,
        wanted,
        partial(run, o),
        lines=runner.curve_lines,
        say=runner.say_curves,
        table=lambda runs: tables.curves(best(runs), rows, ("state", "parameters", "lr")),
        draw=lambda runs: plots.curves(best(runs), rows, o.out / "associative.png", ["guessing"]),
    )


if __name__ == "__main__":
    main()
