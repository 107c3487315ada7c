"""The command `associative`: its sequences, what it asks of a network, its rows, a small run."""

import csv
import json
import math
from argparse import Namespace
from itertools import product
from pathlib import Path

import pytest
import torch
import yaml

import associative
from ndlightnet import NDLightNet
from ndlightnet.nn import mixers
from ndlightnet_evidence import plots

ROOT = Path(__file__).parents[2]
YAMLS = sorted((ROOT / "tasks/evidence/configs/associative").glob("*.yaml"))
GROUPS = {"parity": 2, "s3": 6, "a5": 60, "s5": 120, "s5 swaps": 120}


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def options(**more) -> Namespace:
    return Namespace(
        **{
            "vocab": 64,
            "length": 64,
            "pairs": [2, 16],
            "train_length": 16,
            "test_length": 32,
            "batch": 5,
            "tests": 13,
            **more,
        }
    )


# recall


@pytest.mark.parametrize(("pairs", "length"), [(1, 64), (7, 64), (16, 64), (16, 67)])
def test_each_query_has_its_pair_before_it(pairs, length):
    task = associative.Recall(options(length=length))
    tokens, answers = task.batch(pairs, 20, rng(1))
    assert tokens.shape == answers.shape == (20, length)
    assert tokens.min() >= 0 and tokens.max() < 64
    for row, wanted in zip(tokens.tolist(), answers.tolist(), strict=True):
        keys, values = row[: 2 * pairs : 2], row[1 : 2 * pairs : 2]
        assert len(set(keys)) == pairs and max(keys) < 32 <= min(values)
        value = dict(zip(keys, values, strict=True))
        asked = [at for at, want in enumerate(wanted) if want >= 0]
        assert min(asked) >= 2 * pairs and all(at % 2 == 0 for at in asked)
        assert sorted(row[at] for at in asked) == sorted(keys)  # each of them once
        assert all(wanted[at] == value[row[at]] for at in asked)
        others = [row[at] for at in range(2 * pairs, length) if at not in asked]
        assert not set(others) & set(keys)


def test_words_are_drawn_evenly_and_anew():
    tokens, answers = associative.Recall(options()).batch(4, 4000, rng(2))
    for words, low in ((tokens[:, 0:8:2], 0), (tokens[:, 1:8:2], 32), (answers[answers >= 0], 32)):
        share = torch.bincount(words.flatten() - low, minlength=32) / words.numel()
        # of 16,000 draws: a standard deviation of sqrt(1/32 / 16,000) = 0.0014
        assert len(share) == 32 and (share - 1 / 32).abs().max() < 5 * 0.0014
    filler = tokens[:, 9::2]  # never a query; 60 of the 64 words may stand there
    assert torch.bincount(filler.flatten()).min() > 0
    again, _ = associative.Recall(options()).batch(4, 4000, rng(3))
    assert not torch.equal(tokens, again)


def test_gaps_follow_a_power_law():
    _, answers = associative.Recall(options()).batch(1, 20_000, rng(4))
    place = (answers >= 0).int().argmax(1) // 2  # 1 to 31 after one pair
    share = torch.bincount(place, minlength=32)[1:] / 20_000
    law = torch.tensor([g**-0.99 for g in range(1, 32)])
    assert (share - law / law.sum()).abs().max() < 5 * math.sqrt(0.25 * 0.75 / 20_000)


# products in groups


@pytest.mark.parametrize("name", GROUPS)
def test_tables_are_groups(name):
    task = associative.Tracking(options(), name)
    table, n = task.table, GROUPS[name]
    assert table.shape == (n, n) and task.words == task.classes == n
    every = torch.arange(n)
    for lines in (table, table.T):  # each element once in each row and column: inverses
        assert torch.equal(lines.sort(1).values, every.expand(n, n))
    assert torch.equal(table[0], every) and torch.equal(table[:, 0], every)
    assert torch.equal(table[table], table[:, table])  # (a b) c = a (b c)
    commutes = torch.equal(table, table.T)
    assert commutes == (name == "parity")


