"""Batches of samples of different sizes: end to end, padded, and filled up to so many tokens."""

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from ndlightnet import pack
from ndlightnet.data import packing
from ndlightnet.data.packing import PackCollate, PadCollate, TokenBudgetSampler, token_count

SPACES = {1: [(9,), (2,), (14,)], 2: [(5, 4), (2, 9), (1, 1)], 3: [(3, 4, 5), (2, 2, 7)]}
each_rank = pytest.mark.parametrize("spaces", SPACES.values(), ids=SPACES)


def items_of(spaces):
    return [(torch.randn(2, *space), i, f"n{i}") for i, space in enumerate(spaces)]


@each_rank
@pytest.mark.parametrize("patch", [1, 2, 3])
def test_packed_batch(spaces, patch):
    batch_items = items_of(spaces)
    packed, labels, names = pickle.loads(pickle.dumps(PackCollate(patch)))(batch_items)
    expected = pack([x for x, *_ in batch_items], patch)
    assert torch.equal(packed.values, expected.values)
    assert packed.layout.shapes == expected.layout.shapes
    assert tuple(token_count(space, patch) for space in spaces) == expected.layout.lengths
    assert labels.tolist() == list(range(len(spaces)))
    assert list(names) == [f"n{i}" for i in range(len(spaces))]


def test_tokens_with_a_patch_of_its_own_for_each_axis():
    assert token_count((7, 4), (2, 3)) == 4 * 2
    with pytest.raises(ValueError, match="patch_size"):
        token_count((7, 4), (2, 3, 4))


@each_rank
def test_padded_batch(spaces):
    batch_items = items_of(spaces)
    batch, mask, labels, names = pickle.loads(pickle.dumps(PadCollate()))(batch_items)
    largest = tuple(max(sizes) for sizes in zip(*spaces, strict=True))
    assert batch.shape == (len(spaces), 2, *largest) and mask.shape == (len(spaces), *largest)
    assert mask.dtype == torch.bool and labels.tolist() == list(range(len(spaces)))
    assert len(names) == len(spaces)
    for (x, *_), row, inside in zip(batch_items, batch, mask, strict=True):
        place = tuple(slice(size) for size in x.shape[1:])
        assert torch.equal(row[(slice(None), *place)], x) and inside[place].all()
        assert inside.sum() == math.prod(x.shape[1:]) and not row[:, ~inside].any()


def test_samples_without_labels():
    batch_items = [(torch.randn(2, n),) for n in (3, 5)]
    assert len(PackCollate(1)(batch_items)) == 1 and len(PadCollate()(batch_items)) == 2


def test_packed_words():
    packed, labels = PackCollate(None)([(torch.tensor([3, 1]), 0), (torch.tensor([4]), 1)])
    assert packed.values.tolist() == [3, 1, 4] and labels.tolist() == [0, 1]


@pytest.mark.parametrize("collate", [PackCollate(1), PadCollate()])
@pytest.mark.parametrize("second", [(3, 4), (2, 4, 4), (4,)])
def test_samples_that_do_not_belong_together(collate, second):
    with pytest.raises(ValueError, match=r"samples\[1\]"):
        collate([(torch.randn(2, 5), 0), (torch.randn(second), 1)])


def test_in_a_loader_with_a_worker():
    batch_items = [(torch.full((1, n), float(n)), n) for n in (3, 8, 2, 5, 5, 4)]
    sampler = TokenBudgetSampler([token_count((n,), 2) for _, n in batch_items], budget=6)
    loader = DataLoader(batch_items, batch_sampler=sampler, collate_fn=PackCollate(2), num_workers=1)  # type: ignore[arg-type, var-annotated]
    drawn = []
    for packed, labels in loader:
        assert packed.layout.length <= 6 and len(packed) == len(labels)
        for sample, label in zip(packed.unpack(), labels.tolist(), strict=True):
            assert sample.flatten()[:label].tolist() == [label] * label
        drawn += labels.tolist()
    assert len(loader) == len(sampler) and sorted(drawn) == sorted(n for _, n in batch_items)


def sampler_of(rank: int, replicas: int, *arguments) -> TokenBudgetSampler:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "replica", lambda: (rank, replicas))
        return TokenBudgetSampler(*arguments)


lengths = st.lists(st.integers(1, 300), min_size=1, max_size=60)


@settings(deadline=None, max_examples=200)
@given(lengths, st.integers(0, 900), st.integers(1, 5), st.integers(0, 3), st.booleans())
def test_every_epoch_shows_every_sample_within_the_budget(lengths, more, replicas, epoch, shuffle):
    budget = max(lengths) + more
    drawn, counts = [], set()
    for rank in range(replicas):
        sampler = sampler_of(rank, replicas, lengths, budget, shuffle, 5)
        counts.add(len(sampler))
        sampler.set_epoch(epoch)
        batches = list(sampler)
        counts |= {len(batches), len(sampler)}
        assert all(batches) and all(sum(lengths[i] for i in b) <= budget for b in batches)
        drawn += [i for batch in batches for i in batch]
    assert len(counts) == 1
    assert set(drawn) == set(range(len(lengths)))
    # samples come twice only where a replica would get an empty batch
    assert len(drawn) == len(lengths) or counts.pop() * replicas > len(lengths)


def test_batches_are_nearly_full():
    """Recordings of digits, in tokens: no more than 3 % of the budget is unused."""
    lengths = (torch.randn(3000).mul(0.4).exp() * 170).long().clamp(50, 900).tolist()
    sampler = TokenBudgetSampler(lengths, 10_000)
    loads = [sum(lengths[i] for i in batch) for batch in sampler]
    assert len(loads) <= 1.03 * sum(lengths) / 10_000 + 1
    assert max(loads) - min(loads) < 0.05 * 10_000


def test_one_batch_where_all_fits():
    assert [sorted(batch) for batch in TokenBudgetSampler([3, 9, 2], 14)] == [[0, 1, 2]]


def test_order_of_epochs():
    sampler = TokenBudgetSampler([1 + i % 7 for i in range(100)], 40)

    def epoch(number):
        sampler.set_epoch(number)
        return list(sampler)

    first = epoch(0)
    assert first == epoch(0) != epoch(1)
    assert {frozenset(batch) for batch in first} != {frozenset(batch) for batch in epoch(1)}
    assert list(TokenBudgetSampler(sampler.lengths, 40, seed=1)) != first
    sampler.shuffle = False
    assert epoch(0) == epoch(1)


def test_replicas_share_the_batches_of_one():
    lengths = [1 + i % 7 for i in range(100)]
    shares = [list(sampler_of(rank, 3, lengths, 40)) for rank in range(3)]
    assert len({*map(len, shares)}) == 1
    assert sorted(i for share in shares for batch in share for i in batch) == list(range(100))


@pytest.mark.parametrize("arguments, text", [(([], 5), "lengths"), (([3, 6, 2], 5), r"lengths\[1\]=6.*budget=5")])
def test_what_the_sampler_refuses(arguments, text):
    with pytest.raises(ValueError, match=text):
        TokenBudgetSampler(*arguments)
