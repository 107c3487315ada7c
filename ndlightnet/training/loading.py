"""How training batches are drawn, the same for every kind of data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler


def training_loader(
    dataset: Any,
    batch_size: int,
    repeats: int,
    workers: int,
    loader: Callable[..., DataLoader[Any]],
) -> DataLoader[Any]:
    """Random visits, `repeats` times the data set's length in an epoch, in whole batches."""
    visits = RandomSampler(dataset, num_samples=repeats * len(dataset), replacement=repeats > 1)
    return loader(
        dataset, batch_size=batch_size, sampler=visits, num_workers=workers,
        drop_last=len(dataset) >= batch_size, persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available(),
    )  # fmt: skip
