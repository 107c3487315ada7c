"""Dropout draws anew in every epoch, and in an epoch that is repeated what it drew before."""

from types import SimpleNamespace

import torch
from torch import nn

from ndlightnet.training import ImageTask, SegmentationTask


def test_dropout_of_epochs():
    for kind in (ImageTask, SegmentationTask):
        task = kind(nn.Dropout(0.5)).train()
        draws = []
        for seed, epoch in ((7, 0), (7, 1), (7, 0), (8, 0)):
            data = SimpleNamespace(seed=seed)
            loader = SimpleNamespace(waited=0.0)
            task._trainer = SimpleNamespace(datamodule=data, current_epoch=epoch, train_dataloader=loader)
            task.on_train_epoch_start()
            draws.append(task(torch.ones(64)))
        first, second, again, another = draws
        assert torch.equal(first, again)
        assert not torch.equal(first, second) and not torch.equal(first, another)
