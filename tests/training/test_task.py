"""What tasks share: results of several processes, names in checkpoints, empty validations."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ndlightnet.data.errors import DataError
from ndlightnet.training import SegmentationTask, VideoTask
from ndlightnet.training.volumes import VolumeData


def test_results_of_two_processes_are_joined_and_counted_once(monkeypatch):
    task = VideoTask(nn.Identity())
    task._trainer = SimpleNamespace(world_size=2)  # type: ignore[assignment]

    def both(parts, mine):
        parts[:] = [mine, {1: "b", 2: "c"}]

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_gather_object", both)
    assert list(task.gathered({2: "c", 0: "a"}).items()) == [(0, "a"), (1, "b"), (2, "c")]


def test_names_that_differ_from_the_checkpoints_are_refused():
    task, data = SegmentationTask(nn.Identity()), VolumeData("somewhere", [8, 8, 8])
    task._trainer = SimpleNamespace(datamodule=data)  # type: ignore[assignment]
    saved = {"names": {"labels": ["background", "liver"], "modalities": ["CT"]}}
    task.on_load_checkpoint(saved)
    assert data.labels == ("background", "liver") and data.modalities == ("CT",)
    data.labels = ("background", "spleen")
    with pytest.raises(DataError, match=r"somewhere: .*spleen.*liver"):
        task.on_load_checkpoint(saved)


def test_a_case_without_foreground_does_not_spoil_the_validation(monkeypatch):
    task, logged = SegmentationTask(nn.Identity()), {}
    monkeypatch.setattr(task, "log", lambda name, value, **_: logged.update({name: value}))
    truth = torch.zeros(1, 1, 4, 4, 4)
    truth[..., :2] = 1
    logits = torch.cat([1 - truth, truth], 1)
    task.on_validation_epoch_start()
    for label in (truth, 0 * truth):
        pair = {"image": logits, "label": label}
        batch = {k: SimpleNamespace(as_tensor=lambda v=v: v) for k, v in pair.items()}
        task.validation_step(batch, 0)
    task.on_validation_epoch_end()
    assert logged["val_dice"] == 1.0


def test_a_task_without_our_data_says_so():
    task = VideoTask(nn.Identity())
    task._trainer = SimpleNamespace(datamodule=None)  # type: ignore[assignment]
    with pytest.raises(DataError, match="datamodule"):
        task.setup("fit")
