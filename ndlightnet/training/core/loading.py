"""Loader of training batches, the same for every kind of data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from ndlightnet.data.sampling import SeededSampler


def training_loader(
    samples: Any,
    count: int,
    batch_size: int,
    workers: int,
    collate: Callable[..., Any] | None = None,
    spawned: bool = False,
) -> TimedLoader:
    """Return a loader of `samples[n]` for an epoch's `count` numbers n, in whole batches. Workers
    that use CUDA must be `spawned`."""
    numbers = SeededSampler(count)
    return TimedLoader(
        samples,
        batch_size=batch_size,
        sampler=numbers,
        num_workers=workers,
        collate_fn=collate,
        drop_last=len(numbers) >= batch_size,
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available(),
        multiprocessing_context="spawn" if spawned and workers else None,
        generator=torch.Generator(),  # or starting workers would draw from the network's
    )


def still_loader(
    samples: Any, batch_size: int, workers: int, collate: Callable[..., Any] | None = None, spawned: bool = False
) -> DataLoader[Any]:
    """Return a loader of all samples in their order, for validation, test and prediction."""
    return DataLoader(
        samples,
        batch_size=batch_size,
        num_workers=workers,
        collate_fn=collate,
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available(),
        multiprocessing_context="spawn" if spawned and workers else None,
        generator=torch.Generator(),  # or starting workers would draw from the network's
    )


class TimedLoader(DataLoader[Any]):
    """DataLoader that measures how long it is waited for: `waited`, in seconds.

    The sampler starts when the first batch is asked for: Lightning makes the iterator of a resumed
    training before it tells the sampler the epoch.
    """

    waited = 0.0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = None
        while True:
            asked = time.perf_counter()
            batches = super().__iter__() if batches is None else batches  # starts the workers
            batch = next(batches, None)
            self.waited += time.perf_counter() - asked
            if batch is None:
                return
            yield batch