def order(table: torch.Tensor, element: int) -> int:
    power, count = element, 1
    while power:
        power, count = int(table[power, element]), count + 1
    return count


@pytest.mark.parametrize(
    ("name", "orders"),
    [
        ("parity", {1: 1, 2: 1}),
        ("s3", {1: 1, 2: 3, 3: 2}),
        ("a5", {1: 1, 2: 15, 3: 20, 5: 24}),
        ("s5", {1: 1, 2: 25, 3: 20, 4: 30, 5: 24, 6: 20}),
    ],
)
def test_elements_have_the_orders_of_the_group_named(name, orders):
    task = associative.Tracking(options(), name)
    found = [order(task.table, element) for element in range(task.words)]
    assert {n: found.count(n) for n in set(found)} == orders
    assert task.letters.tolist() == list(range(task.words))


def test_swaps_are_the_identity_and_all_that_exchange_two():
    task = associative.Tracking(options(), "s5 swaps")
    assert len(task.letters) == 11 and task.letters[0] == 0
    assert all(order(task.table, e) == 2 for e in task.letters[1:].tolist())
    reached = {0}
    while more := {int(task.table[a, b]) for a, b in product(reached, task.letters)} - reached:
        reached |= more
    assert len(reached) == 120  # they generate S5
    tokens, _ = task.batch(50, 50, rng())
    assert sorted(set(tokens.flatten().tolist())) == task.letters.tolist()


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("length", [1, 2, 5, 16, 37])
def test_labels_are_the_running_products(name, length):
    task = associative.Tracking(options(), name)
    tokens, products = task.batch(length, 6, rng(length))
    assert tokens.shape == products.shape == (6, length)
    for row, labels in zip(tokens.tolist(), products.tolist(), strict=True):
        so_far = 0
        for token, label in zip(row, labels, strict=True):
            so_far = int(task.table[so_far, token])
            assert label == so_far


def test_products_are_those_of_permutations():
    # matrices multiply by themselves, as permutations do: S3 by its table, against 3 x 3 matrices
    task = associative.Tracking(options(), "s3")
    orders = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    matrices = torch.stack([torch.eye(3)[:, list(p)] for p in orders])
    for a, b in product(range(6), range(6)):
        assert torch.equal(matrices[task.table[a, b]], matrices[a] @ matrices[b])
    parity = associative.Tracking(options(), "parity")
    tokens, products = parity.batch(40, 8, rng(5))
    assert torch.equal(products, tokens.cumsum(1) % 2)


# what is measured


class Scripted(torch.nn.Module):
    """Right where `right(answers)` says, by knowing the answers of the batch given last."""

    def __init__(self, task, right) -> None:
        super().__init__()
        self.right, self.make, self.answers = right, task.batch, None
        task.batch = self.batch

    def batch(self, *arguments):
        tokens, self.answers = self.make(*arguments)
        return tokens, self.answers

    def get_classifier(self):
        return torch.nn.Identity()

    def forward_features(self, tokens):
        named = torch.where(self.right(self.answers), self.answers, self.answers + 1)
        return torch.nn.functional.one_hot(named.clamp(min=0) % 64, 64).float()


def test_accuracy_counts_queries_only():
    task = associative.Recall(options())
    net = Scripted(task, lambda answers: answers >= 0)  # elsewhere all is wrong
    found = associative.measure(net, task, rng(), options())
    assert found == {"accuracy": [1, 1], "whole": [1, 1]}
    first = Scripted(task, lambda answers: (answers >= 0) & ((answers >= 0).cumsum(1) == 1))
    found = associative.measure(first, task, rng(), options())
    assert found == {"accuracy": [0.5, 0.0625], "whole": [0, 0]}


