"""The command `memory`: its sequences against plain Python, what it counts as right, its rows, a
small run of each experiment."""

import json
from argparse import Namespace
from itertools import product

import pytest
import torch

import memory
from ndlightnet_evidence import catalogue

OPTIONS = {"vocab": 64, "length": 64, "pairs": [2, 16], "train_length": 16, "test_length": 32}
EVENTS = {"gap": 6, "frames": 80, "older": [0, 3]}
ROWS = {name: catalogue.changes(memory.CONFIGS / f"{name}.yaml", None) for name in ("recall", "associative")}


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def recall(**options) -> memory.Recall:
    return memory.Recall(Namespace(**{**OPTIONS, **options}))


def products_of(name: str) -> memory.Products:
    return memory.Products(Namespace(**OPTIONS), name)


@pytest.mark.parametrize(("pairs", "length"), [(1, 64), (16, 64), (16, 67)])
def test_each_query_has_its_pair_before_it(pairs, length):
    tokens, answers = recall(length=length).draw(pairs, 20, rng(1))
    assert tokens.shape == answers.shape == (20, length) and 0 <= tokens.min() <= tokens.max() < 64
    for row, answer in zip(tokens.tolist(), answers.tolist(), strict=True):
        keys, values = row[: 2 * pairs : 2], row[1 : 2 * pairs : 2]
        assert len(set(keys)) == pairs and max(keys) < 32 <= min(values)
        queries = [i for i, value in enumerate(answer) if value >= 0]
        assert min(queries) >= 2 * pairs and all(i % 2 == 0 for i in queries)
        assert sorted(row[i] for i in queries) == sorted(keys)  # each of them once
        pair = dict(zip(keys, values, strict=True))
        assert all(answer[i] == pair[row[i]] for i in queries)
        assert not {row[i] for i in range(2 * pairs, length) if i not in queries} & set(keys)


def test_words_are_drawn_evenly_and_gaps_by_a_power_law():
    tokens, answers = recall().draw(1, 20_000, rng(4))
    for words, low in ((tokens[:, 0], 0), (answers[answers >= 0], 32)):
        share = torch.bincount(words - low, minlength=32) / 20_000
        assert len(share) == 32 and (share - 1 / 32).abs().max() < 5 * (1 / 32 / 20_000) ** 0.5
    position = (answers >= 0).int().argmax(1) // 2  # 1 to 31 after one pair
    share = torch.bincount(position, minlength=32)[1:] / 20_000
    law = torch.tensor([gap**-0.99 for gap in range(1, 32)])
    assert (share - law / law.sum()).abs().max() < 5 * (0.25 * 0.75 / 20_000) ** 0.5


ORDERS = {"parity": {1: 1, 2: 1}, "s3": {1: 1, 2: 3, 3: 2}, "s5 swaps": {1: 1, 2: 25, 3: 20, 4: 30, 5: 24, 6: 20}}


@pytest.mark.parametrize("name", ORDERS)
def test_tables_are_the_groups_named_and_answers_running_products(name):
    task = products_of(name)
    table, every = task.table, torch.arange(sum(ORDERS[name].values()))
    for lines in (table, table.T):  # each element once in each row and column: inverses
        assert torch.equal(lines.sort(1).values, every.expand(len(every), -1))
    assert torch.equal(table[0], every) and torch.equal(table[table], table[:, table])  # associative

    def order(element: int) -> int:
        power, count = element, 1
        while power:
            power, count = int(table[power, element]), count + 1
        return count

    counts = [order(element) for element in every.tolist()]
    assert {k: counts.count(k) for k in set(counts)} == ORDERS[name]
    for length in (1, 37):
        tokens, answers = task.draw(length, 6, rng(length))
        for row, labels in zip(tokens, answers, strict=True):
            so_far = 0
            for token, label in zip(row, labels, strict=True):
                so_far = table[so_far, token]
                assert label == so_far
    # swaps: the identity and the ten that exchange two things
    letters = task.letters
    assert len(letters) == (11 if name == "s5 swaps" else len(every))
    assert name == "s3" or not table[letters, letters].any()


def test_streams_show_events_and_ask_for_the_last():
    events = memory.event_frames(300, 40, 6, rng())
    gaps = events.diff(dim=1, prepend=torch.full((300, 1), -1))
    assert gaps.min() == 1 and gaps.max() == 6
    cells, answers, age = memory.streams(events, 80, rng(1))
    assert cells.shape == (300, memory.SYMBOLS + 1, 80)
    loud = cells > memory.LOUD / 2
    for stream in range(20):
        symbol, since = -1, 0
        for frame in range(80):
            since += 1
            if frame in events[stream]:
                symbol, since = int(loud[stream, :-1, frame].int().argmax()), 0
                assert loud[stream, -1, frame]
            assert answers[stream, frame] == symbol and (symbol < 0 or age[stream, frame] == since)
    assert memory.most_frequent(0) == 1 and 0.4 < memory.most_frequent(3) < 0.5


class Scripted(torch.nn.Module):
    """Right where `right(answers)` says, by reading the answers of the batch drawn last."""

    def __init__(self, task, right) -> None:
        super().__init__()
        self.right, self.draw = right, task.draw
        task.draw = self.remember

    def remember(self, *arguments):
        tokens, self.answers = self.draw(*arguments)
        self.words = torch.where(self.right(self.answers), self.answers, self.answers + 1)
        return tokens, self.answers

    def get_classifier(self):
        return torch.nn.Identity()

    def forward_features(self, tokens):
        return torch.nn.functional.one_hot(self.words.clamp(min=0) % 64, 64).float()


