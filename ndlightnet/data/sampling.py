"""Order and random draws of training samples, from a seed and a number alone: a resumed training gets the same samples
as an uninterrupted one, with any number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def seeded_draws(seed: int) -> Iterator[None]:
    """Seed torch's global generator on the CPU for the block; it gets its state back."""
    with torch.random.fork_rng(devices=[]):
        # `torch.manual_seed` would seed the GPUs as well, and so change dropout
        torch.default_generator.manual_seed(seed)
        yield


def linspace_indices(count: int, total: int) -> list[int]:
    """Return `count` of the numbers below `total`, evenly spaced."""
    return [i * total // count for i in range(count)]


@lru_cache(2)
def order(seed: int, rounds: int, count: int) -> np.ndarray:
    """Return the random order of `count` samples in round `rounds`: (count,) int64."""
    return np.random.default_rng((seed, 0, rounds)).permutation(count)


class SeededSamples(Dataset[Any]):
    """Dataset of the draws of a training, numbered by SeededSampler. Which sample draw number n is, and what that
    sample draws from torch's global generator, follow from the seed and from n. Every sample comes up once before any
    comes up again."""

    def __init__(self, samples: Any, seed: int) -> None:
        self.samples, self.seed = samples, seed

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Any:
        rounds, place = divmod(number, len(self.samples))
        index = int(order(self.seed, rounds, len(self.samples))[place])
        with seeded_draws(mixed(self.seed, 1, number)):
            return self.samples[index]


_sharing = [1]


def share_samples(processes: int) -> None:
    """Let each so many processes in turn get the same training samples."""
    _sharing[0] = processes


def replica() -> tuple[int, int]:
    """Return which of how many shares of the samples this process gets."""
    group = dist.is_available() and dist.is_initialized()
    rank, count = (dist.get_rank(), dist.get_world_size()) if group else (0, 1)
    return rank // _sharing[0], max(1, count // _sharing[0])


class SeededSampler(DistributedSampler[int]):
    """Sampler of the numbers of an epoch's draws: epoch * count, and so on, dealt out to the replicas. Lightning sets
    the epoch, and replaces no DistributedSampler."""

    def __init__(self, count: int) -> None:
        rank, replicas = replica()
        super().__init__(range(count), replicas, rank)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        start = (self.epoch * self.num_replicas + self.rank) * self.num_samples
        return iter(range(start, start + self.num_samples))
