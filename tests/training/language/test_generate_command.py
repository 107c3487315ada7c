"""The commands `generate` and `predict` of a language model."""

import csv
import io
import math
import sys

import numpy as np
import pytest
import torch

from ndlightnet import NDLightNet, SoftmaxAttention
from ndlightnet.data.errors import DataError
from ndlightnet.data.text.tokenizer import ByteTokenizer, train_tokenizer
from ndlightnet.inference import generate_text
from ndlightnet.training import TextData, TextTask, run
from ndlightnet.training.language.generate_command import generate
from ndlightnet.training.language.measures import file_bits, token_nll
from tests.training.conftest import last, save_language_model, write_text_run

BYTES = ByteTokenizer()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    assert run(TextTask, TextData, folder, None, ["fit", f"--config={write_text_run(folder)}"]) == 0
    (folder / "text").unlink()  # neither command needs it
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run, which has nothing but checkpoints of a language model of bytes."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("made")
    net = NDLightNet(1, vocab_size=256, embed_dim=8, depth=1, causal=True)
    net.requires_grad_(False).embed.weight.mul_(30)
    path = save_language_model(folder / "run", net, ByteTokenizer())
    (path.parent / "last.ckpt").write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize(
    "place, path", [(".", "run"), (".", "run/checkpoints/last.ckpt"), ("run/checkpoints", "last.ckpt")]
)
def test_the_command_prints_what_the_function_yields(folder, capsys, monkeypatch, place, path):
    monkeypatch.chdir(folder / place)
    net = NDLightNet.from_checkpoint(folder / "run" / "checkpoints" / "last.ckpt")
    arguments = ["--ckpt_path", path, "--prompt", "ab", "--length=12", "--device=cpu"]
    files = sorted(folder.rglob("*"))
    capsys.readouterr()
    assert generate([*arguments, "--temperature=0"]) == 0
    expected = "".join(generate_text(net, "ab", 12, tokenizer=BYTES, temperature=0))
    assert capsys.readouterr().out == f"ab{expected}\n"
    draws = ["--top_k=50", "--top_p=0.9", "--repetition_penalty=1.2", "--stop", "e", "END"]
    drawn = [(generate([*arguments, f"--seed={seed}", *draws]), capsys.readouterr().out)[1] for seed in "112"]
    rng = torch.Generator().manual_seed(1)
    options = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.2, "stop": ["e", "END"]}
    assert drawn[0] == f"ab{''.join(generate_text(net, 'ab', 12, tokenizer=BYTES, generator=rng, **options))}\n"
    assert drawn[0] == drawn[1] != drawn[2]
    generate([*arguments, "--prompt", "ab", "c", "--temperature=0"])
    assert (
        capsys.readouterr().out
        == f"ab{expected}\nc{''.join(generate_text(net, 'c', 12, tokenizer=BYTES, temperature=0))}\n"
    )
    assert sorted(folder.rglob("*")) == files


def test_the_tokenizer_is_that_of_the_checkpoint(tmp_path, capsys):
    tokenizer = train_tokenizer(["the end and the 数学 again"], 270)
    net = NDLightNet(1, vocab_size=tokenizer.vocab_size, embed_dim=8, depth=1, causal=True)
    save_language_model(tmp_path, net, tokenizer)
    assert generate([f"--ckpt_path={tmp_path}", "--prompt", "the 数", "--length=9", "--temperature=0"]) == 0
    expected = "".join(generate_text(net.eval(), "the 数", 9, tokenizer=tokenizer, temperature=0))
    assert capsys.readouterr().out == f"the 数{expected}\n"


