"""Trainings whose processes share samples, and the flags for samples larger than a device."""

from __future__ import annotations

import csv
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from monai.losses.dice import DiceCELoss
from torch import nn

from ndlightnet import NDLightNet, NDLightUNet
from ndlightnet.data.errors import DataError
from ndlightnet.data.sampling import SeededSampler, replica, share_samples
from ndlightnet.inference import OutOfCore
from ndlightnet.parallel import Exchange, Shard
from ndlightnet.training import ImageTask, SegmentationTask, TextTask
from ndlightnet.training.segmentation.slab_loss import dice_ce_of_slabs
from tests.training.conftest import UNET, options
from tests.training.forked import run_forked

ROOT = Path(__file__).parents[3]


class Alone(Exchange):
    """The exchange of a single slab."""

    rank, count = 0, 1

    def all_to_all(self, sends, shapes):
        return lambda: list(sends)


def script(path: str, *arguments: str) -> None:
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


def losses(folder: Path) -> list[float]:
    with (folder / "logs/version_0/metrics.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]


@pytest.mark.slow
def test_two_processes_that_share_samples_have_the_losses_of_one(tmp_path, write_decathlon, segment):
    data, one, two = write_decathlon(tmp_path / "data"), tmp_path / "one", tmp_path / "two"
    places = {"root": data, "data": {"patch": [11, 8, 8], "batches": 3}, "net": {"out_channels": 2}}
    segment("fit", "--trainer.limit_val_batches=0", out=one, **places).well()
    (tmp_path / "c.yaml").write_text(UNET)
    trainer = {"devices": 2, "limit_val_batches": 0, "enable_progress_bar": False}
    words = options(out=two, **places, trainer=trainer, model={"grid_devices": 2})
    task = str(ROOT / "tasks" / "ct_segmentation.py")  # of which Lightning starts the second process
    assert run_forked(tmp_path / "log", script, task, "fit", f"--config={tmp_path}/c.yaml", *words) == [0]
    alone = losses(one)
    assert len(alone) == 3 and len({*alone}) == 3
    assert losses(two) == pytest.approx(alone, rel=1e-4)  # AdamW divides small gradients


def test_the_loss_of_slabs_is_monais():
    torch.manual_seed(0)
    logits = torch.randn(2, 4, 5, 6, 7, dtype=torch.float64, requires_grad=True)
    label = torch.randint(4, (2, 1, 5, 6, 7))
    expected = DiceCELoss(include_background=False, to_onehot_y=True, softmax=True, batch=True)
    expected_grad = torch.autograd.grad(expected(logits, label), logits)[0]
    loss = dice_ce_of_slabs(logits, label, Shard(Alone(), 0))
    assert loss.item() == pytest.approx(expected(logits, label).item(), rel=1e-12)
    grad = torch.autograd.grad(loss, logits)[0]
    assert (grad - expected_grad).abs().max() <= 1e-12 * expected_grad.abs().max()


def test_samples_are_shared_by_processes_in_turn(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    numbers = {}
    try:
        share_samples(2)
        for rank in range(4):
            monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
            assert replica() == (rank // 2, 2)
            numbers[rank] = list(SeededSampler(8))
    finally:
        share_samples(1)
    assert numbers[0] == numbers[1] == [0, 1, 2, 3] and numbers[2] == numbers[3] == [4, 5, 6, 7]


def test_wrong_numbers_of_processes_are_refused():
    net = NDLightNet(2, 1, 3, patch_size=2, embed_dim=8, depth=1)
    words = NDLightNet(1, vocab_size=256, embed_dim=8, depth=1)
    for task, network, count, line in (
        (ImageTask, net, 0, "0, expected 1 or more processes"),
        (ImageTask, nn.Linear(2, 2), 2, "2, expected 1 for ImageTask with Linear"),
        (TextTask, words, 2, "2, expected 1 for TextTask"),
    ):
        with pytest.raises(DataError, match=rf"model\.grid_devices: {line}"):
            task(network, grid_devices=count)
    task = ImageTask(net, grid_devices=3)
    task._trainer = SimpleNamespace(training=True, world_size=4)
    try:
        with pytest.raises(DataError, match="grid_devices: 3, expected a divisor of the 4 process"):
            task.configure_model()
    finally:
        share_samples(1)
    with pytest.raises(ValueError, match="out_of_core=True: Linear has no predict_large"):
        ImageTask(nn.Linear(2, 2), out_of_core=True)


def test_prediction_out_of_core():
    torch.manual_seed(0)
    image = torch.randn(2, 1, 8, 6)
    net = NDLightNet(2, 1, 3, patch_size=2, embed_dim=8, depth=1).eval()
    plain, large = (ImageTask(net, out_of_core=flag).probabilities(image) for flag in (False, True))
    assert (large - plain).abs().max() <= 1e-6
    unet = NDLightUNet(3, 1, 3, widths=(4, 8)).eval()
    task = SegmentationTask(unet, out_of_core=True)
    assert isinstance(task.predictor, OutOfCore) and "predictor.net" not in str([*task.state_dict()])
    volume = torch.randn(1, 1, 8, 6, 7)
    with torch.no_grad():
        assert (task.predictor(volume) - unet(volume)).abs().max() <= 1e-5
