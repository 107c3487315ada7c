"""Summaries: samples, ROUGE, the loss, fit, test and predict, bad files."""

import csv
import gzip
import json
from pathlib import Path

import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer
from torch.nn.functional import cross_entropy

from ndlightnet.data.errors import DataError
from ndlightnet.data.text.tokenizer import ByteTokenizer
from ndlightnet.inference import beam_search
from ndlightnet.models import Seq2Seq
from ndlightnet.training.language.summary_data import NOT_COUNTED, MadeNotes, SummaryData, collate_pairs
from ndlightnet.training.language.summary_task import ROUGES, SummaryTask, first_sentence, rouge
from tests.training.conftest import fit_and_test, last, launch, launcher, set_up

CONFIG = """
seed_everything: 0
trainer: {accelerator: cpu, max_epochs: 2, log_every_n_steps: 1, enable_progress_bar: false}
model:
  lr: 1.0e-2
  beams: 2
  net:
    class_path: ndlightnet.models.Seq2Seq
    init_args: {vocab_size: 256, embed_dim: 16, depth: 1, decoder_depth: 1, tpe_states: 4}
data:
  class_path: ndlightnet.training.language.summary_data.SummaryData
  init_args: {root: nowhere, batch_size: 4, target_length: 8}
"""
SMALL = {"embed_dim": 16, "depth": 1, "decoder_depth": 1, "tpe_states": 4}
summarize = launcher(SummaryTask, SummaryData, CONFIG)


def summary_of(number: int) -> str:
    """Of four to six bytes."""
    return f"no {10 ** (number % 3)}"


def write_texts(folder: Path, train: int = 20, test: int = 6) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("test", test)):
        rows = [{"document": f"The {n} of it. More.", "summary": [summary_of(n), "none"]} for n in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def task_of(**options) -> SummaryTask:
    return SummaryTask(Seq2Seq(256, **SMALL), **options)


# --------------------------------------------------------------------------------- samples
def test_samples_and_batches(tmp_path, capsys):
    data = SummaryData(str(write_texts(tmp_path)), val=0.1, length=30, target_length=4)
    set_up(task_of(), data)
    assert len(data.train_set) == 18 and len(data.val_set) == 2
    source, target, number = data.train_set[0]
    text, end = ByteTokenizer().decode(source[:-1].tolist()), ByteTokenizer.end
    assert text.startswith("The ") and source[-1] == end and number == 1
    assert target.tolist() == [end, *b"no ", end]  # cut to four tokens, the end among them
    assert capsys.readouterr().err.count("20 of 20 samples are cut") == 1  # of both parts at once
    batch = collate_pairs(
        [(torch.tensor([1, 2, 0]), torch.tensor([0, 5, 6, 0]), 3), (torch.tensor([7, 0]), torch.tensor([0, 8, 0]), 4)]
    )
    assert batch.source.tolist() == [[1, 2, 0], [7, 0, 0]] and batch.mask.tolist() == [[True] * 3, [True, True, False]]
    assert batch.inputs.tolist() == [[0, 5, 6], [0, 8, 0]]
    assert batch.labels.tolist() == [[5, 6, 0], [8, 0, NOT_COUNTED]] and batch.numbers.tolist() == [3, 4]


def test_what_is_cut_is_noted(tmp_path, capsys):
    set_up(task_of(), SummaryData(str(write_texts(tmp_path)), val=0, target_length=4))
    assert "train.jsonl: 20 of 20 samples are cut to length=512 or target_length=4 tokens" in capsys.readouterr().err


# --------------------------------------------------------------------------------- measures
@pytest.mark.parametrize(
    "written, references",
    [
        ("the cats were sitting", ["A cat sat on the mat", "the cats sit"]),
        ("one two three", ["three two one"]),
        ("", ["nothing"]),
        ("Running quickly, it ran.", ["it runs quick"]),
    ],
)
def test_rouge_is_that_of_its_authors_library(written, references):
    scorer = RougeScorer(ROUGES, use_stemmer=True)
    each = [scorer.score(reference, written) for reference in references]
    expected = max(each, key=lambda one: one["rouge1"].fmeasure)
    values = rouge(written, references)
    assert values["rouge1"] == pytest.approx(expected["rouge1"].fmeasure, abs=1e-6)
    if len(references) == 1:
        assert values == pytest.approx({name: one.fmeasure for name, one in each[0].items()}, abs=1e-6)


def test_first_sentence():
    assert first_sentence(" It is 3.5 m. Then more. End") == "It is 3.5 m."
    assert first_sentence("Really?\nYes!") == "Really?" and first_sentence("Go!\tNow.") == "Go!"
    assert first_sentence("no end") == "no end"


def test_the_loss_is_a_mean_over_words(close):
    """Padding does not count, and a batch is what its samples are alone."""
    task = task_of(label_smoothing=0.0).double()
    task.log = lambda *_, **__: None
    items = [(torch.randint(256, (n,)), torch.randint(256, (m,)), i) for i, (n, m) in enumerate(((9, 4), (5, 7)))]
    losses = [task.training_step(collate_pairs([item]), 0) * (len(item[1]) - 1) for item in items]
    close(task.training_step(collate_pairs(items), 0), sum(losses) / 9, 1e-12)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"val": 1.0}, "^data.val: 1.0, expected a file, or a fraction below 1"),
        ({"length": 1}, "^data.length: 1, expected 2 or more tokens"),
        ({"val": "gone.jsonl"}, "gone.jsonl: no such file"),
        ({"target": "title"}, "train.jsonl, line 1: has no field title"),
        ({"val": 0.99}, "val=0.99 leaves none of its rows to train on"),
        ({"tokenizer": "gone"}, "^tokenizer=gone: no such tokenizer"),
    ],
)
def test_wrong_data(tmp_path, options, message):
    with pytest.raises(DataError, match=message):
        set_up(task_of(), SummaryData(str(write_texts(tmp_path)), **options))


