"""Folds of training samples: even, and without a group in two of them."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndlightnet.data.fold_assignment import assign_folds, first_of_each, read_groups

from .refusals import refuses


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 7))
def test_neighbours_stay_together_and_classes_are_even(labels, count):
    folds = assign_folds(labels, count)
    assert len(folds) == len(labels) and {*folds} <= {*range(count)}
    for label in set(labels):
        of_class = [fold for fold, its_label in zip(folds, labels, strict=True) if its_label == label]
        assert of_class == sorted(of_class)  # each fold is a run
        sizes = [of_class.count(fold) for fold in range(count)]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("count", [2, 5])
def test_no_group_is_in_two_folds(count):
    groups, labels = [f"patient {n // 4}" for n in range(80)], [n // 4 % 3 for n in range(80)]
    folds = assign_folds(labels, count, groups)
    assert folds == assign_folds(labels, count, groups)  # the same in every run
    assert len({*zip(groups, folds, strict=True)}) == len({*groups})
    assert {*zip(folds, labels, strict=True)} == {*product(range(count), range(3))}


def test_a_fraction_of_each_class_is_its_beginning():
    labels = [0] * 10 + [1] * 4 + [2]
    out = first_of_each(labels, 0.3)
    assert [n for n, held in enumerate(out) if held] == [0, 1, 2, 10]
    assert not any(first_of_each(labels, 0))
    assert all(first_of_each(labels, 1.0))
    groups = [f"{n // 3}" for n in range(30)]
    held = first_of_each([n // 3 % 2 for n in range(30)], 0.2, groups)
    assert sum(held) == 6 and len({*zip(groups, held, strict=True)}) == 10  # two of ten groups, with all they have


def test_too_few_groups():
    words = "^groups: 2 of them, expected 3 or more, one for each fold"
    refuses(lambda: assign_folds([0, 1, 0, 1], 3, ["a", "b", "a", "b"]), None, words)


def test_groups_of_a_table(tmp_path):
    (tmp_path / "clips.csv").write_text("path,patient\ntrain/a/1.mp4,7\ntrain/b/2.mp4,7\ntrain/b/3.mp4,\n")
    paths = [tmp_path / "train" / name for name in ("a/1.mp4", "b/2.mp4", "b/3.mp4", "b/4.mp4")]
    assert read_groups(tmp_path, "patient", paths) == ["7", "7", "train/b/3.mp4", "train/b/4.mp4"]


@pytest.mark.parametrize(
    "text, words",
    [
        (None, "cannot be read"),
        ("file\na\n", "has no column path, patient"),
        ("path,patient,patient\na,1,2\n", "has the column patient twice"),
    ],
)
def test_wrong_tables(tmp_path, text, words):
    if text is not None:
        (tmp_path / "clips.csv").write_text(text)
    refuses(lambda: read_groups(tmp_path, "patient", []), tmp_path / "clips.csv", words)
