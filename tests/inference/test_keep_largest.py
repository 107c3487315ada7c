"""The largest component of every class, against a search cell by cell."""

from itertools import product

import numpy as np
import pytest
import torch

from ndlightnet.inference import keep_largest


def components(mask):
    """Sets of cells that touch, also at corners, by a search from cell to cell."""
    cells, result = set(map(tuple, np.argwhere(mask))), []
    while cells:
        component, edge = set(), {min(cells)}
        while edge:
            component |= edge
            near = {tuple(np.add(cell, step)) for cell in edge for step in product((-1, 0, 1), repeat=mask.ndim)}
            edge = (near & cells) - component
        result.append(component)
        cells -= component
    return result


def by_search(labels, classes):
    kept = labels.copy()
    for c in classes:
        largest_first = sorted(components(labels == c), key=len, reverse=True)  # stable: the first of several
        for component in largest_first[1:]:
            kept[tuple(np.array(sorted(component)).T)] = 0
    return kept


@pytest.mark.parametrize("space", [(60,), (17, 13), (9, 7, 8), (4, 5, 3, 4), (1, 9, 9)])
@pytest.mark.parametrize("dtype, classes", [(torch.uint8, None), (torch.int16, [2]), (torch.int64, None)])
def test_against_a_search(space, dtype, classes):
    generator = torch.Generator().manual_seed(len(space))
    labels = torch.randint(0, 4, space, generator=generator)
    labels = (labels * (torch.rand(space, generator=generator) > 0.6)).to(dtype)
    before = labels.clone()
    kept = keep_largest(labels, classes)
    assert kept.dtype == dtype and torch.equal(labels, before)
    expected = by_search(labels.numpy(), classes or range(1, 4))
    assert torch.equal(kept, torch.from_numpy(expected)) and not torch.equal(kept, labels)


def test_nothing_to_do():
    for labels in (torch.zeros(3, 4, 5, dtype=torch.uint8), torch.ones(4, 4, dtype=torch.int16)):
        assert torch.equal(keep_largest(labels), labels)
    assert torch.equal(keep_largest(torch.tensor([1, 0, 1]), [7]), torch.tensor([1, 0, 1]))


def test_arguments_that_do_not_fit():
    for labels in (torch.zeros(3, 3), torch.zeros(3, 3, dtype=torch.bool)):
        with pytest.raises(ValueError, match="expected integers"):
            keep_largest(labels)
    with pytest.raises(ValueError, match="expected labels above 0"):
        keep_largest(torch.zeros(3, dtype=torch.uint8), [0, 1])