@pytest.mark.parametrize("options, name", [({"beams": 0}, "beams"), ({"label_smoothing": 1.0}, "label_smoothing")])
def test_wrong_options_of_the_task(options, name):
    with pytest.raises(DataError, match=f"^model.{name}"):
        task_of(**options)


# --------------------------------------------------------------------------------- commands
@pytest.fixture(scope="module")
def run(summarize, tmp_path_factory) -> Path:
    """The folder of a finished fit and test."""
    folder = tmp_path_factory.mktemp("run")
    done = fit_and_test(summarize, root=write_texts(folder / "data"), out=folder / "out")
    assert done.out.startswith("ROUGE-1 ") and "over 6 texts" in done.out
    return folder / "out"


@pytest.mark.slow
def test_the_files_of_a_test(run):
    metrics = json.loads((run / "metrics.json").read_text())
    with (run / "test.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["source"] for row in rows] == [f"The {n} of it. More." for n in range(6)]
    assert [row["reference"] for row in rows] == [f"{summary_of(n)} | none" for n in range(6)]
    assert [row["place"] for row in rows] == [f"{run.parent / 'data' / 'test.jsonl'}, line {n + 1}" for n in range(6)]
    for name in ROUGES:
        each = [rouge(row["written"], row["reference"].split(" | "))[name] for row in rows]
        assert metrics[name] == pytest.approx(sum(each) / 6, abs=1e-5)
        assert [float(row[name]) for row in rows] == pytest.approx(each, abs=1e-5)
        lead = [rouge(f"The {n} of it.", [summary_of(n), "none"])[name] for n in range(6)]
        assert metrics["first_sentence"][name] == pytest.approx(sum(lead) / 6, abs=1e-5)
    assert metrics["texts"] == 6 and metrics["beams"] == 2
    net, end, nll = Seq2Seq.from_checkpoint(last(run)), ByteTokenizer.end, []
    for n, row in enumerate(rows):  # each text alone
        source = torch.tensor([[*row["source"].encode(), end]])
        target = torch.tensor([[end, *summary_of(n).encode(), end]])
        with torch.no_grad():
            nll += cross_entropy(net(source, target[:, :-1])[0], target[0, 1:], reduction="none").tolist()
        words = beam_search(net, source, 8, begin=end, end=end, beams=2)[0]
        assert row["written"] == ByteTokenizer().decode(words).strip()
    assert len(nll) == 2 * (5 + 6 + 7) and metrics["loss"] == pytest.approx(sum(nll) / len(nll), abs=1e-4)
    page = (run / "index.html").read_text()
    assert all(f"Reference: {summary_of(n)} | none" in page for n in range(6)) and page.count("<h2>") == 6


@pytest.mark.slow
def test_predict_reads_texts_and_names_what_it_cannot(run, summarize, tmp_path):
    """The training data need not exist."""
    (tmp_path / "a.txt").write_text("The 1 of it.")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write('{"document": "The 2 of it."}\n{"document": ["The", "3 of it."]}\n')
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe\x00")
    out = tmp_path / "out"
    done = summarize("predict", root=tmp_path / "gone", out=out, input=tmp_path, ckpt=last(run))
    assert done.status == 1 and len(done.errors) == 1 and "c.txt" in done.errors[0]
    with (out / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [f"{tmp_path / 'a.txt'}", *(f"{tmp_path / 'b.jsonl.gz'}, line {n}" for n in (1, 2))]
    assert [row["file"] for row in rows] == names and list(rows[0]) == ["file", "written"]


@pytest.mark.slow
@pytest.mark.parametrize("content, message", [(b"\xff\xfe", "cannot be read"), (b" \n", "is blank, expected a text")])
def test_predict_of_nothing_that_can_be_read(run, summarize, tmp_path, content, message):
    (tmp_path / "a.txt").write_bytes(content)
    done = summarize("predict", root=tmp_path / "gone", out=tmp_path / "out", input=tmp_path, ckpt=last(run))
    assert done.status == 1 and len(done.errors) == 1 and f"a.txt: {message}" in done.errors[0]


@pytest.mark.slow
def test_made_notes(tmp_path):
    """They are made by the first run, with their tokenizer, which the checkpoint holds."""
    config = CONFIG.replace("SummaryData", "MadeNotes").replace("target_length: 8", "samples: [40, 8], sentences: 2")
    config = config.replace("vocab_size: 256", "vocab_size: 600")
    root, out = tmp_path / "data", tmp_path / "out"
    launch(SummaryTask, SummaryData, config, tmp_path, "fit", root=root, out=out).well()
    assert len((root / "train.jsonl").read_text().splitlines()) == 40
    assert torch.load(last(out), weights_only=True)["tokenizer"] == (root / "tokenizer.json").read_text()
    for wrong, name in (({"samples": (0, 1)}, "samples"), ({"sentences": 0}, "sentences")):
        with pytest.raises(DataError, match=f"data.{name}"):
            MadeNotes("", **wrong)
