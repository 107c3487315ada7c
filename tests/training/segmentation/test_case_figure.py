"""Pictures of cases: the right way round, the right planes, the right colours."""

import os
from pathlib import Path

import matplotlib.image
import nibabel
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
from tests.data.volume.files import real

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
def drawn(monkeypatch) -> list[Figure]:
    figures: list[Figure] = []
    monkeypatch.setattr(figures_module, "save_figure", lambda figure, path: figures.append(figure))
    return figures


def panels(figure: Figure, columns: int) -> list[list]:
    return [figure.axes[i : i + columns] for i in range(0, len(figure.axes), columns)]


@pytest.mark.parametrize(
    "axis, shape, corners",
    [
        (2, (8, 10), (974, 74, 904, 4)),  # axial: right is left, front is up
        (1, (6, 10), (945, 45, 940, 40)),  # coronal: right is left, head is up
        (0, (6, 8), (475, 405, 470, 400)),  # sagittal: front is left, head is up
    ],
)
def test_planes_are_seen_as_radiologists_see_them(axis, shape, corners):
    """RAS: x grows to the patient's right, y to the front, z to the head."""
    plane = cut(volume()[0].numpy(), axis, 4)
    assert plane.shape == shape
    assert (plane[0, 0], plane[0, -1], plane[-1, 0], plane[-1, -1]) == corners


def test_slices_are_those_that_show_the_labels_best():
    """Every class counts alike, however small: brute force over planes."""
    labels = volume()[1].numpy()
    wanted = []
    for axis in range(3):
        areas = np.array(
            [[(np.take(labels, i, axis) == n).sum() for n in (1, 2, 3)] for i in range(labels.shape[axis])]
        )
        wanted.append(int((areas / areas.max(0)).sum(1).argmax()))
    assert best_slices(labels, 5) == wanted == [9, 7, 4]
    assert best_slices(labels * 0, 5) == [5, 4, 3]
    assert best_slices((labels == 3) * 3, 5) == [0, 0, 1]


def test_errors_are_told_apart():
    truth, prediction = np.meshgrid(np.arange(4), np.arange(4), indexing="ij")
    for t, p, kind in zip(truth.flat, prediction.flat, error_of(truth, prediction).flat, strict=True):
        wanted = None if t == p else "false positive" if not t else "false negative"
        wanted = "wrong class" if t and p and t != p else wanted
        assert kind == (0 if wanted is None else 1 + list(ERRORS).index(wanted)), (t, p)


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
    found = [name for name, _ in legend_of(many, names)]
    assert found == [f"c{n}" for n in range(107, 118)] + ["and 106 more"] and len(found) == NAMED
    many[13:] = 0
    assert [name for name, _ in legend_of(many, names)] == names[1 : 1 + NAMED]


def test_panels_hold_image_truth_prediction_and_errors(drawn):
    image, truth = volume()
    prediction = truth.roll(1, 0)
    save_case(Path("p.png"), "case: $5_", image, truth, prediction, SPACING, NAMES)
    assert drawn[0].get_suptitle() == "case: $5_"
    rows = panels(drawn[0], 4)
    assert len(rows) == 3
    size = [10 * 0.5, 8 * 2.0, 6 * 3.0]
    for row, axis, index in zip(rows, (2, 1, 0), (4, 7, 9), strict=True):
        cuts = [cut(v.numpy(), axis, index) for v in (image, truth, prediction)]
        across, up = (size[a] for a in range(3) if a != axis)
        for panel, shown in zip(row, (None, cuts[1], cuts[2], error_of(*cuts[1:])), strict=True):
            np.testing.assert_array_equal(panel.images[0].get_array(), cuts[0])
            assert all(i.get_extent() == [0, across, up, 0] for i in panel.images)
            assert panel.get_aspect() == 1  # a mm is a mm both ways
            assert len(panel.images) == 1 + (shown is not None)
            if shown is not None:
                np.testing.assert_array_equal(panel.images[1].get_array().filled(0), shown)
    labels = rows[0][1].images[1]
    for n in (1, 2):
        np.testing.assert_allclose(labels.to_rgba(n, alpha=1)[:3], color_of(n), atol=1e-6)
    heads = [panel.get_title() for panel in rows[0]]
    assert heads == ["", "truth", "prediction", "errors"]
    wheres = [(row[0].get_title(loc="left"), row[0].texts[0].get_text()) for row in rows]
    assert wheres == [("axial 5/6", "R"), ("coronal 8/8", "R"), ("sagittal 10/10", "A")]
    classes, errors = ([t.get_text().strip() for t in g.get_texts()] for g in drawn[0].legends)
    assert classes == ["_one", "two $x$"] and errors == list(ERRORS)  # three lies elsewhere


