"""Signals of different lengths: packed and padded are the same training; fit, test and costs."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from ndlightnet import NDLightNet, SoftmaxAttention
from ndlightnet.data.errors import DataError
from ndlightnet.data.packing import PackCollate, PadCollate
from ndlightnet.data.signal.recordings import SignalDataset, read_recordings
from ndlightnet.nn.mixers import LightNetAttention
from ndlightnet.training import SignalData, SignalTask
from tests.training.conftest import fit_and_test, last, set_up


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
    task, steps = SignalTask(net), []
    task.log = lambda *_, **__: None  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    collate = PadCollate() if padded else PackCollate(patch)
    moving = SignalDataset(recordings, train, True, spectrum)
    for _ in range(2):
        loss = task.training_step(collate([moving[i] for i in range(len(train))]), 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps.append(loss.detach())
    still = SignalDataset(recordings, test, False, spectrum)
    with torch.no_grad():
        *inputs, _, _ = collate([still[i] for i in range(6)])
        return torch.stack(steps), net.eval()(*inputs)


@pytest.mark.parametrize(
    "spectrum, patch, mixer",
    [((64, 32), 3, LightNetAttention), (None, 40, LightNetAttention), ((64, 32), 2, SoftmaxAttention)],
)
def test_packed_and_padded_are_the_same_training(close, digits, spectrum, patch, mixer):
    """Augmentation, stochastic depth and all: only the padding differs."""
    runs = [losses(digits, spectrum, patch, padded, mixer) for padded in (False, True)]
    for packed, padded in zip(*runs, strict=True):
        close(packed, padded, 1e-4)
        assert packed.std() > 1e-3


@pytest.fixture(scope="module", params=["packed", "padded"])
def run(request, digits, listen, tmp_path_factory) -> tuple[str, Path]:
    """How batches were made, and the folder of a finished fit and test."""
    out, data = tmp_path_factory.mktemp(request.param), {"batching": request.param, "validation": 0.3}
    done = fit_and_test(listen, root=digits, out=out, data=data)
    assert "held-out accuracy" in done.out and "over 15 recordings" in done.out
    return request.param, out


@pytest.mark.slow
def test_metrics(run):
    batching, out = run
    metrics = json.loads((out / "metrics.json").read_text())
    matrix = np.array(metrics["confusion"])
    np.testing.assert_array_equal(matrix.sum(1), [5, 5, 5])
    assert metrics["top1"] == pytest.approx(matrix.trace() / 15, abs=1e-5)
    for name in ("attribution.png", "curves.png", "index.html", "test.csv"):
        assert (out / name).stat().st_size > 500
    assert metrics["recordings"] == 15 and metrics["steps"] == 2  # 4 of 6, 2 in a batch
    assert 0 < metrics["step_ms"] / 1e3 <= metrics["train_seconds"]
    assert metrics["peak_memory_gb"] is None
    assert metrics["padded_share"] == 0 if batching == "packed" else 0 < metrics["padded_share"] < 0.75


@pytest.mark.slow
def test_a_resumed_run_adds_to_what_it_cost(run, digits, listen, tmp_path):
    batching, out = run
    data = {"batching": batching, "validation": 0.3}
    listen("fit", "--trainer.max_epochs=2", root=digits, out=tmp_path, data=data, ckpt=last(out)).well()
    first, both = (torch.load(last(folder), weights_only=True) for folder in (out, tmp_path))
    assert both["cost"][0][:2] == first["cost"][0] and len(both["cost"][0]) == 4
    assert all(b > a for a, b in zip(first["slots"], both["slots"], strict=True))


def test_share_of_padding():
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
