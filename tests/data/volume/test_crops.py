"""Crops: they follow from a seed and a number, every case comes up, labels are shown."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from ndlightnet.data.sampling import SeededSampler
from ndlightnet.data.volume.crops import Crops

from ..refusals import refuses

PATCH = (5, 4, 6)
SHAPES = [(9, 7, 11), (5, 12, 6), (8, 8, 8), (20, 4, 9), (6, 6, 6)]


def prepared(shape, number) -> dict:
    """The image says which case it is and which voxel: 1000 * case + flat index."""
    label = torch.zeros(1, *shape, dtype=torch.uint8)
    label[0, 1, 2, 3] = 1
    label[0, -1, 3:, :3] = 2  # 3 voxels or more, in a corner
    flat = label.flatten()
    places = [(flat == c).nonzero()[:, 0] for c in (1, 2, 3)]  # nothing is of class 3
    image = 1000.0 * number + torch.arange(flat.numel()).reshape(1, *shape)
    return {"image": image, "label": label, "places": places}


CASES = [prepared(shape, number) for number, shape in enumerate(SHAPES)]


def crops(foreground=1 / 3, seed=0, batch_size=2, cases=CASES) -> Crops:
    return Crops(cases, PATCH, batch_size, foreground, seed)


def place_of(crop) -> tuple[int, tuple[int, ...]]:
    """(case, first voxel) of a crop, which is the part of image and label that it should be."""
    image, label, _ = crop
    assert image.shape == label.shape == (1, *PATCH)
    assert image.dtype == torch.float32 and label.dtype == torch.int16
    case, flat = divmod(int(image[0, 0, 0, 0]), 1000)
    start = np.unravel_index(flat, SHAPES[case])
    at = (slice(None), *(slice(a, a + n) for a, n in zip(start, PATCH, strict=True)))
    assert torch.equal(image, CASES[case]["image"][at])
    assert torch.equal(label, CASES[case]["label"][at].short())
    return case, tuple(map(int, start))


def test_every_case_once_a_round():
    data, rounds = crops(), 8
    assert len(data) == 5
    orders = [[place_of(data[5 * r + i])[0] for i in range(5)] for r in range(rounds)]
    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in orders)
    assert len(set(map(tuple, orders))) > 3  # in another order each time


def test_a_crop_follows_from_seed_and_number():
    places = [place_of(crops()[n]) for n in range(40)]
    assert [place_of(crops()[n]) for n in reversed(range(40))] == places[::-1] and len(set(places)) > 20
    assert [place_of(crops(seed=1)[n]) for n in range(40)] != places
    assert [crops()[n][2] for n in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_change_nothing(workers):
    """An epoch's batches, and those of one that is resumed at the second epoch."""
    numbers = SeededSampler(6)
    loader = DataLoader(crops(), 2, sampler=numbers, num_workers=workers)
    for epoch in (0, 3):
        numbers.set_epoch(epoch)
        places = [place_of(crop) for batch in loader for crop in zip(*batch, strict=True)]
        assert places == [place_of(crops()[n]) for n in range(6 * epoch, 6 * epoch + 6)]


@pytest.mark.parametrize(
    "batch_size, foreground, places, period",
    [
        (2, 1 / 3, {1}, 2),
        (3, 1 / 3, {2}, 3),
        (6, 0.5, {3, 4, 5}, 6),
        (4, 1.0, {0, 1, 2, 3}, 4),
        (4, 0.0, set(), 4),
        (1, 1 / 3, {2}, 3),
        (2, 0.1, {9}, 10),
        (1, 1.0, {0}, 1),
    ],
)
def test_share_of_crops_that_show_a_label(batch_size, foreground, places, period):
    """The last of a batch; where a batch is too small for the share, one of so many crops. What is forced shows a class
    and takes any voxel to its middle that is far enough from the border."""
    data = crops(foreground, batch_size=batch_size)
    free = []
    for number in range(600):
        case, start = place_of(data[number])
        if number % period not in places:
            free.append(bool(data[number][1].any()))
            continue
        voxels = CASES[case]["label"][0].nonzero().numpy()
        centres = np.clip(voxels - np.array(PATCH) // 2, 0, np.array(SHAPES[case]) - PATCH)
        assert start in {*map(tuple, centres)} and data[number][1].any()
    assert len(free) == 600 - 600 * len(places) // period and (not free or np.mean(free) < 0.9)  # which lie anywhere


def test_classes_come_up_evenly():
    """Not by their voxels, of which class 2 has 27 times as many. Of 500 draws the share has a deviation of 0.022:
    within five."""
    data = crops(1.0, cases=[prepared((20, 12, 20), 0)])
    classes = [set(data[n][1].unique().tolist()) - {0} for n in range(500)]
    assert all(len(present) == 1 for present in classes)  # the two are too far apart for one crop
    assert abs(sum({1} == present for present in classes) / 500 - 0.5) < 0.11 and {2} in classes


@pytest.mark.parametrize("foreground", [0.0, 1.0])
def test_free_crops_and_those_of_a_case_without_a_label_lie_anywhere(foreground):
    """Every place is as likely: chi-square of 4 x 3 x 5 places, its mean 59, deviation 11."""
    case = prepared((8, 6, 10), 0)
    if foreground:
        case["places"] = [torch.zeros(0, dtype=torch.int64)] * 3
    data = crops(foreground, cases=[case])
    count = Counter(int(data[n][0][0, 0, 0, 0]) for n in range(1200))
    assert len(count) == 60 and sum((times - 20) ** 2 / 20 for times in count.values()) < 59 + 5 * 11


def test_labels_above_255_beside_others():
    """Cases with few labels are uint8, with many int16: a batch of both keeps every number."""
    many = {**CASES[2], "label": CASES[2]["label"].short() * 300}
    data = crops(1.0, cases=[CASES[0], many])
    for workers in (0, 1):
        loader = DataLoader(data, 2, sampler=SeededSampler(40), num_workers=workers)
        assert torch.cat([label.flatten() for _, label, _ in loader]).unique().tolist() == [0, 1, 2, 300, 600]


def test_a_crop_does_not_hold_its_volume():
    image, label, _ = crops()[0]
    assert image.untyped_storage().nbytes() == image.nbytes
    image.fill_(0), label.fill_(9)
    place_of(crops()[0])  # the volumes are as they were


@pytest.mark.parametrize("foreground", [-0.1, 33, float("nan")])
def test_a_fraction_that_is_none(foreground):
    refuses(lambda: crops(foreground), None, f"data.foreground: {foreground}, expected a fraction from 0 to 1")