def test_accuracy_of_a_length_is_that_of_its_later_half():
    task = associative.Tracking(options(), "s3")
    assert task.levels == [4, 8, 16] and task.tests == [4, 8, 16, 32]

    def right(answers):  # from position 6 on, and everywhere in the first sequence of a batch
        good = torch.arange(answers.shape[1]).expand_as(answers) >= 6
        return good | (torch.arange(len(answers)) == 0)[:, None]

    found = associative.measure(Scripted(task, right), task, rng(), options())
    part = 3 / 13  # 13 sequences, 5 at a time
    wanted = [part, part + (1 - part) / 2, 1, 1]
    assert found["accuracy"] == [round(x, 4) for x in wanted]
    assert found["whole"] == [round(part, 4)] * 4


# rows


def test_the_rows_are_there():
    assert len(YAMLS) >= 20
    files = [yaml.safe_load(path.read_text()) for path in YAMLS]
    assert len({file["row"] for file in files}) == len(files)
    used = {file["mixer"]["class_path"].rpartition(".")[2] for file in files}
    assert used <= set(mixers.__all__)


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_a_row_builds_its_mixer(path):
    layer = associative.load(path.stem, 32)[1](32)
    assert type(layer).__name__ == yaml.safe_load(path.read_text())["mixer"]["class_path"][21:]
    if path.stem == "softmax":
        assert layer.state_size is None
    elif path.stem not in ("identity", "gla", "lavo", "rwkv4", "s5"):
        memory = layer.init_state(1).memory
        assert memory.numel() * (2 if memory.is_complex() else 1) == 1024


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_a_row_is_causal_in_the_network_of_the_tasks(path):
    _, mixer = associative.load(str(path), 16)
    net = NDLightNet(
        1,
        num_classes=5,
        vocab_size=9,
        embed_dim=16,
        depth=1,
        tpe=False,
        causal=True,
        mixer=lambda dim: associative.Convolved(dim, mixer),
    )
    tokens = torch.randint(9, (2, 12))
    other = tokens.clone()
    other[:, 8:] = (other[:, 8:] + 1) % 9
    with torch.no_grad():
        one, two = (net.double().forward_features(x) for x in (tokens, other))
    torch.testing.assert_close(one[:, :8], two[:, :8], rtol=0, atol=1e-9)
    assert (one[:, 8:] - two[:, 8:]).abs().amax(-1).min() > 1e-6


WRONG = {
    "no such file": (None, "expected a YAML file or one of .*deltanet"),
    "no such class": ("class_path: ndlightnet.nn.mixers.DeltaNot", "DeltaNot"),
    "no such module": ("class_path: ndlightnot.DeltaNet", "ndlightnot"),
    "no such argument": ("class_path: ndlightnet.nn.mixers.SoftmaxAttention\n  init_args: {headz: 2}", "headz"),
    "heads": (
        "class_path: ndlightnet.nn.mixers.SoftmaxAttention\n  init_args: {heads: 3}",
        "heads=3: expected a divisor of dim=32",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_row_fails_before_anything_is_trained(case, tmp_path, capsys):
    text, message = WRONG[case]
    path = tmp_path / "wrong.yaml"
    if text is not None:
        path.write_text(f"row: wrong\nmixer:\n  {text}\n")
    with pytest.raises(ValueError, match=f"wrong.*{message}"):
        associative.load(str(path), 32)
    with pytest.raises(SystemExit):
        associative.main(["--rows", "identity", str(path), "--out", str(tmp_path / "out")])
    assert "wrong.yaml" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--tasks recall --pairs 4 65", "pairs=[4, 65] with length=64"),
        ("--tasks recall --pairs 0", "pairs=[0]"),
        ("--tasks parity --train-length 3", "train_length=3"),
        ("--rows identity identity", "expected names that differ"),
    ],
)
def test_wrong_options_say_so(wrong, message, capsys):
    with pytest.raises(SystemExit):
        associative.main(["--rows", "identity", *wrong.split()])
    assert message in capsys.readouterr().err


# all of it


def made(task, row, seed, lr, accuracy):
    curve = {"x_label": "", "x": [4, 8], "accuracy": accuracy, "guessing": [0.5, 0.5]}
    return {"task": task, "row": row, "seed": seed, "lr": lr, "curves": {task: curve}}


