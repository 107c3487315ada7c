"""Classification of texts: packs, pairs, metrics, regression, other trainings' weights, predictions, the table."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from ndlightnet import NDLightNet
from ndlightnet.data.errors import DataError
from ndlightnet.data.made.sentences import CLASSES
from ndlightnet.data.packing import PackCollate
from ndlightnet.data.text.tokenizer import train_tokenizer
from ndlightnet.training import TaskCLI
from ndlightnet.training.language.sentence_data import ListOps, SentenceData, join_texts
from ndlightnet.training.language.table_command import table
from ndlightnet.training.language.text_cls_task import TextClsTask, measure
from tests.training.conftest import fit_and_test, last, launch, launcher, save_language_model, set_up

ROOT = Path(__file__).parents[3]
GLUE = sorted((ROOT / "configs/glue").glob("*.yaml"))
CONFIG = """
seed_everything: 0
trainer: {accelerator: cpu, max_epochs: 1, log_every_n_steps: 1, enable_progress_bar: false}
model:
  lr: 1.0e-2
  net:
    class_path: ndlightnet.NDLightNet
    init_args: {dims: 1, vocab_size: 256, num_classes: 3, embed_dim: 8, depth: 1}
data:
  class_path: ndlightnet.training.language.sentence_data.SentenceData
  init_args: {root: nowhere, text: [a, b], batch_size: 8}
"""
NET = {"dims": 1, "vocab_size": 256, "embed_dim": 8, "depth": 1}
read = launcher(TextClsTask, SentenceData, CONFIG)


def write_pairs(folder: Path, labels=("blue", "green", "red"), train: int = 24, test: int = 9) -> Path:
    """train.tsv and test.tsv of pairs that say their labels."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("test", test)):
        rows = [(f"it is {labels[n % len(labels)]}", f"no. {n}", labels[n % len(labels)]) for n in range(count)]
        lines = ["\t".join(row) for row in [("a", "b", "label"), *rows]]
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return folder


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def task_of(**options) -> TextClsTask:
    task = TextClsTask(NDLightNet(**NET, num_classes=1 if options.get("regression") else 3), **options)
    task.log = lambda *_, **__: None  # type: ignore[method-assign]
    return task


# ------------------------------------------------------------------------------- samples
@pytest.mark.parametrize(
    "sizes, length, kept",
    [([5], 9, [5]), ([5], 4, [3]), ([5, 3], 10, [5, 3]), ([5, 3], 8, [3, 3]), ([2, 9], 8, [2, 4]), ([9, 0], 4, [2, 0])],
)
def test_the_longest_text_is_cut_first(sizes, length, kept):
    texts = [[10 * number + i for i in range(size)] for number, size in enumerate(sizes, 1)]
    expected = [token for text, count in zip(texts, kept, strict=True) for token in (*text[:count], 0)]
    assert join_texts(texts, 0, length) == expected
    assert len(expected) <= length


def test_samples_are_the_tokens_of_pairs(tmp_path, capsys):
    write_pairs(tmp_path)
    data = SentenceData(str(tmp_path), text=["b", "a"], length=14, val=0.25)
    set_up(task_of(), data)
    assert data.classes == ("blue", "green", "red")
    assert (len(data.train_set), len(data.val_set)) == (18, 6)
    assert sorted(label for _, label, _ in data.val_set) == [0, 0, 1, 1, 2, 2]  # a fourth of each class
    tokens, label, number = data.train_set[0]
    assert bytes(tokens.tolist()) == b"no. 3\0it is b\0" and (label, number) == (0, 0)
    assert f"{tmp_path}/train.tsv: 18 of 18 samples are cut to length=14 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("causal", [False, True])
