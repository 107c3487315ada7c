"""Parts of training samples: even, and without a group in two of them."""

import csv
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndlightnet.data.errors import DataError
from ndlightnet.data.fold_assignment import assign_folds, first_of_each, read_groups


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 7))
def test_neighbours_stay_together_and_classes_are_even(labels, count):
    found = assign_folds(labels, count)
    assert len(found) == len(labels) and {*found} <= {*range(count)}
    for label in set(labels):
        own = [part for part, other in zip(found, labels, strict=True) if other == label]
        assert own == sorted(own)  # each part is a run
        sizes = Counter(own)
        assert max(sizes.values()) - min(sizes[part] for part in range(count)) <= 1


@pytest.mark.parametrize("count", [2, 5])
def test_no_group_is_in_two_folds(count):
    groups = [f"patient {n // 4}" for n in range(80)]
    labels = [n // 4 % 3 for n in range(80)]
    found = assign_folds(labels, count, groups)
    assert {*found} == {*range(count)}
    of = {group: {p for p, g in zip(found, groups, strict=True) if g == group} for group in groups}
    assert all(len(own) == 1 for own in of.values())
    assert assign_folds(labels, count, groups) == found  # the same in every run
    for part in range(count):
        own = Counter(label for label, p in zip(labels, found, strict=True) if p == part)
        assert all(own[label] > 0 for label in range(3))


def test_a_fraction_of_each_class_is_its_beginning():
    labels = [0] * 10 + [1] * 4 + [2]
    out = first_of_each(labels, 0.3)
    assert [n for n, held in enumerate(out) if held] == [0, 1, 2, 10]
    assert not any(first_of_each(labels, 0))
    assert all(first_of_each(labels, 1.0))
    groups = [f"{n // 3}" for n in range(30)]
    held = first_of_each([n // 3 % 2 for n in range(30)], 0.2, groups)
    of = {g for g, own in zip(groups, held, strict=True) if own}
    assert sum(held) == 3 * len(of) == 6  # two of ten groups, whole


def test_too_few_groups():
    with pytest.raises(DataError, match="groups: 2 of them, expected 3 or more, one for each fold"):
        assign_folds([0, 1, 0, 1], 3, ["a", "b", "a", "b"])


def table(root: Path, *rows: dict[str, str]) -> None:
    with (root / "clips.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_groups_of_a_table(tmp_path):
    table(
        tmp_path,
        {"path": "train/a/1.mp4", "patient": "7"},
        {"path": "train/b/2.mp4", "patient": "7"},
        {"path": "train/b/3.mp4", "patient": ""},
    )
    paths = [tmp_path / "train" / name for name in ("a/1.mp4", "b/2.mp4", "b/3.mp4", "b/4.mp4")]
    found = read_groups(tmp_path, "patient", paths)
    assert found == ["7", "7", "train/b/3.mp4", "train/b/4.mp4"]


def test_wrong_tables(tmp_path):
    with pytest.raises(DataError, match=r"clips\.csv: "):
        read_groups(tmp_path, "patient", [])
    table(tmp_path, {"file": "a"})
    with pytest.raises(DataError, match=r"clips\.csv: has no column path, patient"):
        read_groups(tmp_path, "patient", [])
    (tmp_path / "clips.csv").write_text("path,patient,patient\na,1,2\n")
    with pytest.raises(DataError, match=r"clips\.csv: has the column patient twice"):
        read_groups(tmp_path, "patient", [])
