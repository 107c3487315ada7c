"""Pictures of cases: the right way round, the right planes, the right colours."""

import os
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from ndlightnet.training.segmentation import case_figure as figures_module
from ndlightnet.training.segmentation.case_figure import (
    ERRORS,
    NAMED,
    best_slices,
    color_of,
    cut,
    error_of,
    legend_of,
    save_case,
)

NAMES = ["background", "_one", "two $x$", "three", "four"]
SPACING = (0.5, 2.0, 3.0)


def volume() -> tuple[torch.Tensor, torch.Tensor]:
    """An image of 100 x + 10 y + z, shape (10, 8, 6), and its labels, two of three at z=4."""
    x, y, z = torch.meshgrid(*(torch.arange(n) for n in (10, 8, 6)), indexing="ij")
    labels = torch.zeros(10, 8, 6, dtype=torch.long)
    labels[:2, :2, 1] = 3  # less, of a larger number
    labels[6:, 5:, 4], labels[9, 7, 4] = 1, 2
    return (100 * x + 10 * y + z).float(), labels


@pytest.fixture
def figures(monkeypatch) -> list[Figure]:
    saved: list[Figure] = []
    monkeypatch.setattr(figures_module, "save_figure", lambda figure, path: saved.append(figure))
    return saved


def panels(figure: Figure, columns: int) -> list[list]:
    return [figure.axes[i : i + columns] for i in range(0, len(figure.axes), columns)]


def test_planes_are_seen_as_radiologists_see_them():
    """RAS: x grows to the patient's right, y to the front, z to the head. Axial and coronal: right is left;
    sagittal: front is left; front or head are up."""
    corners = {2: (974, 74, 904, 4), 1: (945, 45, 940, 40), 0: (475, 405, 470, 400)}
    for axis, shape in ((2, (8, 10)), (1, (6, 10)), (0, (6, 8))):
        plane = cut(volume()[0].numpy(), axis, 4)
        assert plane.shape == shape
        assert (plane[0, 0], plane[0, -1], plane[-1, 0], plane[-1, -1]) == corners[axis]


def test_slices_are_those_that_show_the_labels_best():
    """Every class counts alike, however small: class 2, of one voxel, draws the planes to itself."""
    labels = volume()[1].numpy()
    assert best_slices(labels, 5) == [9, 7, 4]
    assert best_slices(labels * 0, 5) == [5, 4, 3]
    assert best_slices((labels == 3) * 3, 5) == [0, 0, 1]


def test_errors_are_told_apart():
    assert list(ERRORS) == ["false negative", "false positive", "wrong class"]
    truth, prediction = np.meshgrid(np.arange(3), np.arange(3), indexing="ij")
    assert error_of(truth, prediction).tolist() == [[0, 2, 2], [1, 0, 3], [1, 3, 0]]


def test_colours_are_fixed_and_21_of_them_differ():
    colors = np.array([color_of(n) for n in range(1, 118)])
    assert colors.min() >= 0 and colors.max() <= 1
    np.testing.assert_array_equal(colors[:21], colors[21:42])
    apart = np.abs(colors[:21, None] - colors[None, :21]).max(-1) + np.eye(21)
    assert apart.min() > 0.05


def test_the_legend_names_what_is_there_and_no_more_than_fits():
    names = [f"c{n}" for n in range(118)]
    few = np.zeros(118, int)
    few[[0, 3, 117]] = 1000, 1, 2
    assert [name for name, _ in legend_of(few, names)] == ["c3", "c117"]
    np.testing.assert_array_equal(legend_of(few, names)[1][1], color_of(117))
    many = np.arange(118)
    largest = [name for name, _ in legend_of(many, names)]
    assert largest == [f"c{n}" for n in range(107, 118)] + ["and 106 more"] and len(largest) == NAMED
    many[13:] = 0
    assert [name for name, _ in legend_of(many, names)] == names[1 : 1 + NAMED]