@pytest.mark.slow
def test_without_truth_the_prediction_chooses_the_planes(drawn):
    image, labels = volume()
    save_case(Path("p.png"), "", image, None, labels.flip(2), SPACING, NAMES)
    rows = panels(drawn[0], 2)
    np.testing.assert_array_equal(rows[0][1].images[0].get_array(), cut(image.numpy(), 2, 1))
    assert len(rows) == 3 and len(drawn[0].legends) == 1
    empty = torch.zeros_like(labels)
    save_case(Path("p.png"), "", image, empty, labels.flip(2), SPACING, NAMES)
    assert panels(drawn[1], 4)[0][0].get_title(loc="left") == "axial 2/6"


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_of_a_single_slice_there_is_one_plane(drawn, axis):
    image, labels = (v.narrow(axis, 5, 1) for v in volume())
    save_case(Path("p.png"), "", image, labels, labels, SPACING, NAMES)
    assert len(drawn[0].axes) == 4
    plane = panels(drawn[0], 4)[0][0].images[0].get_array()
    np.testing.assert_array_equal(plane, cut(image.numpy(), axis, 0))


@pytest.mark.parametrize(
    "shape, classes", [((9, 7, 5), 118), ((300, 200, 1), 3), ((5, 4, 300), 3), ((300, 7, 2), 3), ((5, 1, 1), 3)]
)
@pytest.mark.filterwarnings("error")
def test_pictures_have_a_size_to_look_at(tmp_path, shape, classes):
    random = torch.Generator().manual_seed(0)
    image = torch.randn(shape, generator=random)
    truth, guess = (torch.randint(classes, shape, generator=random) for _ in range(2))
    names = [f"a_class_of_a_very_long_name_number_{n}" for n in range(classes)]
    for name, known in (("known", truth), ("unknown", None)):
        path = tmp_path / name / "p.png"
        save_case(path, "case", image, known, guess, (1.0, 1.0, 1.0), names)
        assert os.listdir(path.parent) == ["p.png"]
        picture = matplotlib.image.imread(path)
        high, wide = picture.shape[:2]
        # only a legend may make it wider than its panels
        assert 100 < high < 1500 and 500 < wide < 2000 and picture.std() > 0.03


def test_a_real_case_shows_its_errors_in_the_last_column(tmp_path):
    image = nibabel.load(real("hippocampus", "images", "hippocampus_001.nii.gz"))
    label = nibabel.load(real("hippocampus", "labels", "hippocampus_001.nii.gz"))
    voxels, truth = (torch.from_numpy(np.asarray(v.dataobj).astype(int)) for v in (image, label))
    names = ["background", "anterior", "posterior"]
    pictures = []
    for name, guess in (("same", truth), ("shifted", truth.roll(2, 0))):
        path = tmp_path / f"{name}.png"
        save_case(path, "case", voxels, truth, guess, (1.0, 1.0, 1.0), names)
        pictures.append(matplotlib.image.imread(path)[..., :3])
    assert pictures[0].shape == pictures[1].shape
    changed = (np.abs(pictures[0] - pictures[1]).max(-1) > 0.1).mean(0)
    quarters = [float(part.mean()) for part in np.array_split(changed, 4)]
    assert quarters[0] == quarters[1] == 0 and min(quarters[2:]) > 0.01


def test_other_shapes_are_refused():
    image, labels = volume()
    with pytest.raises(ValueError, match=r"^prediction: expected .*\(10, 8, 6\), got \(10, 8, 5\)"):
        save_case(Path("p.png"), "", image, labels, labels[..., 1:], SPACING, NAMES)
