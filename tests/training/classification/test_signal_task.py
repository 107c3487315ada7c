"""Signals of different lengths: packed and padded are the same training; fit, test and costs."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from ndlightnet import NDLightNet, SoftmaxAttention
from ndlightnet.data.errors import DataError
from ndlightnet.data.packing import PackCollate, PadCollate, TokenBudgetSampler
from ndlightnet.data.signal.recordings import SignalDataset, read_recordings
from ndlightnet.nn.mixers import LightNetAttention
from ndlightnet.training import SignalData, SignalTask
from tests.training.conftest import set_up


@pytest.fixture(scope="module")
def digits(tmp_path_factory, write_recordings) -> Path:
    folder = tmp_path_factory.mktemp("recordings")
    write_recordings(folder)
    return folder


def losses(digits: Path, spectrum, patch: int, padded: bool, mixer=LightNetAttention):
    """Of two steps of training, and the logits of the test recordings afterwards."""
    torch.manual_seed(0)
    recordings = read_recordings(digits)
    train, test = recordings.split()
    channels = 1 if spectrum is None else spectrum[0] // 2
    net = NDLightNet(1, channels, 3, patch_size=patch, embed_dim=16, depth=2, mixer=mixer, drop_path_rate=0.3)
    task, found = SignalTask(net), []
    task.log = lambda *_, **__: None  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    collate = PadCollate() if padded else PackCollate(patch)
    moving = SignalDataset(recordings, train, True, spectrum)
    for _ in range(2):
        loss = task.training_step(collate([moving[i] for i in range(len(train))]), 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    still = SignalDataset(recordings, test, False, spectrum)
    with torch.no_grad():
        *inputs, _, _ = collate([still[i] for i in range(6)])
        return torch.stack(found), net.eval()(*inputs)


@pytest.mark.parametrize(
    "spectrum, patch, mixer",
    [
        ((64, 32), 1, LightNetAttention),
        ((64, 32), 3, LightNetAttention),
        (None, 40, LightNetAttention),
        ((64, 32), 2, SoftmaxAttention),
    ],
)
def test_packed_and_padded_are_the_same_training(close, digits, spectrum, patch, mixer):
    """Augmentation, stochastic depth and all: only the padding differs."""
    for packed, padded in zip(
        losses(digits, spectrum, patch, False, mixer), losses(digits, spectrum, patch, True, mixer), strict=True
    ):
        close(packed, padded, 1e-4)
        assert packed.std() > 1e-3


@pytest.fixture(scope="module", params=["packed", "padded"])
def run(request, digits, listen, tmp_path_factory) -> tuple[str, Path]:
    """How batches were made, and the folder of a finished fit and test."""
    out = tmp_path_factory.mktemp(request.param)
    common = (
        f"--trainer.default_root_dir={out}",
        f"--data.init_args.root={digits}",
        f"--data.init_args.batching={request.param}",
        "--data.init_args.validation=0.3",
    )
    done = listen("fit", *common)
    assert (done.status, done.errors) == (0, [])
    done = listen("test", *common, f"--ckpt_path={out}/checkpoints/last.ckpt")
    assert (done.status, done.errors) == (0, [])
    assert "held-out accuracy" in done.out and "over 15 recordings" in done.out
    return request.param, out


@pytest.mark.slow
def test_metrics(run):
    batching, out = run
    metrics = json.loads((out / "metrics.json").read_text())
    matrix = np.array(metrics["confusion"])
    np.testing.assert_array_equal(matrix.sum(1), [5, 5, 5])
    assert metrics["top1"] == pytest.approx(matrix.trace() / 15, abs=1e-5)
    assert list(metrics["recall"].values()) == pytest.approx(list(matrix.diagonal() / 5))
    for name in ("attribution.png", "curves.png", "index.html", "test.csv"):
        assert (out / name).stat().st_size > 500
    assert metrics["recordings"] == 15 and metrics["steps"] == 2  # 4 of 6, 2 in a batch
    assert 0 < metrics["step_ms"] / 1e3 <= metrics["train_seconds"]
    assert metrics["peak_memory_gb"] is None
    if batching == "packed":
        assert metrics["padded_share"] == 0
    else:
        assert 0 < metrics["padded_share"] < 0.75
    saved = torch.load(out / "checkpoints" / "best.ckpt", weights_only=True)["state_dict"]
    assert metrics["parameters"] == sum(v.numel() for v in saved.values())


@pytest.mark.slow
def test_a_resumed_run_adds_to_what_it_cost(run, digits, listen, tmp_path):
    batching, out = run
    done = listen(
        "fit",
        f"--trainer.default_root_dir={tmp_path}",
        f"--data.init_args.root={digits}",
        f"--data.init_args.batching={batching}",
        "--data.init_args.validation=0.3",
        "--trainer.max_epochs=2",
        f"--ckpt_path={out}/checkpoints/last.ckpt",
    )
    assert (done.status, done.errors) == (0, [])
    first, both = (torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True) for folder in (out, tmp_path))
    assert both["cost"][0][:2] == first["cost"][0] and len(both["cost"][0]) == 4
    assert all(b > a for a, b in zip(first["slots"], both["slots"], strict=True))


def test_share_of_padding(digits):
    """Of tokens, not of samples: 5 and 9 samples in patches of 4 are 2 and 3 tokens."""
    items = [(torch.randn(1, n), 0, i) for i, n in enumerate((5, 9))]
    task = SignalTask(NDLightNet(1, 1, 3, patch_size=4, embed_dim=8, depth=1))
    task.on_train_batch_start(PadCollate()(items), 0)
    assert (task.tokens, task.slots) == (5, 6)
    task.on_train_batch_start(PackCollate(4)(items), 1)
    assert (task.tokens, task.slots) == (10, 11)


@pytest.mark.parametrize(
    "options, net, text",
    [
        ({}, {"num_classes": 4}, "num_classes=3, got 4"),
        ({}, {"in_chans": 1}, "in_chans=32, got 1"),
        ({"spectrum": None}, {}, "in_chans=1, got 32"),
        ({"validation": 1}, {}, "0 recordings to train"),
    ],
)
def test_what_does_not_fit_the_data(digits, options, net, text):
    arguments = {"dims": 1, "in_chans": 32, "num_classes": 3, "patch_size": 2, "embed_dim": 8, "depth": 1} | net
    with pytest.raises(DataError, match=f"^{digits}: .*{text}"):
        set_up(SignalTask(NDLightNet(**arguments)), SignalData(str(digits), **{"spectrum": (64, 32)} | options))


class Counter(LightningModule):
    """Remembers what it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = torch.nn.Parameter(torch.zeros(())), []

    def training_step(self, batch, _):
        self.seen.append((self.current_epoch, batch.tolist()))
        return self.weight * 0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_lightning_tells_the_sampler_the_epoch(tmp_path):
    sampler = TokenBudgetSampler([1 + i % 7 for i in range(30)], 20)
    task = Counter()
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(task, DataLoader(torch.arange(30), batch_sampler=sampler))
    shown = [[batch for epoch, batch in task.seen if epoch == e] for e in (0, 1)]
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        assert shown[epoch] == list(sampler)
    assert shown[0] != shown[1]
