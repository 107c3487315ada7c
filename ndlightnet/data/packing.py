"""Batches of samples of different sizes: packed or padded, of so many samples or tokens."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate
from torch.utils.data.distributed import DistributedSampler

from ndlightnet.data.sampling import replica
from ndlightnet.layout import pack, per_axis


def token_count(space: Sequence[int], patch_size: int | Sequence[int]) -> int:
    """Return the number of tokens of a sample (channels, *space) that is cut into patches."""
    patch = per_axis("patch_size", patch_size, len(space))
    return math.prod(-(-size // step) for size, step in zip(space, patch, strict=True))


class PackCollate:
    """Collate function: items (sample, label, ...) to (Packed, labels, ...), without padding.

    patch_size: the network's; samples are (channels, *space), or, if it is None, words (length,).
    """

    def __init__(self, patch_size: int | Sequence[int] | None) -> None:
        self.patch_size = patch_size

    def __call__(self, items: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
        rest = default_collate([tuple(item[1:]) for item in items])
        return (pack([item[0] for item in items], self.patch_size), *rest)


class PadCollate:
    """Collate function: items (sample, label, ...) to (batch, mask, labels, ...), padded with zeros to the largest:
    samples (channels, *space), batch (batch, channels, *largest), mask bool (batch, *largest), False = padding."""

    def __call__(self, items: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
        samples: list[Tensor] = [item[0] for item in items]
        first = samples[0]
        for i, x in enumerate(samples):
            if x.ndim != first.ndim or x.ndim < 2 or len(x) != len(first):
                expected = f"as many channels and axes as samples[0] {tuple(first.shape)}"
                raise ValueError(f"samples[{i}] {tuple(x.shape)}: expected (channels, *space), with {expected}")
        largest = [max(sizes) for sizes in zip(*(x.shape[1:] for x in samples), strict=True)]
        batch = first.new_zeros(len(samples), len(first), *largest)
        mask = torch.zeros(len(samples), *largest, dtype=torch.bool)
        for row, x in enumerate(samples):
            place: Any = tuple(slice(size) for size in x.shape[1:])
            batch[(row, slice(None), *place)] = x
            mask[(row, *place)] = True
        return (batch, mask, *default_collate([tuple(item[1:]) for item in items]))


class TokenBudgetSampler(DistributedSampler[list[int]]):
    """Sampler of batches of at most `budget` tokens, for `DataLoader(batch_sampler=...)`. Lightning replaces that in a
    training of several processes, but no `sampler`, of a dataset whose items are lists: `DataLoader(sampler=...,
    batch_size=None)`.

    Every sample comes once per epoch. The number of batches is the same in every epoch and on every replica, as
    trainers count batches only once; their numbers of tokens differ by little.

    Lightning makes the iterator of a resumed training before it sets the epoch: use
    `ndlightnet.training.core.data_module.TimedLoader` as the DataLoader, which draws batches later.

    Args:
        lengths: tokens of every sample; see `token_count`.
        budget: most tokens of a batch; ValueError if a sample is longer.
        shuffle: other batches every epoch, drawn from `seed` and the number given to `set_epoch`.

    Each process of a distributed training gets its share of the batches; if there are fewer samples than batches, some
    samples come twice.
    """

    def __init__(self, lengths: Sequence[int], budget: int, shuffle: bool = True, seed: int = 0) -> None:
        self.lengths, self.budget = [int(n) for n in lengths], budget
        if not self.lengths:
            raise ValueError("lengths=[]: expected one or more")
        longest = max(range(len(self.lengths)), key=self.lengths.__getitem__)
        if self.lengths[longest] > budget:
            raise ValueError(f"lengths[{longest}]={self.lengths[longest]}: expected at most budget={budget}")
        rank, replicas = replica()
        super().__init__(self.lengths, replicas, rank, shuffle, seed)  # type: ignore[arg-type]
        # groups of lengths with the same number of bits: the longest are dealt out first, which
        # leaves little of the budget unused, and within a group the order is random
        groups: dict[int, list[int]] = {}
        for index, length in enumerate(self.lengths):
            groups.setdefault(length.bit_length(), []).append(index)
        self._groups = [groups[bits] for bits in sorted(groups, reverse=True)]
        self.num_batches = -(-self._enough() // self.num_replicas) * self.num_replicas

    def _enough(self) -> int:
        """Return a number of batches that suffices for all samples, in any order within groups.

        A sample goes into the batch with the fewest tokens, which is no more than the mean. So it fits if there are
        (tokens of all samples before it) / (budget - its tokens) batches, or if there is a batch for each sample.
        """
        most, count, tokens = 1, 0, 0
        for group in self._groups:
            longest = max(self.lengths[i] for i in group)
            count, tokens = count + len(group), tokens + sum(self.lengths[i] for i in group)
            before, room = tokens - longest, self.budget - longest
            most = max(most, min(count, -(-before // room)) if room else count)
        return most

    @property
    def sampler(self) -> TokenBudgetSampler:
        """Return this object: Lightning looks for `set_epoch` at `sampler`."""
        return self

    def __len__(self) -> int:
        return self.num_batches // self.num_replicas

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)

        def order(n: int) -> list[int]:
            numbers: list[int] = torch.randperm(n, generator=generator).tolist()
            return numbers if self.shuffle else sorted(numbers)

        batches: list[list[int]] = [[] for _ in range(self.num_batches)]
        loads = [(0, number) for number in range(self.num_batches)]  # a heap
        for group in self._groups:
            for index in order(len(group)):
                tokens, number = loads[0]
                batches[number].append(group[index])
                heapq.heapreplace(loads, (tokens + self.lengths[group[index]], number))
        batches = [batch or [number % len(self.lengths)] for number, batch in enumerate(batches)]
        mine = order(self.num_batches)[self.rank :: self.num_replicas]
        for number in mine:
            yield batches[number]