def test_a_row_is_shown_at_its_best_learning_rate():
    runs = [
        made(*run)
        for run in [
            ("recall", "a", 0, 0.1, [1.0, 0.2]),
            ("recall", "a", 0, 0.3, [0.8, 0.8]),
            ("recall", "b", 0, 0.1, [0.5, 0.5]),
            ("recall", "b", 0, 0.3, [0.4, 0.5]),
            ("recall", "a", 1, 0.1, [1.0, 0.2]),
            ("recall", "a", 1, 0.3, [0.1, 0.8]),
            ("parity", "a", 0, 0.1, [0.9, 0.8]),
        ]
    ]
    failed = {"task": "recall", "row": "b", "seed": 1, "lr": 0.1, "error": "boom"}
    assert associative.best([*runs, failed]) == [runs[i] for i in (1, 5, 2, 6)]


def test_rows_of_the_second_task_alone_are_in_the_legend(tmp_path, monkeypatch):
    runs = [made(task, row, 0, 0.1, [0.5, 0.7]) for task, row in (("recall", "a"), ("recall", "c"), ("parity", "b"))]
    shown = []
    monkeypatch.setattr("matplotlib.figure.Figure.legend", lambda _, lines, names, **__: shown.extend(names))
    plots.curves(runs, ["a", "b", "c", "d"], tmp_path / "x.png", ["guessing"])
    assert shown == ["a", "b", "c", "guessing"] and (tmp_path / "x.png").stat().st_size > 10_000


SMALL = (
    "--pairs 2 4 --length 16 --vocab 16 --train-length 8 --test-length 16 --batch 4 --steps 1 "
    "--tests 6 --dim 16 --depth 1 --lr 1e-3 --rows softmax identity"
)


def test_a_small_run(tmp_path, capsys):
    out = tmp_path / "out"
    more = ["--seeds", "3", "5", "--tasks", "recall", "s5 swaps", "--out", str(out)]
    associative.main([*SMALL.split(), *more])
    runs = json.loads((out / "runs.json").read_text())
    rows = ["softmax attention", "identity"]
    which = [(run["task"], run["seed"], run["row"]) for run in runs]
    assert which == list(product(["recall", "s5 swaps"], [3, 5], rows))
    assert runs[0]["curves"]["recall"]["guessing"] == [0.5, 0.25] and runs[0]["state"] is None
    assert runs[-1]["curves"]["s5 swaps, trained to 8"]["x"] == [4, 8, 16]
    assert runs[-1]["state"] == 0
    with open(out / "runs.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 4 * 2 + 4 * 3
    curve = runs[1]["curves"]["recall"]
    assert [float(line["accuracy"]) for line in lines[2:4]] == curve["accuracy"]
    assert [float(line["whole"]) for line in lines[2:4]] == curve["whole"]
    table = (out / "table.md").read_text().splitlines()
    assert table[0] == "### recall: accuracy by pairs"
    assert [cell.strip() for cell in table[2].split("|")[2:-1]] == ["state", "parameters", "lr", "2", "4"]
    assert table[4].startswith("| softmax attention | -") and table[5].count("|") == 7
    assert (out / "associative.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert printed.count(", by length:") == 4 and "### s5 swaps, trained to 8: " in printed


def test_a_network_learns_a_short_recall():
    given = vars(
        options(
            pairs=[2, 4],
            length=16,
            vocab=16,
            batch=32,
            steps=100,
            tests=200,
            dim=32,
            depth=1,
            rows=["softmax", "identity"],
        )
    )
    right = {}
    for row in ("softmax attention", "identity"):
        who = {"task": "recall", "row": row, "seed": 0, "lr": 1e-2}
        right[row] = associative.run(Namespace(**given), who)["curves"]["recall"]["accuracy"]
    assert min(right["softmax attention"]) > 0.9 > 0.4 > right["identity"][1]