def test_accuracy_counts_queries_only_and_the_later_half_of_a_length():
    options, task = Namespace(batch=5, tests=13), recall()
    first = Scripted(task, lambda answers: (answers >= 0) & ((answers >= 0).cumsum(1) == 1))
    assert memory.accuracy(first, task, "recall", rng(), options) == [0.5, 0.0625]
    task = products_of("s3")

    def right(answers):  # from position 6 on, and everywhere in the first sequence of a batch
        return (torch.arange(answers.shape[1]) >= 6) | (torch.arange(len(answers)) == 0)[:, None]

    share = 3 / 13  # 13 sequences, 5 at a time
    expected = [round(x, 4) for x in (share, share + (1 - share) / 2, 1, 1)]
    assert memory.accuracy(Scripted(task, right), task, "s3, trained to 16", rng(), options) == expected
    task = memory.LastEvent(Namespace(**EVENTS))
    for _, answers, index in task.tests("after 3 older events", 7, 4, rng()):
        # 1, 2 and 4 frames after the event
        assert all(row[a >= 0].tolist() == [0, 1, 2] for row, a in zip(index, answers, strict=True))


@pytest.mark.parametrize(("experiment", "row"), [(e, row) for e, rows in ROWS.items() for row in rows])
def test_a_row_is_causal_and_has_the_state_that_its_file_says(experiment, row):
    events = experiment == "recall"
    task = memory.LastEvent(Namespace(**EVENTS)) if events else recall()
    net = memory.network(Namespace(dim=32, depth=1), task, ROWS[experiment][row]).double()
    x = torch.randn(2, 9, 12).double() if events else torch.randint(64, (2, 12))
    changed = torch.cat([x[..., :8], x[..., 8:] + 1 if events else (x[..., 8:] + 1) % 64], -1)
    with torch.no_grad():
        one, two = (net.forward_features(inputs) for inputs in (x, changed))
    torch.testing.assert_close(one[:, :8], two[:, :8], rtol=0, atol=1e-9)
    assert (one[:, 8:] - two[:, 8:]).abs().amax(-1).min() > 1e-6
    if not events and row not in ("identity", "softmax", "gla", "lavo", "rwkv4", "s5"):
        state = net.blocks[0].mixer.mixer.init_state(1).memory
        assert state.numel() * (2 if state.is_complex() else 1) == 1024


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--tasks recall --pairs 4 65", "pairs=[4, 65] with length=64"),
        ("--tasks recall --pairs 0", "pairs=[0]"),
        ("--tasks parity --train-length 3", "train_length=3"),
        ("--rows forgets", "row 'forgets': expected"),
        ("--rows softmax --dim 33 --file {rows}", "heads"),
    ],
)
def test_wrong_options_fail_before_anything_is_trained(wrong, message, tmp_path, capsys):
    (tmp_path / "rows.yaml").write_text("softmax: {mixer: {class_path: SoftmaxAttention, init_args: {heads: 2}}}")
    with pytest.raises(SystemExit):
        memory.main(["associative", *wrong.format(rows=tmp_path / "rows.yaml").split(), "--out", str(tmp_path / "o")])
    assert message in capsys.readouterr().err and not (tmp_path / "o").exists()


WORDS = "--pairs 2 4 --length 16 --vocab 16 --train-length 8 --test-length 16 --tasks recall parity"
SMALL = {
    "recall": ("--gap 8 --frames 32 --older 0 3", "plain", ["last event"], ["the first event", "after 3 older events"]),
    "associative": (WORDS, "softmax", ["recall", "parity"], ["recall", "parity, trained to 8"]),
}


@pytest.mark.parametrize("experiment", SMALL)
def test_a_small_run(experiment, tmp_path, capsys):
    options, row, tasks, panels = SMALL[experiment]
    rows = [row, "identity"]
    shared = "--batch 4 --steps 1 --tests 6 --dim 16 --depth 1 --lr 1e-3 --seeds 3 5"
    memory.main([experiment, *options.split(), "--rows", *rows, *shared.split(), "--out", str(tmp_path)])
    runs = json.loads((tmp_path / "runs.json").read_text())
    assert [(run["task"], run["seed"], run["row"]) for run in runs] == list(product(tasks, [3, 5], rows))
    assert list(dict.fromkeys(panel for run in runs for panel in run["curves"])) == panels
    assert all(run["loss"] > 0 and len(c["accuracy"]) == len(c["x"]) for run in runs for c in run["curves"].values())
    text = (tmp_path / "table.md").read_text()
    assert all(f"### {panel}: accuracy by " in text for panel in panels) and text in capsys.readouterr().out
    assert (tmp_path / "memory.png").stat().st_size > 10_000 and "loss" in (tmp_path / "runs.csv").read_text()


@pytest.mark.slow
def test_a_network_learns_a_short_recall():
    options = {**OPTIONS, "pairs": [2, 4], "length": 16, "vocab": 16, "batch": 32, "steps": 100, "tests": 200}
    o = Namespace(**options, dim=32, depth=1, lr=1e-2)
    right = {}
    for row in ("softmax", "identity"):
        run = memory.run(o, ROWS["associative"], {"task": "recall", "row": row, "seed": 0})
        right[row] = run["curves"]["recall"]["accuracy"]
    assert min(right["softmax"]) > 0.9 > 0.4 > right["identity"][1]
