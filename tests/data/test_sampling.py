"""SeededSamples follow from a seed and a number, with any number of workers, on any number of replicas."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import _set_sampler_epoch
from torch.utils.data import DataLoader

from ndlightnet.data.packing import TokenBudgetSampler
from ndlightnet.data.sampling import SeededSampler, SeededSamples, linspace_indices, mixed
from ndlightnet.training.core.data_module import DataModule, TimedLoader


class Drawing:
    """Item i is (i, what it drew)."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(torch.rand((), dtype=torch.float64))


def test_a_sample_follows_from_seed_and_number():
    samples = SeededSamples(Drawing(), 3)
    draws = [samples[n] for n in range(40)]
    torch.manual_seed(99)
    assert [SeededSamples(Drawing(), 3)[n] for n in reversed(range(40))] == draws[::-1]
    assert len({*draws}) == 40 and {*draws}.isdisjoint(SeededSamples(Drawing(), 4)[n] for n in range(40))
    rounds = [tuple(index for index, _ in draws[n : n + 5]) for n in range(0, 40, 5)]
    assert all(sorted(one) == list(range(5)) for one in rounds) and len({*rounds}) > 4
    assert len(samples) == 5


def test_a_sample_leaves_the_generator_as_it_was():
    """Without workers dropout draws from the same one."""
    before = torch.get_rng_state()
    SeededSamples(Drawing(), 3)[7]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_is_told_the_epoch_late(workers):
    """As Lightning does it where it resumes: the iterator is made first."""
    expected = [SeededSamples(Drawing(), 3)[n] for n in range(12, 16)]
    loader = DataModule(".", 2, workers).training_loader(SeededSamples(Drawing(), 3), 4)
    before, iterator = torch.get_rng_state(), iter(loader)
    loader.sampler.set_epoch(3)
    assert [pair for a, b in iterator for pair in zip(a.tolist(), b.tolist(), strict=True)] == expected
    assert torch.equal(torch.get_rng_state(), before)  # the network draws from it
    loader.sampler.set_epoch(0)
    assert next(iter(loader))[0].tolist() == [SeededSamples(Drawing(), 3)[n][0] for n in (0, 1)]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_so_many_tokens_that_are_told_the_epoch_late(workers):
    sampler = TokenBudgetSampler([1 + i % 7 for i in range(30)], 20)
    loader = TimedLoader(torch.arange(30), batch_sampler=sampler, num_workers=workers)
    first, iterator = list(sampler), iter(loader)
    sampler.set_epoch(3)
    assert [batch.tolist() for batch in iterator] == list(sampler) != first


def test_lightning_tells_the_sampler_of_batches_the_epoch():
    sampler = TokenBudgetSampler([1, 2], 4)
    _set_sampler_epoch(DataLoader(torch.arange(2), batch_sampler=sampler), 3)
    assert sampler.epoch == 3


@pytest.mark.parametrize("count, size, batches", [(5, 2, 2), (10, 3, 3), (5, 8, 1)])
def test_whole_batches_but_one_of_a_small_set(count, size, batches):
    loader = DataModule(".", size).training_loader(SeededSamples(Drawing(), 0), count)
    assert isinstance(loader, TimedLoader) and loader.waited == 0
    assert len(list(loader)) == len(loader) == batches
    assert loader.waited > 0


def test_numbers_of_epochs():
    numbers = SeededSampler(4)
    assert len(numbers) == 4 and list(numbers) == list(numbers) == [0, 1, 2, 3]
    numbers.set_epoch(7)
    assert list(numbers) == [28, 29, 30, 31]


@pytest.mark.parametrize("count", [8, 9])
def test_replicas_have_numbers_of_their_own(monkeypatch, count):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    samplers, numbers = [], []
    for rank in range(2):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        samplers.append(SeededSampler(count))
    assert [*map(len, samplers)] == 2 * [-(-count // 2)]
    for epoch in range(3):
        for sampler in samplers:
            sampler.set_epoch(epoch)
            numbers += sampler
    assert numbers == list(range(len(numbers)))


def test_seeds_from_numbers():
    keys = [(0, 1, 0), (0, 1, 1), (1, 1, 0), (0, 2, 0), (0, 1, 10**9), (2**64 - 1, 1, 5)]
    seeds = [mixed(*key) for key in keys]
    assert len(set(seeds)) == 6 and seeds == [mixed(*key) for key in keys]
    for seed in seeds:
        torch.default_generator.manual_seed(seed)
    assert np.uint64(max(seeds)) == max(seeds)


def test_a_plain_loader_takes_the_numbers_as_well():
    numbers = SeededSampler(5)
    numbers.set_epoch(1)
    (batch,) = DataLoader(SeededSamples(Drawing(), 3), batch_size=5, sampler=numbers)
    assert batch[0].tolist() == [SeededSamples(Drawing(), 3)[n][0] for n in range(5, 10)]


@pytest.mark.parametrize("count, total", [(0, 7), (1, 7), (3, 7), (7, 7), (6000, 60000)])
def test_linspace_indices(count, total):
    indices = linspace_indices(count, total)
    assert len(set(indices)) == count and indices == sorted(indices)
    assert all(0 <= n < total for n in indices)
    gaps = np.diff([*indices, total])
    assert count == 0 or gaps.max() - gaps.min() <= 1
