"""Texts of any vocabulary: documents end to end, files of their own, what fits, and counts by hand."""

import csv
import json
import math
import os
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn

from ndlightnet import NDLightNet
from ndlightnet.data.errors import DataError
from ndlightnet.data.text.tokenizer import ByteTokenizer, load_tokenizer, train_tokenizer
from ndlightnet.data.text.tokens import read_tokens
from ndlightnet.training import TextData, TextTask
from ndlightnet.training.language.measures import extent
from ndlightnet.training.language.tokenize_command import tokenize_files
from tests.training.conftest import last, launch, set_up

DATA = Path(os.environ.get("NDLIGHTNET_DATA", "nowhere"))
WORDS = "the cat and the hat sat on the mat with 3,141 数学 books \n"
CONFIG = """
seed_everything: 0
trainer: {accelerator: cpu, max_epochs: 1, log_every_n_steps: 1, enable_progress_bar: false}
model:
  lr: 1.0e-2
  net:
    class_path: ndlightnet.NDLightNet
    init_args: {dims: 1, vocab_size: 300, causal: true, embed_dim: 16, depth: 1}
data:
  class_path: ndlightnet.training.TextData
  init_args: {root: nowhere, length: 16, windows: 24, batch_size: 4, lengths: [32], test_tokens: 64, workers: 0}
"""


@pytest.fixture(scope="module")
def bpe():
    return train_tokenizer([WORDS * 3], 280)


def write_documents(path: Path, count: int = 60) -> Path:
    """Documents of one to nine sentences, each with its number."""
    lines = [json.dumps({"text": f"{number}: {WORDS * (1 + number % 9)}"}) for number in range(count)]
    path.write_text("\n".join(lines))
    return path


# ------------------------------------------------------------------------------- documents
@pytest.mark.parametrize("options", [{}, {"mixer": "text_mixer", "depth": 3}, {"tied": False}])
def test_a_pack_trains_as_each_document_alone(close, options):
    """The loss and all gradients, in float64: none sees another."""
    net = NDLightNet(1, vocab_size=30, causal=True, **{"embed_dim": 64, "depth": 1} | options).double()
    documents = [torch.randint(30, (n,)) for n in (9, 2, 17, 33)]
    loss = TextTask(net).called
    packed, labels = TextData.pack_documents(documents)
    assert labels.tolist() == [token for one in documents for token in one[1:].tolist()]
    joint = loss(packed, labels=labels)
    alone = sum(loss(one[None]) * (len(one) - 1) for one in documents) / len(labels)
    close(joint, alone, 1e-12)
    names = dict(net.named_parameters())
    ours, theirs = (torch.autograd.grad(value, [*names.values()]) for value in (joint, alone))
    scale = max(x.abs().max().item() for x in theirs)
    for name, a, b in zip(names, ours, theirs, strict=True):
        assert (a - b).abs().max() <= 1e-10 * scale, name
    swapped, _ = TextData.pack_documents([documents[0].flip(0), *documents[1:]])
    rest = [net.forward_features(x).values[8:] for x in (packed, swapped)]
    close(*rest, 1e-12)


def test_an_epoch_has_each_document_once_in_packs_that_change(bpe, tmp_path):
    """The same for the same seed and epoch; long ones in pieces."""
    data = TextData(
        str(write_documents(tmp_path / "a.jsonl")), (0.8, 0.1, 0.1), 48, batch_size=4, lengths=(), workers=0,
        tokenizer="bytes", documents=True,
    )  # fmt: skip
    data.setup("fit")
    epochs = []
    for epoch in (0, 1, 0):
        loader = data.train_dataloader()
        loader.sampler.set_epoch(epoch)
        epochs.append(list(loader))
    first, second, again = ([labels.tolist() for _, labels in batches] for batches in epochs)
    assert first == again != second and len(first) == len(second) > 5
    assert max(len(labels) for labels in first) <= 4 * 49
    pieces = [data.train_set[number][1:].tolist() for number in range(len(data.train_set))]
    assert sum(map(len, pieces)) == len(data.splits[0]) - 1  # all are predicted but the first
    for batches in epochs:
        tokens = Counter(token for _, labels in batches for token in labels.tolist())
        assert tokens == Counter(token for piece in pieces for token in piece)
        for packed, labels in batches:
            assert packed.values.shape == labels.shape and packed.values.dtype == labels.dtype == torch.int64


