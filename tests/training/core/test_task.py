"""What tasks share: results of several processes, names in checkpoints, empty validations."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from ndlightnet.data.errors import DataError
from ndlightnet.training import ImageTask, SegmentationTask, SignalTask, VideoTask
from ndlightnet.training.core import task as core_task
from ndlightnet.training.core.task import Task
from ndlightnet.training.segmentation.volume_data import VolumeData


def test_results_of_two_processes_are_joined_and_counted_once(monkeypatch):
    task = VideoTask(nn.Identity())
    task._trainer = SimpleNamespace(world_size=2)  # type: ignore[assignment]

    def both(results, mine):
        results[:] = [mine, {1: "b", 2: "c"}]

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_gather_object", both)
    assert list(task.gathered({2: "c", 0: "a"}).items()) == [(0, "a"), (1, "b"), (2, "c")]


def test_names_that_differ_from_the_checkpoints_are_refused():
    task, data = SegmentationTask(nn.Identity()), VolumeData("somewhere", [8, 8, 8])
    task._trainer = SimpleNamespace(datamodule=data)  # type: ignore[assignment]
    saved = {"names": {"labels": ["background", "liver"], "modalities": ["CT"]}}
    saved |= {"ema_dice": 0.5, "cost": []}
    task.on_load_checkpoint(saved)
    assert data.labels == ("background", "liver") and data.modalities == ("CT",)
    data.labels = ("background", "spleen")
    with pytest.raises(DataError, match=r"somewhere: .*spleen.*liver"):
        task.on_load_checkpoint(saved)


def test_what_one_input_can_raise_is_a_line_and_an_error_of_ours_is_raised():
    task = VideoTask(nn.Identity())
    with task.one_input("a.mp4"):
        raise DataError("a.mp4: damaged")
    with task.one_input("b.mp4"):
        torch.empty(2**58)
    with task.one_input("c.mp4"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    for error in (TypeError, ValueError, RuntimeError, KeyError):
        with pytest.raises(error, match="ours"), task.one_input("d.mp4"):
            raise error("ours")
    lack = "does not fit into memory"
    assert [line.split(" (")[0] for line in task.failures] == ["a.mp4: damaged", f"b.mp4: {lack}", f"c.mp4: {lack}"]


def test_a_case_without_foreground_does_not_spoil_the_validation(monkeypatch):
    """A class that a case has not has no Dice: it is left out, neither 0 nor NaN."""
    task, logged = SegmentationTask(nn.Identity()), {}
    data = SimpleNamespace(labels=("background", "liver"), patch=(4, 4, 4), plane=False)
    task._trainer = SimpleNamespace(datamodule=data, sanity_checking=False, world_size=1)  # type: ignore[assignment]
    monkeypatch.setattr(task, "log", lambda name, value, **_: logged.update({name: value}))
    truth = torch.zeros(1, 1, 4, 4, 4)
    truth[..., :2] = 1
    half = truth.clone()
    half[..., 1] = 0
    task.on_validation_epoch_start()
    for name, predicted, label in (("a", truth, truth), ("b", half, truth), ("c", 0 * truth, 0 * truth)):
        pair = {"image": torch.cat([1 - predicted, predicted], 1)[0], "label": label[0]}
        batch = {k: SimpleNamespace(as_tensor=lambda v=v: v) for k, v in pair.items()}
        task.validation_step({**batch, "name": name}, 0)
    task.on_validation_epoch_end()
    assert logged["val_dice"] == logged["ema_dice"] == pytest.approx((1 + 2 * 16 / (16 + 32)) / 2)


def test_a_task_without_our_data_says_so():
    task = VideoTask(nn.Identity())
    task._trainer = SimpleNamespace(datamodule=None)  # type: ignore[assignment]
    with pytest.raises(DataError, match="datamodule"):
        task.setup("fit")


class OnACard(Task):
    """As if it were there."""

    device = SimpleNamespace(type="cuda")  # type: ignore[assignment]

    def example_inputs(self) -> tuple[torch.Tensor, ...]:
        return (torch.zeros(2, 3),)


def test_the_network_is_captured_with_a_batch_like_those_of_training(monkeypatch, capsys):
    modes = []

    class Graphs:
        def __init__(self, net, call, inputs):
            modes.append(net.training)
            self.shapes = [x.shape for x in inputs]
            call(*inputs)  # warms up

        def __call__(self, x):
            return torch.full((2, 1), 7.0)

    monkeypatch.setattr(core_task, "CapturedCall", Graphs)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    net = nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1)).eval()
    net[0].register_forward_hook(lambda *_: modes.append(torch.is_autocast_cache_enabled()))
    task = OnACard(net, cuda_graph=True)
    task._trainer = SimpleNamespace(  # type: ignore[assignment]
        strategy=None, accumulate_grad_batches=1, precision_plugin=MixedPrecision("bf16-mixed", "cpu")
    )
    task.on_fit_start()
    assert modes == [True, False]
    assert net[1].running_mean == 0 and net[1].num_batches_tracked == 0
    assert (task(torch.ones(2, 3)) == 7).all() and not capsys.readouterr().err
    for _ in range(2):
        assert task(torch.ones(3, 3)).shape == (3, 1)
    (note,) = capsys.readouterr().err.splitlines()
    assert note == "note: model.cuda_graph: a batch of [(3, 3)] runs without the graph, which is of [(2, 3)]"
    assert task.eval()(torch.ones(1, 3)).shape == (1, 1)
    task.trainer.strategy = DDPStrategy()
    task.on_fit_start()
    assert task.captured is None and capsys.readouterr().err.endswith("DDPStrategy trains without the graph\n")
    task.trainer.accumulate_grad_batches = 4
    with pytest.raises(DataError, match="expected false with accumulate_grad_batches=4"):
        task.on_fit_start()
    with pytest.raises(DataError, match="batches of SignalTask have many shapes"):
        SignalTask(nn.Identity(), cuda_graph=True).on_fit_start()


def test_training_on_a_gpu_logs_the_steps_that_are_written(monkeypatch):
    """And the first one, and the last of an epoch or a training: the progress bar would wait for the device."""
    logged = []
    monkeypatch.setattr(L.LightningModule, "log", lambda task, name, value, bar: logged.append(value))
    trainer = SimpleNamespace(training=True, log_every_n_steps=4, max_steps=7, is_last_batch=False, global_step=0)
    near, far = Task(nn.Identity()), OnACard(nn.Identity())
    near._trainer = far._trainer = trainer  # type: ignore[assignment]
    for trainer.global_step in range(7):
        far.log("loss", trainer.global_step, prog_bar=True)
    assert logged == [0, 3, 6]
    far.log("waiting", 7)  # at the end of an epoch, not in the bar
    near.log("loss", 8, prog_bar=True)
    trainer.global_step, trainer.is_last_batch = 9, True
    far.log("loss", 9, prog_bar=True)
    trainer.training, trainer.is_last_batch = False, False
    far.log("val", 10, prog_bar=True)
    assert logged[3:] == [7, 8, 9, 10]


@pytest.mark.parametrize("kind", [ImageTask, SegmentationTask])
def test_dropout_draws_anew_in_every_epoch_and_again_in_one_that_is_repeated(kind):
    task, draws = kind(nn.Dropout(0.5)).train(), []
    for seed, epoch in ((7, 0), (7, 1), (7, 0), (8, 0)):
        task._trainer = SimpleNamespace(
            datamodule=SimpleNamespace(seed=seed), current_epoch=epoch, train_dataloader=SimpleNamespace(waited=0.0)
        )
        task.on_train_epoch_start()
        draws.append(task(torch.ones(64)))
    first, second, again, another = draws
    assert torch.equal(first, again)
    assert not torch.equal(first, second) and not torch.equal(first, another)
