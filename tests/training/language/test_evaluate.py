"""The command `evaluate`: the scores of each kind of task by hand, what it prints, and files that are wrong."""

import gzip
import json
import lzma
import math
import zipfile
from copy import deepcopy

import pytest
import torch

from ndlightnet import NDLightNet
from ndlightnet.data.errors import DataError
from ndlightnet.data.text.tokenizer import ByteTokenizer, train_tokenizer
from ndlightnet.training.language.evaluate_command import evaluate
from tests.training.conftest import save_language_model

CHOICES = [
    {"query": "The cat sat on\n", "choices": ["the mat", "a tree", "cats and dogs and mats"], "gold": 0, "more": [1]},
    {"query": "Question: why?", "choices": ["so", "because the cat sat", "no"], "gold": 1},
    {"query": "A", "choices": ["B", "数学"], "gold": 1},
]
SCHEMA = [
    {"context_options": ["The cat saw that the cat", "The cat saw that the dog"], "continuation": "sat.", "gold": 1},
    {"context_options": ["So Sarah", "So Maria"], "continuation": "always sat on mats.", "gold": 0},
    {"context_options": ["Why the cat", "Why a dog", "Why"], "continuation": "sat?", "gold": 2},
]
CONTINUED = [{"context": "The cat sat on the", "continuation": "mat"}, {"context": "Why ", "continuation": "because"}]
SENTENCES = {
    "one": [("The cat sat.", "The cat sit.", "agreement"), ("Cats sit.", "Cats sits.", "agreement")],
    "two": [("Who saw a cat?", "Who a cat saw?", "islands"), ("Why sat?", "Sat why?", "islands")],
}


def write(path, lines):
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    opened = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opened(path, "wt", encoding="utf-8") as file:
        file.write(text)


def sentences(name):
    keys = ("sentence_good", "sentence_bad", "linguistics_term")
    return [dict(zip(keys, row, strict=True)) | {"UID": name} for row in SENTENCES[name]]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    tokenizer = train_tokenizer([json.dumps(CHOICES + SCHEMA + CONTINUED, ensure_ascii=False)], 300)
    net = NDLightNet(1, vocab_size=tokenizer.vocab_size, embed_dim=16, depth=1, tpe_states=4, causal=True)
    with torch.no_grad():
        net.embed.weight.mul_(20)
    return net.eval(), tokenizer


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    save_language_model(folder, *model)
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    for name, lines in (("choices.jsonl.gz", CHOICES), ("schema.jsonl.xz", SCHEMA), ("continued.jsonl", CONTINUED)):
        write(folder / name, lines)
    (folder / "README.md").write_text("no task")
    return folder


@torch.no_grad()
def by_hand(model, context, continuation):
    """Log-likelihood and whether it is greedy, where the context has no tokens that the joint text has not."""
    net, tokenizer = model
    stripped = context.rstrip()
    before = tokenizer.encode([stripped])[0] if stripped else [tokenizer.end]
    joint = tokenizer.encode([context + continuation])[0]
    tokens = joint if stripped else [tokenizer.end, *joint]
    logits = net(torch.tensor([tokens]))[0, len(before) - 1 : -1].log_softmax(-1)
    targets = torch.tensor(tokens[len(before) :])
    return float(logits.gather(1, targets[:, None]).sum()), bool((logits.argmax(-1) == targets).all())