def test_a_document_is_not_drawn_twice_alike(monkeypatch):
    """What samples draw from torch's generator follows from the seed, the epoch and their number."""

    class Noise:
        def __len__(self):
            return 9

        def __getitem__(self, index):
            return index, float(torch.rand(()))

    data = TextData(".", length=2, batch_size=1, lengths=(), workers=0, documents=True)
    data.train_set, data.train_lengths = Noise(), [1] * 9
    monkeypatch.setattr(data, "pack_documents", list)

    def draws(seed, epoch):
        data.seed = seed
        loader = data.train_dataloader()
        loader.sampler.set_epoch(epoch)
        return dict(pair for batch in loader for pair in batch)

    state = torch.get_rng_state()
    a, b, c = draws(1, 0), draws(1, 1), draws(2, 0)
    assert torch.equal(state, torch.get_rng_state())
    assert draws(1, 0) == a and sorted(a) == sorted(b) == list(range(9))
    assert len({*a.values(), *b.values(), *c.values()}) == 27


@pytest.mark.slow
@pytest.mark.parametrize("documents", [False, True])
def test_a_resumed_training_is_one_without_a_stop(tmp_path, documents):
    """With dropout, to the last bit."""
    write_documents(tmp_path / "a.jsonl", 30)
    values = {
        "root": tmp_path / "a.jsonl",
        "data": {"documents": documents, "tokenizer": "bytes", "fractions": [0.6, 0.2, 0.2]},
        "net": {"dropout": 0.3},
    }

    def fit(name, epochs, **more):
        # rates that do not follow from the number of steps
        model = {"schedule": "inverse_sqrt", "warmup_epochs": 1}
        trainer = {"max_epochs": epochs, "limit_train_batches": 6}
        out = tmp_path / name
        launch(
            TextTask, TextData, CONFIG, tmp_path, "fit", out=out, trainer=trainer, model=model, **values, **more
        ).well()
        return torch.load(last(out), weights_only=True)["state_dict"]

    one, half = fit("one", 2), fit("parts", 1)
    parts = fit("parts", 2, ckpt=last(tmp_path / "parts"))
    assert all(torch.equal(one[name], parts[name]) for name in one)
    assert not any(torch.equal(half[name], parts[name]) for name in one if one[name].ndim > 1)


# ------------------------------------------------------------------------------- the texts
def test_validation_and_test_may_have_files_of_their_own(tmp_path):
    """The share that a part would have had is trained on."""
    for name, first in (("train", 0), ("val", 100), ("test", 200)):
        (tmp_path / name).write_bytes(bytes(range(first, first + 40)))
    root, val, test = (str(tmp_path / name) for name in ("train", "val", "test"))
    for options, sizes in (
        ({}, (32, 4, 4)),
        ({"val": val}, (36, 40, 4)),
        ({"test": test}, (36, 4, 40)),
        ({"val": val, "test": test}, (40, 40, 40)),
    ):
        data = TextData(root, (0.8, 0.1, 0.1), 3, lengths=(), workers=0, **options)
        data.setup("fit")
        assert tuple(map(len, data.splits)) == sizes
        starts = [int(part[:1]) for part in data.splits]
        trained = 40 - sum(size for size in sizes[1:] if size == 4)
        assert starts == [0, 100 if "val" in options else trained, 200 if "test" in options else 36]
    with pytest.raises(DataError, match="gone: no such file"):
        TextData(root, val="gone", length=3).setup("fit")


@pytest.mark.parametrize(
    "length, lengths, tokens, chosen, tested, missing",
    [
        (8, (16, 64), 999, [8, 16, 64], 64, ""),  # of 100 tokens
        (8, (16, 64), 63, [8, 16], 48, "63 tokens to test on: windows of [64] are left out"),
        (8, (128, 256), 999, [8], 96, "99 tokens to test on: windows of [128, 256] are left out"),
        (8, (5, 7), 999, [5, 8], 80, "99 tokens to test on: windows of [7] are left out"),
        (9, (5, 7, 45), 999, [5, 9], 90, "99 tokens to test on: windows of [7, 45] are left out"),
        (99, (), 999, [99], 99, ""),
    ],
)
def test_lengths_that_do_not_fit_are_left_out(tmp_path, capsys, length, lengths, tokens, chosen, tested, missing):
    """The training length stays; every length is of the same tokens."""
    (tmp_path / "text").write_bytes(bytes(range(250)) * 2)
    data = TextData(str(tmp_path / "text"), (0.4, 0.4, 0.2), length, lengths=lengths, test_tokens=tokens, workers=0)
    data.setup("test")
    assert (data.lengths, data.tested) == (chosen, tested)
    assert data.test_text.tolist() == [(400 + i) % 250 for i in range(tested + 1)]
    err = capsys.readouterr().err
    assert f"{tmp_path}/text: {missing}" in err if missing else "left out" not in err
    data.setup("test")  # again, as `fit` and then `test` do
    assert (data.lengths, data.tested) == (chosen, tested) and "left out" not in capsys.readouterr().err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """tokens: documents in a vocabulary that is trained on them; documents: their file."""
    folder = tmp_path_factory.mktemp("tokens")
    write_documents(folder / "a.jsonl", 90)
    assert tokenize_files([f"{folder}/a.jsonl", f"--out={folder}/tokens", "--train=280"]) == 0
    return folder


