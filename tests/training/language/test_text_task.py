"""Language models of bytes: what test counts, fit and errors."""

import csv
import json
import math
import re
from itertools import pairwise
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ndlightnet import NDLightNet
from ndlightnet.data.errors import DataError
from ndlightnet.training import TextData, TextTask, run
from ndlightnet.training.language.measures import octaves, token_nll
from tests.training.conftest import set_up

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs" / "enwik8.yaml"
TINY = """
seed_everything: 0
trainer: {accelerator: cpu, max_epochs: 2, log_every_n_steps: 1, gradient_clip_val: 1.0,
          enable_progress_bar: false, enable_model_summary: false}
model:
  lr: 1.0e-2
  net:
    class_path: ndlightnet.NDLightNet
    init_args: {dims: 1, vocab_size: 256, causal: true, embed_dim: 32, depth: 1}
data:
  class_path: ndlightnet.training.TextData
  init_args: {root: nowhere, length: 32, windows: 320, batch_size: 8, lengths: [64, 128],
              test_tokens: 256, workers: 0}
"""


class Fixed(nn.Module):
    """Byte b, whatever comes before it: the next one costs as `logits` (256, 256) say; times
    `scale` from position `turn` on."""

    def __init__(self, logits, turn=10**9, scale=1.0):
        super().__init__()
        self.logits, self.turn, self.scale = logits, turn, scale

    def forward(self, x):
        late = (torch.arange(x.shape[1]) >= self.turn).float()[:, None]
        return self.logits[x] * (1 + (self.scale - 1) * late)


def costs(text, logits, scale=1.0) -> np.ndarray:
    """By hand: bits of every byte of the text but the first, float64."""
    scores = scale * logits.double().numpy()
    shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    return np.array([-math.log2(shares[a, b]) for a, b in pairwise(text)])


@pytest.fixture
def text_file(tmp_path):
    """A file of 1000 random bytes, and these bytes."""
    text = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    (tmp_path / "text").write_bytes(text.tobytes())
    return tmp_path / "text", text


def measured(net, tmp_path, file, **options) -> dict:
    """metrics.json of a `test` of a network that nobody trained, on the last fifth of 1000 bytes."""
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", default_root_dir=tmp_path, **silent)
    data = TextData(str(file), **{"length": 8, "fractions": (0.7, 0.1, 0.2)} | options)
    trainer.test(TextTask(net), data, verbose=False)
    return json.loads((tmp_path / "metrics.json").read_text())


def test_token_nll_by_hand():
    logits = torch.randn(256, 256)
    windows = torch.randint(256, (3, 12), dtype=torch.uint8)
    nll = token_nll(Fixed(logits), windows)
    assert nll.shape == (3, 11) and nll.dtype == torch.float32
    for row, window in zip(nll, windows, strict=True):
        np.testing.assert_allclose(row / math.log(2), costs(window, logits), rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"depth": 2, "drop_rate": 0.5}])
def test_the_loss_of_training_is_the_mean_of_all_bytes(options):
    """With the tied head, whose gradient the embedding gets, too; dropout draws alike."""
    net = NDLightNet(1, vocab_size=256, causal=True, embed_dim=16, **{"depth": 1} | options)
    windows = torch.randint(256, (3, 12), dtype=torch.uint8)
    pairs = []
    for loss in (TextTask(net).called, lambda x: token_nll(net, x).mean()):
        torch.manual_seed(1)
        value = loss(windows)
        pairs.append((value, torch.autograd.grad(value, [*net.parameters()])))
    torch.testing.assert_close(*pairs)


def test_a_network_with_a_forward_of_its_own_is_called():
    class Capped(NDLightNet):
        def forward(self, x, mask=None):
            return super().forward(x, mask).tanh()

    net = Capped(1, vocab_size=256, causal=True, embed_dim=16, depth=1)
    windows = torch.randint(256, (3, 12), dtype=torch.uint8)
    torch.testing.assert_close(TextTask(net).called(windows), token_nll(net, windows).mean())


def test_training_holds_no_logits_of_all_bytes(monkeypatch, text_file):
    """And a step is one call of the shapes that a CUDA graph is made for."""
    net = NDLightNet(1, vocab_size=256, causal=True, embed_dim=16, depth=1)
    task, data, calls = TextTask(net), TextData(str(text_file[0]), length=32, batch_size=8, lengths=(), workers=0), []
    set_up(task, data)
    task.called.register_forward_pre_hook(lambda _, inputs: calls.append([(x.shape, x.dtype) for x in inputs]))
    monkeypatch.setattr(task, "log", lambda *_, **__: None)
    monkeypatch.setattr(net.head, "forward", lambda _: pytest.fail("the logits of all bytes"))
    assert task.training_step(next(iter(data.train_dataloader())), 0).requires_grad
    assert calls == [[(x.shape, x.dtype) for x in task.example_inputs()]]
    with FakeTensorMode(allow_non_fake_inputs=True):  # which has no numbers to wait for
        task.called(*task.example_inputs()).backward()