def test_a_batch_is_what_its_samples_are_alone(close, causal):
    """Values, the loss and gradients: no sample of a pack sees another."""
    torch.manual_seed(0)
    net = NDLightNet(**{**NET, "depth": 2}, num_classes=3, causal=causal)
    items = [(torch.randint(1, 256, (n,)), i % 3, i) for i, n in enumerate((7, 1, 30, 12))]
    results = []
    for batches in ([items], [[item] for item in items]):
        task, outputs = TextClsTask(net), []
        task.log = lambda *_, **__: None
        net.zero_grad()
        for batch in batches:
            collated = PackCollate(None)(batch)
            loss = task.training_step(collated, 0) * len(batch) / len(items)
            loss.backward()
            outputs.append(net(collated[0]).detach())
        results.append((torch.cat(outputs), torch.cat([p.grad.flatten() for p in net.parameters()])))
    for packed, alone in zip(*results, strict=True):
        close(packed, alone, 1e-4)
        assert packed.std() > 1e-4


# ------------------------------------------------------------------------------- metrics
def test_metrics_are_those_of_scikit_learn_and_scipy():
    rng = np.random.default_rng(0)
    for classes in (2, 3):
        outputs, labels = torch.rand(50, classes), torch.from_numpy(rng.integers(0, classes, 50))
        answers, average = outputs.argmax(-1), "binary" if classes == 2 else "macro"
        assert measure("accuracy", outputs, labels) == pytest.approx(accuracy_score(labels, answers))
        assert measure("matthews", outputs, labels) == pytest.approx(matthews_corrcoef(labels, answers), abs=1e-6)
        assert measure("f1", outputs, labels) == pytest.approx(f1_score(labels, answers, average=average), abs=1e-6)
    values, truth = torch.rand(50), torch.from_numpy(rng.integers(0, 6, 50) / 2)  # with ties
    assert measure("pearson", values, truth) == pytest.approx(pearsonr(values, truth)[0], abs=1e-5)
    assert measure("spearman", values, truth) == pytest.approx(spearmanr(values, truth)[0], abs=1e-5)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"metrics": ["pearson"]}, "model.metrics: .*expected accuracy, f1, matthews with regression=False"),
        ({"metrics": ["f1"], "regression": True}, "model.metrics: .*expected pearson, spearman with"),
    ],
)
def test_wrong_options_of_the_task(options, message):
    with pytest.raises(DataError, match=f"^{message}"):
        task_of(**options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"text": []}, r"^data.text: \[\], expected one column"),
        ({"text": "c"}, "train.tsv, line 1: has no column c"),
        ({"length": 2}, "^data.length: 2, expected more"),
        ({"val": 1.0}, "^data.val: 1.0, expected"),
        ({"val": "gone.tsv"}, "gone.tsv: no such file"),
        ({"val": "odd.tsv"}, "odd.tsv, line 2: the label 'pink', expected one of those in training: blue, green, red"),
        ({"train": "odd.tsv"}, r"odd.tsv: has the classes \['pink'\], expected two or more"),
        ({"label": "a"}, "num_classes=8, got 3"),
        ({"tokenizer": "gone"}, "^tokenizer=gone: no such tokenizer"),
    ],
)
def test_wrong_data(tmp_path, options, message):
    write_pairs(tmp_path)
    (tmp_path / "odd.tsv").write_text("a\tb\tlabel\nx\ty\tpink\n")
    if options == {"label": "a"}:
        write_pairs(tmp_path, list("abcdefgh"))
    with pytest.raises(DataError, match=message):
        set_up(task_of(), SentenceData(str(tmp_path), **{"text": ["a", "b"], **options}))


# ------------------------------------------------------------------------------- commands
@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def run(pairs, read, tmp_path_factory) -> Path:
    """The folder of a finished fit and test."""
    out = tmp_path_factory.mktemp("run")
    done = fit_and_test(read, "--trainer.max_epochs=12", "--model.metrics=[f1,accuracy]", root=pairs, out=out)
    assert done.out.startswith("held-out f1 ") and "over 9 texts" in done.out
    return out