def test_what_generate_refuses_is_one_line(folder, tmp_path, capsys):
    ckpt = f"--ckpt_path={folder / 'run'}"
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.ckpt").touch()
    for arguments, message in (
        (["--ckpt_path=gone"], "gone: no such checkpoint"),
        ([f"--ckpt_path={tmp_path}"], f"{tmp_path}: a folder, expected a checkpoint that"),
        ([f"--ckpt_path={tmp_path}/a/a.ckpt"], f"{tmp_path}/a/a.ckpt: not a tokenizer"),
        ([ckpt, "--top_k=0"], "top_k=0: expected 1 to 256"),
        ([ckpt, "--stop", ""], r"stop=\[''\]: expected texts"),
        ([ckpt, "--device=abacus"], "Expected one of cpu, cuda"),
    ):
        with pytest.raises(DataError, match=f"^{message}"):
            generate(arguments)
    for arguments, message in (
        ([], "error: the following arguments are required: --ckpt_path\n"),
        ([ckpt, "--length=x"], "error: argument --length: invalid int value: 'x'\n"),
        ([ckpt, "--top_m=3"], "error: unrecognized arguments: --top_m=3; did you mean --top_p?\n"),
    ):
        with pytest.raises(SystemExit, match="2"):
            generate(arguments)
        assert capsys.readouterr().err == message


def test_control_characters_do_not_reach_a_terminal(folder, monkeypatch):
    class Terminal(io.StringIO):
        encoding = "ascii"

        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    generate([f"--ckpt_path={folder / 'run'}", "--prompt=a\x1b[2Jb\n\u00e9", "--length=0"])
    assert sys.stdout.getvalue() == "a\\x1b[2Jb\n?\n"


@pytest.mark.slow
def test_predict_writes_the_bits_of_each_file(trained, tmp_path, capsys):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    texts = {"b": bytes(range(100)), "deep/a": b"abc " * 9, "short": b"x"}
    for name, content in texts.items():
        (tmp_path / "in" / name).write_bytes(content)
    out, ckpt = tmp_path / "out", last(trained / "run")
    places = [f"--ckpt_path={ckpt}", f"--trainer.default_root_dir={out}", f"--data.input={tmp_path}/in"]
    assert run(TextTask, TextData, tmp_path, None, ["predict", f"--config={trained}/c.yaml", *places]) == 1
    printed = capsys.readouterr()
    assert f"error: {tmp_path}/in/short: 1 token" in printed.err
    rows = list(csv.DictReader((out / "predictions.csv").open()))
    assert [row["file"] for row in rows] == [f"{tmp_path}/in/b", f"{tmp_path}/in/deep/a"]
    net, total = NDLightNet.from_checkpoint(ckpt), 0.0
    for row, content in zip(rows, [texts["b"], texts["deep/a"]], strict=True):
        text = torch.tensor(list(content), dtype=torch.uint8)
        with torch.no_grad():
            bits = float(token_nll(net, text[None]).mean()) / math.log(2)
        assert int(row["tokens"]) == int(row["bytes"]) == len(content) - 1  # the first is not predicted
        assert float(row["bits_per_byte"]) == pytest.approx(bits, rel=1e-5)
        total += bits * (len(content) - 1)
    assert f"2 files, {total / (99 + 35):.3f} bits per byte" in printed.out  # the first byte of each is not predicted


def test_a_file_is_one_text_however_it_is_cut():
    """Streams read on over the chunks; a network that cannot stream begins anew in each."""
    net = NDLightNet(1, vocab_size=256, causal=True, embed_dim=16, depth=1).double().eval()
    text = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 40, np.uint8))
    with torch.no_grad():
        bits = float(token_nll(net, text[None]).double().sum()) / math.log(2)
    for chunk in (1, 7, 39, 100):
        assert file_bits(net, text, chunk) == pytest.approx(bits, rel=1e-6)
    softmax = NDLightNet(1, vocab_size=256, causal=True, embed_dim=16, depth=1, mixer=SoftmaxAttention).eval()
    with torch.no_grad():
        chunks = [token_nll(softmax, text[None, a : a + 14]).sum() for a in (0, 13, 26)]
    assert file_bits(softmax, text, 13) == pytest.approx(float(sum(chunks)) / math.log(2), rel=1e-5)