def test_the_scores_are_those_by_hand(model, run, tasks, tmp_path, capsys):
    assert evaluate([str(run), str(tasks), "--out", str(tmp_path / "new" / "out.json"), "--device=cpu"]) == 0
    saved = json.loads((tmp_path / "new" / "out.json").read_text())
    assert saved["run"] == str(run)
    rows = saved["results"]
    assert [*rows] == ["choices", "continued", "schema"]
    sums = [[by_hand(model, line["query"], f" {x}")[0] for x in line["choices"]] for line in CHOICES]
    right = [each.index(max(each)) == line["gold"] for each, line in zip(sums, CHOICES, strict=True)]
    normed = [
        [x / len(choice) for x, choice in zip(a, b["choices"], strict=True)] for a, b in zip(sums, CHOICES, strict=True)
    ]
    expected = {
        "n": 3,
        "accuracy": sum(right) / 3,
        "stderr": math.sqrt(sum(right) / 3 * (1 - sum(right) / 3) / 2),
        "chance": (1 / 3 + 1 / 3 + 1 / 2) / 3,
        "acc_norm": sum(a.index(max(a)) == b["gold"] for a, b in zip(normed, CHOICES, strict=True)) / 3,
        "perplexity": None,
    }
    assert rows["choices"] == pytest.approx(expected)
    sums = [[by_hand(model, x, f" {line['continuation']}")[0] for x in line["context_options"]] for line in SCHEMA]
    right = [each.index(max(each)) == line["gold"] for each, line in zip(sums, SCHEMA, strict=True)]
    assert rows["schema"]["accuracy"] == pytest.approx(sum(right) / 3)
    assert rows["schema"]["chance"] == pytest.approx((1 / 2 + 1 / 2 + 1 / 3) / 3) and rows["schema"]["acc_norm"] is None
    scores = [by_hand(model, line["context"], f" {line['continuation']}") for line in CONTINUED]
    assert rows["continued"]["accuracy"] == sum(greedy for _, greedy in scores) / 2
    perplexity = math.exp(-sum(score for score, _ in scores) / 2)
    assert (
        rows["continued"]["perplexity"] == pytest.approx(perplexity, rel=1e-4) and rows["continued"]["chance"] is None
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["n", "accuracy", "stderr", "chance", "acc_norm", "perplexity"]
    assert [line.split()[:2] for line in lines[1:]] == [["choices", "3"], ["continued", "2"], ["schema", "3"]]
    assert f"{perplexity:.4g}" in lines[2] and len({len(line) for line in lines}) == 1


def test_a_certain_model_is_right_greedily(model, tmp_path):
    """A continuation that the network itself would write."""
    net, tokenizer = deepcopy(model[0]), model[1]
    tokens = tokenizer.encode(["The cat"])[0]
    with torch.no_grad():
        tokens.append(int(net(torch.tensor([tokens]))[0, -1].argmax()))
    word = next(n for n in range(tokenizer.vocab_size) if tokenizer.decode([n]) == " sat")
    with torch.no_grad():
        net.embed.weight[word] += 5 * net.forward_features(torch.tensor([tokens[:-1]]))[0, -1]
    save_language_model(tmp_path, net, tokenizer)
    write(tmp_path / "greedy.jsonl", [{"context": "The cat", "continuation": "sat"}])
    assert evaluate([str(tmp_path), str(tmp_path / "greedy.jsonl"), "--out", str(tmp_path / "out.json")]) == 0
    row = json.loads((tmp_path / "out.json").read_text())["results"]["greedy"]
    assert row["accuracy"] == 1 and row["stderr"] is None and row["perplexity"] < 1.5


@pytest.mark.parametrize("form", ["zip", "folder"])
def test_minimal_pairs_have_a_line_for_each_term_and_for_all(model, run, tmp_path, form):
    source = tmp_path / ("blimp.zip" if form == "zip" else "blimp")
    if form == "zip":
        with zipfile.ZipFile(source, "w") as archive:
            for name in SENTENCES:
                archive.writestr(f"data/{name}.jsonl", "\n".join(map(json.dumps, sentences(name))))
                archive.writestr(f"__MACOSX/data/._{name}.jsonl", b"\x00")
    else:
        source.mkdir()
        for name in SENTENCES:
            write(source / f"{name}.jsonl", sentences(name))
    for limit in (None, 1):
        options = [] if limit is None else [f"--limit={limit}"]
        assert evaluate([str(run), str(source), "--out", str(tmp_path / "out.json"), *options]) == 0
        rows = json.loads((tmp_path / "out.json").read_text())["results"]
        assert [*rows] == ["BLiMP", "agreement", "islands"]
        right = {}
        for triples in SENTENCES.values():
            for good, bad, term in triples[:limit]:
                better = by_hand(model, "", f" {good}")[0] > by_hand(model, "", f" {bad}")[0]
                right[term] = [*right.get(term, []), better]
                right["BLiMP"] = [*right.get("BLiMP", []), better]
        assert {name: row["accuracy"] for name, row in rows.items()} == {x: sum(y) / len(y) for x, y in right.items()}
        assert [row["n"] for row in rows.values()] == ([4, 2, 2] if limit is None else [2, 1, 1])
        assert {row["chance"] for row in rows.values()} == {0.5}


def test_wrong_files_and_options_are_one_line(run, tasks, tmp_path, capsys):
    wrong = tmp_path / "wrong.jsonl"
    good = json.dumps(CHOICES[0])
    for line, message in (
        ("{", r"not JSON \("),
        ("[1]", "expected one of the sets of keys query, choices, gold; context_options"),
        ('{"query": "a", "choices": ["b", "c"]}', "expected one of the sets of keys"),
        ('{"query": "a", "choices": ["b", "c"], "gold": 2}', "gold=2, expected 0 to 1"),
        ('{"query": "a", "choices": ["b", "c"], "gold": "1"}', "gold='1', expected 0 to 1"),
        ('{"query": "a", "choices": ["b", "c"], "gold": true}', "gold=True, expected 0 to 1"),
        ('{"query": "a", "choices": ["b"], "gold": 0}', "expected texts, and two or more to choose from"),
        ('{"query": 1, "choices": ["b", "c"], "gold": 0}', "expected texts, and two or more"),
        ('{"query": ["a", "b"], "choices": "c", "gold": 0}', "expected texts, and two or more"),
        ('{"query": "\\ud800", "choices": ["b", "c"], "gold": 0}', r"not JSON \("),
        ('{"query": "a", "choices": "bc", "gold": 0}', "expected texts, and two or more"),
        ('{"query": "a", "choices": ["b", ""], "gold": 0}', "expected texts, and two or more"),
        ('{"context": "a", "continuation": 3}', "expected texts, and two or more"),
        ('{"context": ["a", "b"], "continuation": "c"}', "expected texts, and two or more"),
        ('{"context_options": ["a", "b"], "continuation": ["c"], "gold": 0}', "expected texts, and two or more"),
    ):
        wrong.write_text(f"{good}\n{line}\n")
        with pytest.raises(DataError, match=f"^{wrong}, line 2: {message}"):
            evaluate([str(run), str(wrong)])
    assert evaluate([str(run), str(wrong), "--limit=1"]) == 0  # the wrong line is not read
    wrong.write_text(f'{good}\n{{"context": "a", "continuation": "b"}}\n')
    with pytest.raises(DataError, match=f"^{wrong}: has lines with context and query, expected one kind of task"):
        evaluate([str(run), str(wrong)])
    wrong.write_text("")
    (tmp_path / "bad.jsonl.gz").write_bytes(b"no gzip")
    (tmp_path / "empty").mkdir()
    (tmp_path / "choices.jsonl").write_text(good)
    (tmp_path / "other.ckpt").write_bytes(b"")
    byte_run = tmp_path / "bytes"
    save_language_model(byte_run, NDLightNet(1, vocab_size=256, embed_dim=8, depth=1), ByteTokenizer())
    choices = str(tasks / "choices.jsonl.gz")
    for arguments, message in (
        ([run, wrong], f"{wrong}: has no line, expected one or more"),
        ([run, tmp_path / "gone.jsonl"], f"{tmp_path}/gone.jsonl: no such task"),
        ([run, tmp_path / "empty"], f"{tmp_path}/empty: no such task, expected a file .jsonl"),
        ([run, tmp_path / "bad.jsonl.gz"], f"{tmp_path}/bad.jsonl.gz: cannot be read"),
        ([run, choices, tmp_path / "choices.jsonl"], f"{tmp_path}/choices.jsonl: a second task choices"),
        ([run, choices, "--limit=0"], "--limit: 0, expected 1 or more"),
        ([tmp_path / "gone", choices], f"{tmp_path}/gone: no such checkpoint"),
        ([tmp_path / "other.ckpt", choices], f"{tmp_path}/other.ckpt: not a tokenizer"),
        ([byte_run, choices], f"{byte_run}/checkpoints/best.ckpt: the network of another task, expected a causal"),
    ):
        with pytest.raises(DataError, match=f"^{message}"):
            evaluate([str(x) for x in arguments])
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        evaluate([str(run)])
    assert capsys.readouterr().err == "error: the following arguments are required: tasks\n"