@pytest.mark.slow
def test_the_files_of_a_test(run):
    metrics = json.loads((run / "metrics.json").read_text())
    rows = rows_of(run / "test.csv")
    assert list(rows[0]) == ["a", "b", "truth", "prediction", "blue", "green", "red"]
    assert [(row["a"], row["b"], row["truth"]) for row in rows[:2]] == [
        ("it is blue", "no. 0", "blue"),
        ("it is green", "no. 1", "green"),
    ]
    right = np.mean([row["truth"] == row["prediction"] for row in rows])
    f1 = f1_score([row["truth"] for row in rows], [row["prediction"] for row in rows], average="macro")
    assert metrics["scores"] == {"f1": pytest.approx(f1, abs=1e-5), "accuracy": pytest.approx(right, abs=1e-5)}
    assert list(metrics["scores"]) == ["f1", "accuracy"] and metrics["texts"] == 9 and right > 0.6
    assert metrics["fit"]["last"]["val_score"] == metrics["fit"]["last"]["val_f1"]
    for name in ("confusion.png", "curves.png", "index.html"):
        assert (run / name).stat().st_size > 500


@pytest.mark.slow
def test_predict_needs_neither_labels_nor_the_training(run, read, tmp_path):
    """Tokenizer and classes are those of the checkpoint."""
    expected = rows_of(run / "test.csv")
    (tmp_path / "new.csv").write_text("b,a\n" + "".join(f"{row['b']},{row['a']}\n" for row in expected))
    read(
        "predict", "--model.metrics=[f1]", root="gone", out=tmp_path, input=tmp_path / "new.csv", ckpt=last(run)
    ).well()
    rows = rows_of(tmp_path / "predictions.csv")
    assert rows == [{key: x for key, x in row.items() if key != "truth"} for row in expected]
    for words, message in (
        ({"ckpt": last(run)}, "data.input: expected a table to predict, got none"),
        ({"input": tmp_path / "new.csv"}, "--ckpt_path: predict expects the checkpoint of a training, got none"),
    ):
        assert read("predict", root="gone", out=tmp_path, **words).errors == [f"error: {message}"]


@pytest.mark.slow
def test_a_test_without_the_training_table(run, read, pairs, tmp_path):
    (tmp_path / "test.tsv").write_bytes((pairs / "test.tsv").read_bytes())
    read("test", root=tmp_path, out=tmp_path / "out", ckpt=last(run)).well()
    assert (tmp_path / "out/test.csv").read_bytes() == (run / "test.csv").read_bytes()
    lines = (pairs / "test.tsv").read_text().replace("red", "pink")
    (tmp_path / "test.tsv").write_text(lines)
    done = read("test", root=tmp_path, out=tmp_path / "out", ckpt=last(run))
    line = f"{tmp_path}/test.tsv, line 4: the label 'pink', expected one of those in training: blue, green, red"
    assert done.errors == [f"error: {line}"]
    (tmp_path / "test.tsv").write_text("".join(line for line in lines.splitlines(True) if "pink" not in line))
    read("test", root=tmp_path, out=tmp_path / "out", ckpt=last(run)).well()  # of two of the three classes
    done = read("test", root=tmp_path, out=tmp_path / "out")
    assert done.errors == ["error: --ckpt_path: got none, expected the checkpoint of a training"]


@pytest.mark.slow
def test_a_regression(read, tmp_path):
    data = {"val": "test.tsv"}
    write_pairs(tmp_path, ("0.5", "2", "3e0"))
    net, model = {"num_classes": 1}, {"regression": True, "metrics": ["spearman", "pearson"]}
    words = {"root": tmp_path, "net": net, "data": data}
    fit_and_test(read, "--trainer.max_epochs=8", **words, model=model, out=tmp_path / "out")
    rows, metrics = (rows_of(tmp_path / "out/test.csv"), json.loads((tmp_path / "out/metrics.json").read_text()))
    assert list(rows[0]) == ["a", "b", "truth", "prediction"] and rows[2]["truth"] == "3e0"
    values, truth = ([float(row[key]) for row in rows] for key in ("prediction", "truth"))
    assert metrics["scores"]["spearman"] == pytest.approx(spearmanr(values, truth)[0], abs=1e-4)
    assert metrics["scores"]["pearson"] == pytest.approx(pearsonr(values, truth)[0], abs=1e-4)
    assert metrics["fit"]["last"]["val_score"] == pytest.approx(metrics["scores"]["spearman"], abs=1e-4)
    write_pairs(tmp_path / "words")
    done = read("fit", **{**words, "root": tmp_path / "words"}, model=model, out=tmp_path / "none")
    assert done.errors == [f"error: {tmp_path}/words/train.tsv, line 2: the label 'blue', expected a number"]


