"""Masked language models: what is hidden, packs, the commands, and a training by the clock."""

import csv
import json
import math
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import timer
from torch.nn.functional import cross_entropy

from ndlightnet import NDLightNet
from ndlightnet.data.errors import DataError
from ndlightnet.layout import pack
from ndlightnet.training import MaskedTextData, MaskedTextTask, run
from ndlightnet.training.language.masked_data import HiddenTokens, collate_hidden
from ndlightnet.training.language.tokenize_command import tokenize_files
from tests.training.conftest import fit_and_test, last, launcher, options, set_up
from tests.training.forked import run_forked

CONFIG = """
seed_everything: 0
trainer: {accelerator: cpu, max_epochs: 1, log_every_n_steps: 1, enable_progress_bar: false}
model:
  lr: 1.0e-2
  net:
    class_path: ndlightnet.NDLightNet
    init_args: {dims: 1, vocab_size: 300, embed_dim: 16, depth: 1}
data:
  class_path: ndlightnet.training.MaskedTextData
  init_args: {root: nowhere, fractions: [0.8, 0.1, 0.1], length: 16, windows: 48, batch_size: 8, workers: 0}
"""
guess = launcher(MaskedTextTask, MaskedTextData, CONFIG)
TOKENIZER = SimpleNamespace(vocab_size=50, mask=50)  # a mask that no other token is


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """tokens: those of documents in a vocabulary that is trained on them."""
    folder = tmp_path_factory.mktemp("mlm")
    text = "the cat and the hat sat on the mat \n"
    lines = [json.dumps({"text": f"{number}: {text * (1 + number % 5)}"}) for number in range(90)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    assert tokenize_files([f"{folder}/a.jsonl", f"--out={folder}/tokens", "--train=280"]) == 0
    return folder


# ------------------------------------------------------------------------------- hidden tokens
@pytest.mark.parametrize(
    "length, fraction, count", [(100, 0.25, 25), (10, 0.15, 2), (9, 0.5, 4), (2, 0.1, 1), (1, 0.9, 1)]
)
def test_so_many_tokens_are_hidden_and_labels_say_what_they_were(length, fraction, count):
    text = torch.arange(length) + 100
    for texts in ([text], [(text, 7)]):  # windows come with their numbers
        for _ in range(20):
            tokens, places, labels, _ = HiddenTokens(texts, fraction, TOKENIZER)[0]
            assert len(set(places.tolist())) == len(places) == count
            assert torch.equal(labels, text[places]) and torch.equal(text, torch.arange(length) + 100)
            kept = torch.ones(length, dtype=torch.bool)
            kept[places] = False
            assert torch.equal(tokens[kept], text[kept])
            assert all(x.dtype == torch.int64 for x in (tokens, places, labels))


def test_eighty_percent_become_the_mask_and_ten_any_token():
    """Over 60,000 hidden tokens: each share lies within five deviations sqrt(p (1 - p) / n), which happens to all but
    one draw in 1.7 million; so do the places and the random tokens."""
    count, rounds = 100, 600
    items = HiddenTokens([torch.full((400,), 7)], 0.25, TOKENIZER)
    hidden, at = [], torch.zeros(400)
    for _ in range(rounds):
        tokens, places, *_ = items[0]
        hidden.append(tokens[places])
        at[places] += 1
    values = torch.cat(hidden)
    total = len(values)
    assert total == count * rounds

    def near(observed, share, trials):
        return abs(observed - share * trials) < 5 * math.sqrt(trials * share * (1 - share))

    counts = Counter(values.tolist())
    assert near(counts[50], 0.8, total)
    # one of the 50 random tokens is what it was, too
    assert near(counts[7], 0.1 + 0.1 / 50, total)
    rest = [counts[token] for token in range(50) if token != 7]
    assert near(sum(rest), 0.1 * 49 / 50, total) and all(near(n, 0.1 / 50, total) for n in rest)
    assert set(counts) == set(range(51))
    assert all(near(n, 0.25, rounds) for n in at.tolist())


def test_a_seed_hides_the_same_tokens():
    texts = [torch.randint(50, (40,)) for _ in range(4)]
    state = torch.get_rng_state()
    one, again, reseeded = (HiddenTokens(texts, 0.25, TOKENIZER, seed) for seed in (1, 1, 2))
    for index in (3, 0, 1, 2):
        assert all(torch.equal(a, b) for a, b in zip(one[index][:3], again[index][:3], strict=True))
        assert not torch.equal(one[index][1], reseeded[index][1])
    assert not torch.equal(one[0][1], one[1][1]) and torch.equal(state, torch.get_rng_state())
    free = HiddenTokens(texts, 0.25, TOKENIZER)
    assert not torch.equal(free[0][1], free[0][1])


@pytest.mark.parametrize("tied", [True, False])
def test_a_pack_is_what_its_texts_are_alone(close, tied):
    """The loss and its gradients, in float64, of texts of several lengths; and a batch of equal lengths is the pack."""
    net = NDLightNet(1, vocab_size=51, embed_dim=16, depth=2, tied=tied).double()
    loss = MaskedTextTask(net).called
    for sizes in ((9, 1, 30, 14), (12, 12, 12)):
        items = [HiddenTokens([torch.randint(50, (n,))], 0.4, TOKENIZER)[0] for n in sizes]
        joint = loss(*collate_hidden(items, pack)[:3])
        total = 0.0
        for tokens, places, labels, _ in items:
            total += cross_entropy(net(tokens[None])[0, places], labels, reduction="sum")
        expected = total / sum(len(places) for _, places, *_ in items)
        close(joint, expected, 1e-12)
        ours, theirs = (torch.autograd.grad(value, [*net.parameters()]) for value in (joint, expected))
        scale = max(x.abs().max().item() for x in theirs)
        assert all((a - b).abs().max() <= 1e-10 * scale for a, b in zip(ours, theirs, strict=True))
        if len(set(sizes)) == 1:
            close(loss(*collate_hidden(items)[:3]), expected, 1e-12)


@pytest.mark.parametrize("documents", [False, True])
def test_batches_differ_from_epoch_to_epoch_and_held_out_ones_never(folder, documents):
    data = MaskedTextData(str(folder / "tokens"), (0.8, 0.1, 0.1), 16, 48, 8, workers=0, documents=documents)
    data.setup("fit")

    def batches(loader, epoch=0):
        for sampler in (loader.sampler, loader.batch_sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        return [torch.cat([tokens.values.flatten() if documents and loader is train else tokens.flatten(), labels])
                for tokens, _, labels, _ in loader]  # fmt: skip

    train = data.train_dataloader()
    first, second = batches(train), batches(train, 1)
    assert all(torch.equal(a, b) for a, b in zip(first, batches(train), strict=True))
    assert len(first) == len(second) and not any(map(torch.equal, first, second))
    if documents:
        sizes = data.train_lengths.tolist()
        spans = data.splits[0].documents(data.tokenizer.end, 16, 0).tolist()
        alone = sum(stop - start == 1 for start, stop in spans)  # pieces of one token, which are left out
        assert sum(sizes) == len(data.splits[0]) - alone and 1 < min(sizes) <= max(sizes) <= 16
        assert all(tokens.values.numel() <= 8 * 16 for tokens, *_ in train)
    for loader in (data.val_dataloader, data.test_dataloader):
        held = batches(loader())
        torch.rand(3)
        assert held and all(map(torch.equal, held, batches(loader())))


# ------------------------------------------------------------------------------- the task
@pytest.mark.parametrize(
    "data, net, message",
    [
        ({"tokenizer": "bytes"}, {}, r"data\.tokenizer: has no token that hides another, expected one with a token "),
        ({}, {"causal": True}, ".*expected a network with causal=False, got True"),
        ({}, {"num_classes": 3}, ".*expected a network with per_token=True, got False"),
        ({}, {"vocab_size": 279}, r"model\.net\.vocab_size: 279, expected 280 or more"),
        ({"length": 1}, {}, r"data\.length: 1, expected 2 or more"),
        ({"hidden": 0.0}, {}, r"data\.hidden: 0\.0, expected a fraction between 0 and 1"),
    ],
)
def test_what_does_not_fit(folder, data, net, message):
    root = folder / ("a.jsonl" if "tokenizer" in data else "tokens")
    options = {"fractions": (0.8, 0.1, 0.1), "length": 16, "windows": 8, "batch_size": 2, "workers": 0} | data
    arguments = {"vocab_size": 280, "embed_dim": 8, "depth": 1} | net
    with pytest.raises(DataError, match=f"^{message}"):
        set_up(MaskedTextTask(NDLightNet(1, **arguments)), MaskedTextData(str(root), **options))


@pytest.mark.slow
@pytest.mark.parametrize("documents", [False, True])
def test_commands_end_to_end(guess, folder, tmp_path, documents):
    """What `test` writes are the means over all hidden tokens of the test windows."""
    shutil.copytree(folder / "tokens", tmp_path / "tokens")
    root, out = tmp_path / "tokens", tmp_path / "out"
    data = {"documents": documents}
    done = fit_and_test(guess, root=root, out=out, data=data, trainer={"max_epochs": 4, "limit_train_batches": 6})
    metrics = json.loads((out / "metrics.json").read_text())
    assert f"loss {metrics['loss']:.3f}, accuracy {metrics['accuracy']:.3f} of hidden tokens" in done.out
    held = MaskedTextData(str(root), (0.8, 0.1, 0.1), 16, 48, 8, workers=0)
    torch.manual_seed(9)  # which plays no part
    held.setup("test")
    net = NDLightNet.from_checkpoint(last(out)).eval()
    losses, right = [], []
    with torch.no_grad():
        for number in range(len(held.test_set)):
            tokens, places, labels, _ = held.test_set[number]
            scores = net(tokens[None])[0, places]
            losses.append(cross_entropy(scores, labels, reduction="none"))
            right.append(scores.argmax(-1) == labels)
    losses, right = torch.cat(losses), torch.cat(right).float()
    assert metrics["hidden_tokens"] == len(losses) == 4 * len(held.test_set) > 20
    assert metrics["loss"] == pytest.approx(losses.mean().item(), rel=1e-4)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    assert metrics["accuracy"] == pytest.approx(right.mean().item(), abs=1e-6)
    assert 0 < metrics["loss"] < math.log(280) and metrics["steps"] == 24
    again = guess("predict", root=root, out=out, data=data, ckpt=last(out))
    assert again.status != 0 and "Traceback" not in again.err
    shutil.rmtree(root)
    gone = guess("test", root=root, out=out, data=data, ckpt=last(out))
    assert gone.status == 1 and gone.errors[0].startswith(f"error: {root}: no such file")


class Recorded(MaskedTextTask):
    """Writes the numbers of the texts of each batch."""

    def training_step(self, batch, number):
        (self.out() / f"{self.global_rank}-{number}.json").write_text(json.dumps(batch[3].tolist()))
        return super().training_step(batch, number)


def command(*words):
    return run(Recorded, MaskedTextData, Path("no default"), None, [str(word) for word in words])


@pytest.mark.slow
def test_two_processes_share_the_documents_and_count_a_window_once(folder, tmp_path):
    (tmp_path / "c.yaml").write_text(CONFIG)
    outs = [tmp_path / name for name in ("two", "one")]
    words = options(root=folder / "tokens", data={"documents": True, "batch_size": 4, "test_tokens": 19 * 16})
    for name, out, count in (("fit", outs[0], 2), ("test", outs[0], 2), ("test", outs[1], 1)):
        places = options(out=out, trainer={"devices": count}, **({} if name == "fit" else {"ckpt": last(outs[0])}))
        arguments = [name, f"--config={tmp_path}/c.yaml", *words, *places]
        assert run_forked(tmp_path / "log", command, *arguments, count=count) == [0] * count
    numbers = [[n for file in outs[0].glob(f"{rank}-*.json") for n in json.loads(file.read_text())] for rank in (0, 1)]
    data = MaskedTextData(str(folder / "tokens"), (0.8, 0.1, 0.1), 16, workers=0, documents=True)
    data.setup("fit")
    assert sorted(numbers[0] + numbers[1]) == list(range(len(data.train_set))) and all(numbers)
    two, one = (json.loads((out / "metrics.json").read_text()) for out in outs)
    assert two["hidden_tokens"] == one["hidden_tokens"] == 4 * 19  # of windows that two processes cannot share evenly
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5) and two["accuracy"] == one["accuracy"]


def logged(out, name):
    """The values of a column of all logs, in the order of the steps."""
    files = sorted((out / "logs").glob("*/metrics.csv"), key=lambda file: int(file.parent.name.split("_")[1]))
    rows = [row for file in files for row in csv.DictReader(file.open(newline=""))]
    return [float(row[name]) for row in rows if row.get(name)]


@pytest.mark.slow
def test_minutes_end_a_training_and_its_schedule(guess, folder, tmp_path, monkeypatch):
    """By a clock that goes on a second at a time, whenever it is read. A resumed training has the rest."""
    clock = [5000.0]

    def monotonic():
        clock[0] += 1
        return clock[0]

    monkeypatch.setattr(timer, "time", SimpleNamespace(monotonic=monotonic))

    def trained(checkpoint):
        return checkpoint["callbacks"]["Timer"]["time_elapsed"]["train"]

    values = {"root": folder / "tokens", "out": tmp_path / "out", "trainer": {"max_epochs": 1000}}
    guess("fit", **values, model={"minutes": 1.0}).well()
    saved = torch.load(last(tmp_path / "out"), weights_only=True)
    steps, rates = saved["global_step"], logged(tmp_path / "out", "lr-AdamW/pg1")
    assert 60 / 4 <= steps <= 60 and trained(saved) >= 60
    peak = rates.index(max(rates))
    assert max(rates) > 0.0095 and peak < steps / 4 and rates[-1] < 0.001
    assert rates[:peak] == sorted(rates[:peak]) and rates[peak:] == sorted(rates[peak:], reverse=True)
    # twice as long: the cosine of a half and on
    guess("fit", **values, model={"minutes": 2.0}, ckpt=last(tmp_path / "out")).well()
    more = torch.load(last(tmp_path / "out"), weights_only=True)
    assert 1.5 * steps < more["global_step"] < 2.5 * steps and 120 <= trained(more) < 140
    rates = logged(tmp_path / "out", "lr-AdamW/pg1")[steps:]
    assert 0.003 < rates[1] < 0.006 and rates[-1] < 0.001
    guess("fit", **values, model={"minutes": 1.0}, ckpt=last(tmp_path / "out")).well()  # nothing is left
    assert torch.load(last(tmp_path / "out"), weights_only=True)["global_step"] <= more["global_step"] + 1
