"""How training batches are drawn, the same for every kind of data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from ndlightnet.data.visits import Numbers


def training_loader(
    samples: Any,
    count: int,
    batch_size: int,
    workers: int,
    collate: Callable[..., Any] | None = None,
) -> TimedLoader:
    """Whole batches of an epoch's `count` numbers, for which `samples` has an item each."""
    numbers = Numbers(count)
    return TimedLoader(
        samples, batch_size=batch_size, sampler=numbers, num_workers=workers, collate_fn=collate,
        drop_last=len(numbers) >= batch_size, persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # starting processes draws nothing from the network's
    )  # fmt: skip


class TimedLoader(DataLoader[Any]):
    """Knows how long it was waited for: `waited`, in seconds.

    Numbers are drawn when the first batch is asked for: Lightning makes the iterator of a resumed
    training before it tells the sampler the epoch.
    """

    waited = 0.0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = None
        while True:
            asked = time.perf_counter()
            batches = super().__iter__() if batches is None else batches  # starts the processes
            batch = next(batches, None)
            self.waited += time.perf_counter() - asked
            if batch is None:
                return
            yield batch