def test_the_loss_of_a_regression():
    task = task_of(regression=True)
    texts, labels, numbers = PackCollate(None)([(torch.arange(n), n / 4, n) for n in (3, 5)])
    expected = ((task.net(texts)[:, 0] - torch.tensor([0.75, 1.25])) ** 2).mean()
    torch.testing.assert_close(task.training_step((texts, labels, numbers), 0), expected)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_weights_and_tokenizer_of_a_language_model(read, pairs, tmp_path, causal):
    """All weights but those of the head; numbers of tokens are those of that training."""
    tokenizer = train_tokenizer(["it is blue, it is green, it is red"] * 9, 270)
    torch.manual_seed(1)
    model = NDLightNet(**{**NET, "vocab_size": tokenizer.vocab_size}, causal=causal)
    checkpoint = save_language_model(tmp_path / "lm", model, tokenizer)
    net = {"vocab_size": tokenizer.vocab_size, "causal": causal}
    words = {"root": pairs, "out": tmp_path / "out", "net": net, "data": {"tokenizer": str(checkpoint)}}
    options = {"init": str(checkpoint), "lr": 1e-30, "min_lr": 0, "weight_decay": 0}
    done = read("fit", **words, model=options).well()
    assert "as drawn: head." in done.err
    saved = torch.load(last(tmp_path / "out"), weights_only=True)
    assert saved["tokenizer"] == tokenizer.text
    for name, value in model.state_dict().items():
        if not name.startswith("head."):
            torch.testing.assert_close(saved["state_dict"][f"net.{name}"], value)
    small = read("fit", **{**words, "net": {"vocab_size": 256}, "out": tmp_path / "none"})
    assert small.errors[0].startswith("error: model.net.vocab_size: 256, expected 270 or more")
    read("test", **{**words, "data": {}}, ckpt=last(tmp_path / "out")).well()  # with the checkpoint's tokenizer
    of_bytes = read("fit", **{**words, "data": {}}, ckpt=last(tmp_path / "out"))
    assert "has a tokenizer of 256 tokens" in of_bytes.errors[0] and "was trained on" in of_bytes.errors[0]


@pytest.mark.slow
def test_the_table_of_two_configs(pairs, tmp_path, capsys):
    """Means and deviations over seeds and tasks; a run that is there is not run again."""
    configs = []
    for name, metrics in (("one", "[accuracy, f1]"), ("two", "[matthews]")):
        text = CONFIG.replace("nowhere", str(pairs)).replace("lr:", f"metrics: {metrics}\n  lr:")
        (tmp_path / f"{name}.yaml").write_text(text)
        configs.append(str(tmp_path / f"{name}.yaml"))
    out = tmp_path / "out"
    words = [*configs, "--data.tokenizer=bytes", "--seeds", "0", "1", f"--out={out}", "--trainer.limit_train_batches=2"]
    table(words)
    done = capsys.readouterr()
    runs = [line for line in done.err.splitlines() if " left" in line]
    assert [line.split(":")[0] for line in runs] == [
        "1/4 one, seed 0",
        "2/4 two, seed 0",
        "3/4 one, seed 1",
        "4/4 two, seed 1",
    ]

    def score(run: str) -> float:
        return np.mean(list(json.loads((out / run / "metrics.json").read_text())["scores"].values()))

    scores = {name: np.array([score(f"{name}-{seed}") for seed in (0, 1)]) for name in ("one", "two")}
    lines = done.out.splitlines()
    assert lines == (out / "table.md").read_text().splitlines() and len(lines) == 5
    both = (scores["one"] + scores["two"]) / 2
    for line, values in zip(lines[2:], (*scores.values(), both), strict=True):
        assert line.endswith(f"| {100 * values.mean():.1f} ± {100 * values.std(ddof=1):.1f} |")
    assert lines[2].startswith("| one | accuracy ") and ", f1 " in lines[2]
    assert json.loads((out / "table.json").read_text())["mean"] == pytest.approx(both, abs=1e-5)
    assert not list(out.rglob("*.ckpt"))

    (out / "two-1/metrics.json").unlink()
    before = (out / "one-0/metrics.json").stat().st_mtime_ns
    table(words)
    again = capsys.readouterr()
    assert again.out == done.out and "1/1 two, seed 1: " in again.err
    assert (out / "one-0/metrics.json").stat().st_mtime_ns == before
    with pytest.raises(DataError, match=f"^--out: {out} has runs of other options, expected .*batches=2' and the same"):
        table([*words[:-1], "--trainer.limit_train_batches", "1"])
    (tmp_path / "two.yaml").write_text((tmp_path / "two.yaml").read_text().replace("lr:", "weight_decay: 0\n  lr:"))
    with pytest.raises(DataError, match=f"^--out: {out} has runs of other two, expected another folder"):
        table(words)
    with pytest.raises(DataError, match="expected configs of different names"):
        table([configs[0], configs[0]])