def test_tokens_of_another_tokenizer_are_refused(folder, bpe, tmp_path):
    ByteTokenizer().save(tmp_path / "tokenizer.json")
    data = TextData(str(folder / "tokens"), tokenizer=str(tmp_path), length=8)
    with pytest.raises(DataError, match=f"^{folder}/tokens: has the tokens of another tokenizer"):
        data.setup("fit")
    written = TextData(str(folder / "tokens"), length=8, lengths=(), workers=0)
    net = NDLightNet(1, vocab_size=279, causal=True, embed_dim=8, depth=1)
    with pytest.raises(DataError, match=r"^model\.net\.vocab_size: 279, expected 280 or more, those of the tokenizer"):
        set_up(TextTask(net), written)
    assert written.tokenizer.digest == load_tokenizer(folder / "tokens").digest


# ------------------------------------------------------------------------------- counts
@pytest.mark.slow
def test_words_and_line_ends_of_wikitext():
    """Those of the validation part, as its authors count them: 217,646."""
    path = DATA / "wikitext103_eval" / "wiki.valid.tokens.xz"
    if not path.is_file() or not (DATA / "gpt2_bpe").is_dir():
        pytest.skip(f"not here: {path} and gpt2_bpe")
    tokenizer = load_tokenizer(DATA / "gpt2_bpe")
    text = read_tokens(path, tokenizer)
    counts = extent(text[:], tokenizer)
    assert counts.words == 217_646 and counts.tokens == len(text) and int(text[-1:]) == tokenizer.end
    assert tokenizer.decode(text[:-1].tolist()).count("<unk>") > 600


def test_extents_by_hand(bpe):
    text = " the cat\n数学 sat\n\n"
    ids = bpe.encode([text])[0]
    tokens = torch.tensor([*ids, bpe.end, *ids, bpe.end])
    assert extent(tokens, bpe) == (2 * len(ids) + 2, 2 * len(text.encode()), 2 * (4 + 3))
    assert extent(torch.tensor(list(b"a b\xff\0\n")), ByteTokenizer()) == (6, 6, 3)


class Fixed(nn.Module):
    """Token b, whatever comes before it: the next one costs as `logits` say."""

    def __init__(self, size):
        super().__init__()
        self.logits = torch.randn(size, size)

    def forward(self, x):
        return self.logits[x]


def test_perplexities_and_bits_per_byte_by_hand(folder, tmp_path):
    """Of the predicted tokens of the test text; ends of documents cost and have no bytes."""
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", default_root_dir=tmp_path, **silent)
    data, net = TextData(str(folder / "tokens"), length=25, lengths=(50, 100), workers=0, test_tokens=10**6), Fixed(280)
    trainer.test(TextTask(net), data, verbose=False)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    tokenizer, text = data.tokenizer, data.splits[2][:].tolist()
    count = (len(text) - 1) // 100 * 100
    assert count >= 200 and text[1 : count + 1].count(tokenizer.end) > 1
    scores = net.logits.double().log_softmax(-1)
    nats = -sum(float(scores[a, b]) for a, b in pairwise(text[: count + 1]))
    decoded = tokenizer.decode(token for token in text[1 : count + 1] if token != tokenizer.end)
    size, words = len(decoded.encode()), len(decoded.split()) + decoded.count("\n")
    assert [metrics[f"test_{name}"] for name in ("tokens", "bytes", "words")] == [count, size, words]
    for length in ("25", "50", "100"):
        assert metrics["bits_per_byte_at"][length] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
        assert metrics["perplexity_at"][length] == pytest.approx(math.exp(nats / count), rel=1e-4)
        assert metrics["word_perplexity_at"][length] == pytest.approx(math.exp(nats / words), rel=1e-3)
    by_position = metrics["bits_per_byte_by_position"]
    assert list(by_position) == ["0-25", "25-50", "50-100"]
    mean = sum(by_position[span] * share for span, share in zip(by_position, (0.25, 0.25, 0.5), strict=True))
    assert mean == pytest.approx(metrics["bits_per_byte"], rel=1e-5)


