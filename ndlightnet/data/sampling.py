"""Order and random draws of training samples, from a seed and a number alone: a resumed training
gets the same samples as an uninterrupted one, with any number of workers."""

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
    """Return a seed made from several numbers >= 0; it differs if any of them differs."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


def linspace_indices(count: int, total: int) -> list[int]:
    """Return `count` of the numbers below `total`, evenly spaced."""
    return [i * total // count for i in range(count)]


@lru_cache(2)
def order(seed: int, rounds: int, count: int) -> np.ndarray:
    """Return the random order of `count` samples in round `rounds`: (count,) int64."""
    return np.random.default_rng((seed, 0, rounds)).permutation(count)


class SeededSamples(Dataset[Any]):
    """Dataset of the visits of a training. Which sample visit number n shows, and what that sample
    draws from torch's global generator, follow from the seed and from n.

    Every sample comes up once before any comes up again. The generator's state is restored.
    """

    def __init__(self, samples: Any, seed: int) -> None:
        self.samples, self.seed = samples, seed

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Any:
        rounds, place = divmod(number, len(self.samples))
        index = int(order(self.seed, rounds, len(self.samples))[place])
        with torch.random.fork_rng(devices=[]):
            # `torch.manual_seed` would seed the GPUs as well, and so change dropout
            torch.default_generator.manual_seed(mixed(self.seed, 1, number))
            return self.samples[index]


_sharing = [1]


def share_samples(processes: int) -> None:
    """Let each so many processes in turn get the same training samples."""
    _sharing[0] = processes


def replica() -> tuple[int, int]:
    """Return which of how many parts of the samples this process gets."""
    group = dist.is_available() and dist.is_initialized()
    rank, count = (dist.get_rank(), dist.get_world_size()) if group else (0, 1)
    return rank // _sharing[0], max(1, count // _sharing[0])


class SeededSampler(DistributedSampler[int]):
    """Sampler of the numbers of an epoch's visits: epoch * count, and so on. Each of several
    replicas has a part of them. Lightning sets the epoch, and replaces no DistributedSampler."""

    def __init__(self, count: int) -> None:
        rank, replicas = replica()
        super().__init__(range(count), replicas, rank)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        start = (self.epoch * self.num_replicas + self.rank) * self.num_samples
        return iter(range(start, start + self.num_samples))