# ------------------------------------------------------------------------------- configs
@pytest.mark.slow
@pytest.mark.parametrize("config", GLUE, ids=lambda path: path.stem)
def test_a_config_of_glue(config, tmp_path, monkeypatch):
    """It builds, and its classes are those of the data, where these are here."""
    values = yaml.safe_load(config.read_text())
    assert values["trainer"]["default_root_dir"] == f"runs/glue/{config.stem}"
    values["data"]["class_path"] = "ndlightnet.training.language.sentence_data.SentenceData"
    values["data"]["init_args"]["tokenizer"], values["model"]["init"] = "bytes", None
    values["model"]["net"]["init_args"] |= {"embed_dim": 8, "depth": 1}
    values["trainer"] |= {"default_root_dir": str(tmp_path), "precision": "32-true", "accelerator": "cpu"}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(values))
    monkeypatch.setattr(sys, "argv", ["task.py"])
    cli = TaskCLI(TextClsTask, SentenceData, run=False, args=["--config", str(tmp_path / "c.yaml")])
    data, net = cli.datamodule, values["model"]["net"]["init_args"]
    if not (data.root / data.train).is_file():
        pytest.skip(f"not here: {data.root}")
    data.trainer = cli.trainer
    cli.trainer.strategy.connect(cli.model)
    set_up(cli.model, data)
    assert len(data.train_set) > 600 and len(data.val_set) > 70
    assert net["num_classes"] == (1 if cli.model.regression else len(data.classes))


@pytest.mark.slow
def test_made_sentences(tmp_path):
    """They are made by the first run, and trained on."""
    made = CONFIG.replace("sentence_data.SentenceData", "sentence_data.MadeSentences")
    made = made.replace("num_classes: 3", "num_classes: 2").replace("text: [a, b]", "samples: [60, 20]")
    root, out = tmp_path / "data", tmp_path / "out"
    launch(TextClsTask, SentenceData, made, tmp_path, "fit", root=root, out=out).well()
    assert len((root / "train.tsv").read_text().splitlines()) == 61
    assert torch.load(last(out), weights_only=True)["names"]["classes"] == list(CLASSES)
    default = yaml.safe_load((ROOT / "configs/made_sentences.yaml").read_text())
    assert default["model"]["net"]["init_args"]["num_classes"] == len(CLASSES)


@pytest.mark.slow
def test_list_ops(tmp_path):
    """They are made by the first run, a symbol a token, and none is cut."""
    made = CONFIG.replace("sentence_data.SentenceData", "sentence_data.ListOps").replace(
        "num_classes: 3", "num_classes: 10"
    )
    made = made.replace("text: [a, b]", "samples: [200, 20], symbols: [5, 30]")
    root, out = tmp_path / "data", tmp_path / "out"
    launch(TextClsTask, SentenceData, made, tmp_path, "fit", root=root, out=out).well()
    assert len((root / "train.tsv").read_text().splitlines()) == 201
    assert torch.load(last(out), weights_only=True)["names"]["classes"] == list("0123456789")
    for wrong, name in (({"samples": (0, 1)}, "samples"), ({"symbols": (9, 8)}, "symbols")):
        with pytest.raises(DataError, match=f"data.{name}"):
            ListOps("", **wrong)
