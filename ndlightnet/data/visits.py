"""What a training sees follows from a seed and a number alone: resumed, it sees what it would have,
with any number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler


def mixed(*numbers: int) -> int:
    """A seed from several numbers from 0: another one where any of them is another."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


@lru_cache(2)
def order(seed: int, rounds: int, count: int) -> np.ndarray:
    """In which order `count` things come in round `rounds`: (count,) int64."""
    return np.random.default_rng((seed, 0, rounds)).permutation(count)


class Visits(Dataset[Any]):
    """Visit number n of a training: which item of `samples` it shows, and what that draws from
    torch's global generator, follow from the seed and from n.

    Every sample comes up once before any comes up again. The generator itself is left as it was.
    """

    def __init__(self, samples: Any, seed: int) -> None:
        self.samples, self.seed = samples, seed

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Any:
        rounds, place = divmod(number, len(self.samples))
        index = int(order(self.seed, rounds, len(self.samples))[place])
        with torch.random.fork_rng(devices=[]):
            # `torch.manual_seed` would seed the cards as well, and with them dropout
            torch.default_generator.manual_seed(mixed(self.seed, 1, number))
            return self.samples[index]


class Numbers(DistributedSampler[int]):
    """The numbers of an epoch's visits: epoch * count, and so on. Each of several replicas has a
    part of its own. Lightning tells the epoch, and leaves a DistributedSampler as it is."""

    def __init__(self, count: int) -> None:
        group = dist.is_available() and dist.is_initialized()
        replicas, rank = (dist.get_world_size(), dist.get_rank()) if group else (1, 0)
        super().__init__(range(count), replicas, rank)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        start = (self.epoch * self.num_replicas + self.rank) * self.num_samples
        return iter(range(start, start + self.num_samples))