# ------------------------------------------------------------------------------- trainings
@pytest.mark.slow
def test_accumulated_batches_are_one_large_batch(folder, tmp_path):
    """step_tokens: as many steps, each of the same windows."""
    runs = []
    for name, batch, model in (("large", 8, {}), ("small", 2, {"step_tokens": 8 * 16})):
        out, model = tmp_path / name, {**model, "warmup_epochs": 1}
        launch(
            TextTask, TextData, CONFIG, tmp_path, "fit", out=out, root=folder / "tokens", model=model,
            data={"batch_size": batch, "windows": 48}, trainer={"precision": "64-true", "max_epochs": 1},
        ).well()  # fmt: skip
        runs.append(torch.load(last(out), weights_only=True))
    assert [run["global_step"] for run in runs] == [6, 6]
    large, small = (run["state_dict"] for run in runs)
    for name, value in large.items():
        assert (value - small[name]).abs().max() < 1e-9, name
    for tokens in (3 * 16, 2 * 16 + 1, 16):
        done = launch(
            TextTask, TextData, CONFIG, tmp_path, "fit", out=tmp_path / "none", root=folder / "tokens",
            data={"batch_size": 2}, model={"step_tokens": tokens},
        )  # fmt: skip
        assert done.status == 1 and done.errors[0].startswith(
            f"error: model.step_tokens: {tokens}, expected a multiple "
        )


@pytest.mark.slow
@pytest.mark.parametrize("documents", [False, True])
def test_a_vocabulary_end_to_end(folder, tmp_path, documents):
    """Train, test, and predict without the vocabulary's and the text's files."""
    shutil.copytree(folder / "tokens", tmp_path / "tokens")
    out, root = tmp_path / "out", tmp_path / "tokens"
    values = {"out": out, "root": root, "data": {"documents": documents}}
    launch(
        TextTask, TextData, CONFIG, tmp_path, "fit", **values, trainer={"max_epochs": 4, "limit_train_batches": 6}
    ).well()
    launch(TextTask, TextData, CONFIG, tmp_path, "test", **values, ckpt=last(out)).well()
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["test_tokens"] == 64 and metrics["test_bytes"] > 64
    assert metrics["perplexity_at"]["16"] < 150 < 280  # of a uniform guess
    saved = torch.load(last(out), weights_only=True)
    tokenizer = load_tokenizer(root)
    assert saved["tokenizer"] == tokenizer.text
    shutil.rmtree(root)
    (tmp_path / "new.txt").write_text(WORDS * 3)
    done = launch(
        TextTask, TextData, CONFIG, tmp_path, "predict", out=out, ckpt=last(out), input=tmp_path / "new.txt"
    ).well()
    assert "1 files, " in done.out
    with (out / "predictions.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    ids = [*tokenizer.encode([WORDS * 3])[0], tokenizer.end]
    assert int(row["tokens"]) == len(ids) - 1
    assert int(row["bytes"]) == len(tokenizer.decode(ids[1:-1]).encode())
    net = NDLightNet.from_checkpoint(last(out)).eval()
    with torch.no_grad():
        scores = net(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    bits = -float(scores.gather(1, torch.tensor(ids[1:])[:, None]).sum()) / math.log(2)
    assert float(row["bits_per_byte"]) == pytest.approx(bits / int(row["bytes"]), rel=1e-4)


@pytest.mark.slow
def test_another_vocabulary_than_the_checkpoints_is_refused(folder, tmp_path):
    out = tmp_path / "out"
    launch(TextTask, TextData, CONFIG, tmp_path, "fit", out=out, root=folder / "tokens", data={"windows": 4}).well()
    (tmp_path / "text").write_text(WORDS * 40)
    done = launch(TextTask, TextData, CONFIG, tmp_path, "test", out=out, root=tmp_path / "text", ckpt=last(out))
    assert done.status == 1 and len(done.errors) == 1 and "the checkpoint was trained on" in done.errors[0]