def test_batches_of_all_lengths_are_as_many_bytes(text_file):
    data = TextData(str(text_file[0]), (0.7, 0.1, 0.2), length=8, lengths=(4, 16, 64))
    data.setup("test")
    for length, loader in zip((4, 8, 16, 64), data.test_dataloader(), strict=True):
        windows = [batch[0] for batch in loader]
        assert {tuple(batch.shape) for batch in windows} == {(64 // length, length + 1)}
        assert sum(len(batch) for batch in windows) * length == 192


@pytest.mark.parametrize("test_tokens, counted", [(10**6, 192), (150, 144), (96, 96)])
def test_each_byte_is_counted_once_at_every_length(tmp_path, text_file, test_tokens, counted):
    """A network that looks back one byte costs the same in windows of any length, since the same
    bytes are predicted in each of them."""
    file, text = text_file
    logits = 2 * torch.randn(256, 256)
    metrics = measured(Fixed(logits), tmp_path, file, lengths=(6, 16, 48), test_tokens=test_tokens)
    assert metrics["test_tokens"] == counted
    each = costs(text[800 : 801 + counted], logits)
    at = metrics["bits_per_byte_at"]
    assert list(at) == ["6", "8", "16", "48"]  # the training length is always there
    assert list(at.values()) == pytest.approx([each.mean()] * 4, rel=1e-5)
    assert metrics["bits_per_byte"] == at["8"] and metrics["train_length"] == 8
    places = {f"{a}-{b}": each.reshape(-1, 48)[:, a:b].mean() for a, b in ((0, 8), (8, 16), (16, 32), (32, 48))}
    assert metrics["bits_per_byte_by_position"] == pytest.approx(places, rel=1e-5)
    assert metrics["same_bytes_at_training_length"] == pytest.approx(places, rel=1e-5)


def test_windows_begin_with_an_empty_context(tmp_path, text_file):
    """A network that is twice as sure from position 16 on: its windows of 8 never get there."""
    file, text = text_file
    logits = torch.randn(256, 256)
    metrics = measured(Fixed(logits, 16, 2.0), tmp_path, file, lengths=(16, 64))
    text = text[800 : 801 + 192]
    early, late = costs(text, logits), costs(text, logits, 2.0)
    turned = np.where(np.arange(192) % 64 < 16, early, late)
    at = {"8": early.mean(), "16": early.mean(), "64": turned.mean()}
    assert metrics["bits_per_byte_at"] == pytest.approx(at, rel=1e-5)
    spans = ((0, 8), (8, 16), (16, 32), (32, 64))
    for key, each in (("bits_per_byte_by_position", turned), ("same_bytes_at_training_length", early)):
        expected = {f"{a}-{b}": each.reshape(3, 64)[:, a:b].mean() for a, b in spans}
        assert metrics[key] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "length, first, ends",
    [(131072, 2048, [2048 << i for i in range(7)]), (8, 8, [8]), (5, 8, [5]), (20, 8, [8, 16, 20])],
)
def test_octaves(length, first, ends):
    assert octaves(length, first) == list(zip([0, *ends[:-1]], ends, strict=True))


class Large(Fixed):
    """Fails as `error` for windows longer than 16, the second batch of them."""

    def __init__(self, error):
        super().__init__(torch.zeros(256, 256))
        self.error, self.calls = error, 0

    def forward(self, x):
        self.calls += x.shape[1] > 16
        if self.calls > 1:
            raise self.error
        return super().forward(x)


def test_out_of_memory_is_recorded(tmp_path, text_file):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
    metrics = measured(Large(error), tmp_path, text_file[0], lengths=(16, 32, 64))
    assert metrics["bits_per_byte_at"] == {"8": 8, "16": 8, "32": None, "64": None}
    assert metrics["not_measured"] == {"32": str(error), "64": str(error)}
    assert metrics["bits_per_byte_by_position"] == {"0-8": 8, "8-16": 8}
    with open(tmp_path / "bits_per_byte.csv", newline="") as file:
        lines = list(csv.reader(file))
    assert lines == [
        ["of", "start", "end", "bits_per_byte", "at_training_length", "note"],
        ["window", "0", "8", "8.0", "", ""],
        ["window", "0", "16", "8.0", "", ""],
        ["window", "0", "32", "", "", str(error)],
        ["window", "0", "64", "", "", str(error)],
        ["position", "0", "8", "8.0", "8.0", ""],
        ["position", "8", "16", "8.0", "8.0", ""],
    ]
    picture = matplotlib.image.imread(tmp_path / "bits_per_byte.png")
    assert min(picture.shape[:2]) > 300 and picture.std() > 0.05


@pytest.mark.slow
def test_a_periodic_text_is_learnt(tmp_path, monkeypatch, capsys):
    """80 steps of the bare call. How well it goes on beyond the training length is a matter of the
    seed, but it does not forget the text: its letters alone, a third each a and b, cost more."""
    (tmp_path / "text").write_bytes(b"abcabdbca" * 1000)
    config = tmp_path / "config.yaml"
    config.write_text(TINY.replace("nowhere", f"{tmp_path}/text"))
    monkeypatch.chdir(tmp_path)
    assert run(TextTask, TextData, config, None, []) == 0
    out, _ = capsys.readouterr()
    metrics = json.loads((tmp_path / "runs" / "metrics.json").read_text())
    assert list(metrics["bits_per_byte_at"]) == ["32", "64", "128"]
    assert metrics["test_tokens"] == 256 and metrics["steps"] == 80
    assert 0 < metrics["step_ms"] / 1e3 <= metrics["train_seconds"]
    # the first bytes of a window may be any of its nine, or two of them: log2(9) bits of 32 bytes
    assert metrics["bits_per_byte"] < math.log2(9) / 32 + 0.1
    shares = np.array([3, 3, 2, 1]) / 9
    assert metrics["bits_per_byte_at"]["128"] < -(shares * np.log2(shares)).sum()
    assert f"{metrics['bits_per_byte']:.3f} at 32" in out
    logs = (tmp_path / "runs" / "logs" / "version_0" / "metrics.csv").read_text()
    names = logs.splitlines()[0].split(",")
    assert {"loss", "val_loss", "val_score"} <= {*names}
    saved = torch.load(tmp_path / "runs" / "checkpoints" / "last.ckpt", weights_only=True)
    assert metrics["parameters"] == sum(v.numel() for k, v in saved["state_dict"].items() if k != "net.head.weight")
    # a test by itself, of the same checkpoint
    last = f"--ckpt_path={tmp_path}/runs/checkpoints/last.ckpt"
    assert run(TextTask, TextData, config, None, ["test", f"--config={config}", last]) == 0
    assert json.loads((tmp_path / "runs" / "metrics.json").read_text()) == metrics


@pytest.mark.parametrize(
    "options, net, message",
    [
        ({"root": "/gone.xz"}, {}, "/gone.xz: no such file"),
        ({"length": 900}, {}, "ROOT: 900 tokens to train on: expected length + 1 = 901"),
        ({"length": 50}, {}, "ROOT: 50 tokens to validate on: expected length + 1 = 51"),
        (
            {"length": 49, "test_tokens": 40},
            {},
            "ROOT: 40 tokens to test on, test_tokens=40: expected length=49 or more",
        ),
        ({"fractions": (0.95, 0.05, 0.0)}, {}, "ROOT: 0 tokens to test on, test_tokens=256: expected length=32 or"),
        ({"fractions": (0.5, 0.0, 0.4)}, {}, "fractions=(0.5, 0.0, 0.4): expected"),
        ({"lengths": (0,)}, {}, "data.lengths: 0, expected 1 or more"),
        ({"tokenizer": "gone.json"}, {}, "tokenizer=gone.json: no such tokenizer"),
        ({}, {"causal": False}, "ROOT: expected a network with causal=True, got False"),
        ({}, {"vocab_size": 255}, "model.net.vocab_size: 255, expected 256 or more, those of the tokenizer"),
        ({}, {"num_classes": 256}, "ROOT: expected a network with per_token=True, got False"),
    ],
)
def test_what_does_not_fit(text_file, options, net, message):
    root, _ = text_file
    small = {"root": str(root), "length": 32, "windows": 320, "batch_size": 8, "lengths": (), "test_tokens": 256}
    arguments = {"dims": 1, "vocab_size": 256, "causal": True, "embed_dim": 8, "depth": 1} | net
    with pytest.raises(DataError, match="^" + re.escape(message.replace("ROOT", str(root)))):
        set_up(TextTask(NDLightNet(**arguments)), TextData(**small | options))