def test_panels_hold_image_truth_prediction_and_errors(figures):
    image, truth = volume()
    prediction = truth.roll(1, 0)
    save_case(Path("p.png"), "case: $5_", image, truth, prediction, SPACING, NAMES)
    assert figures[0].get_suptitle() == "case: $5_"
    rows = panels(figures[0], 4)
    assert len(rows) == 3
    size = [10 * 0.5, 8 * 2.0, 6 * 3.0]
    for row, axis, index in zip(rows, (2, 1, 0), (4, 7, 9), strict=True):
        cuts = [cut(v.numpy(), axis, index) for v in (image, truth, prediction)]
        across, up = (size[a] for a in range(3) if a != axis)
        for panel, labels in zip(row, (None, cuts[1], cuts[2], error_of(*cuts[1:])), strict=True):
            np.testing.assert_array_equal(panel.images[0].get_array(), cuts[0])
            assert all(i.get_extent() == [0, across, up, 0] for i in panel.images)
            assert panel.get_aspect() == 1  # a mm is a mm both ways
            assert len(panel.images) == 1 + (labels is not None)
            if labels is not None:
                np.testing.assert_array_equal(panel.images[1].get_array().filled(0), labels)
    labels = rows[0][1].images[1]
    for n in (1, 2):
        np.testing.assert_allclose(labels.to_rgba(n, alpha=1)[:3], color_of(n), atol=1e-6)
    heads = [panel.get_title() for panel in rows[0]]
    assert heads == ["", "truth", "prediction", "errors"]
    wheres = [(row[0].get_title(loc="left"), row[0].texts[0].get_text()) for row in rows]
    assert wheres == [("axial 5/6", "R"), ("coronal 8/8", "R"), ("sagittal 10/10", "A")]
    classes, errors = ([t.get_text().strip() for t in g.get_texts()] for g in figures[0].legends)
    assert classes == ["_one", "two $x$"] and errors == list(ERRORS)  # three lies elsewhere


def test_without_truth_the_prediction_chooses_the_planes(figures):
    image, labels = volume()
    save_case(Path("p.png"), "", image, None, labels.flip(2), SPACING, NAMES)
    rows = panels(figures[0], 2)
    np.testing.assert_array_equal(rows[0][1].images[0].get_array(), cut(image.numpy(), 2, 1))
    assert len(rows) == 3 and len(figures[0].legends) == 1
    empty = torch.zeros_like(labels)
    save_case(Path("p.png"), "", image, empty, labels.flip(2), SPACING, NAMES)
    assert panels(figures[1], 4)[0][0].get_title(loc="left") == "axial 2/6"


def test_of_a_single_slice_there_is_one_plane(figures):
    for axis in range(3):
        image, labels = (v.narrow(axis, 5, 1) for v in volume())
        save_case(Path("p.png"), "", image, labels, labels, SPACING, NAMES)
        assert len(figures[axis].axes) == 4
        np.testing.assert_array_equal(figures[axis].axes[0].images[0].get_array(), cut(image.numpy(), axis, 0))


@pytest.mark.parametrize("shape, classes", [((9, 7, 5), 118), ((300, 200, 1), 3), ((300, 7, 2), 3), ((5, 1, 1), 3)])
@pytest.mark.filterwarnings("error")
def test_pictures_have_a_size_to_look_at(tmp_path, shape, classes):
    image, truth, guess = torch.randn(shape), torch.randint(classes, shape), torch.randint(classes, shape)
    names = [f"a_class_of_a_very_long_name_number_{n}" for n in range(classes)]
    for name, labels in (("truth", truth), ("prediction", None)):
        path = tmp_path / name / "p.png"
        save_case(path, "case", image, labels, guess, (1.0, 1.0, 1.0), names)
        assert os.listdir(path.parent) == ["p.png"]
        picture = matplotlib.image.imread(path)
        high, wide = picture.shape[:2]
        # only a legend may make it wider than its panels
        assert 100 < high < 1500 and 500 < wide < 2000 and picture.std() > 0.03


def test_other_shapes_are_refused():
    image, labels = volume()
    with pytest.raises(ValueError, match=r"^prediction: expected .*\(10, 8, 6\), got \(10, 8, 5\)"):
        save_case(Path("p.png"), "", image, labels, labels[..., 1:], SPACING, NAMES)
