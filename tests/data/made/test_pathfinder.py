"""Pathfinder: dots lie on the ends of one curve or of two, curves do not touch, and the dots alone say little."""

import itertools

import numpy as np
import pytest
from PIL import Image
from scipy.spatial.distance import cdist
from scipy.stats import ks_2samp

from ndlightnet.data.errors import DataError
from ndlightnet.data.made import pathfinder
from ndlightnet.data.made.pathfinder import CLEAR, FINE, POINTS, SHORT, draw_picture, make_pathfinder


@pytest.fixture(scope="module")
def drawn():
    """Of 120 pictures: whether the dots are joined, curves and dots."""
    plans = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pathfinder, "_paint", lambda curves, dots, size: plans.append((curves, dots)))
        for number in range(120):
            draw_picture(np.random.default_rng(number), number % 2 == 1, 32, 7, 3)
    return [(number % 2 == 1, *plan) for number, plan in enumerate(plans)]


def split(curves):
    """Two curves of 7 dashes, then shorter ones."""
    long = 7 * POINTS
    short = curves[2 * long :].reshape(-1, SHORT * POINTS, 2)
    return [curves[:long], curves[long : 2 * long], *short]


def test_dots_are_ends_of_one_curve_or_of_two(drawn):
    for joined, curves, dots in drawn:
        ends = [{tuple(curve[0]), tuple(curve[-1])} for curve in split(curves)[:2]]
        where = [next(i for i, pair in enumerate(ends) if tuple(dot) in pair) for dot in dots]
        assert (where[0] == where[1]) == joined and tuple(dots[0]) != tuple(dots[1])


def test_curves_are_apart_and_inside(drawn):
    numbers = {len(split(curves)) for _, curves, _ in drawn}
    assert max(numbers) == 5 and min(numbers) >= 3
    for _, curves, _ in drawn:
        assert curves.min() > 1 and curves.max() < 30
        for one, two in itertools.combinations(split(curves), 2):
            assert cdist(one, two).min() > CLEAR - 2**0.5 / FINE  # by cells, rounded twice


def test_the_distance_of_the_dots_says_nothing(drawn):
    joined, apart = ([np.linalg.norm(a - b) for label, _, (a, b) in drawn if label == which] for which in (True, False))
    assert ks_2samp(joined, apart).pvalue > 0.01


def test_the_directions_of_the_curves_at_the_dots_say_little(drawn):
    """Of both dots, how far the curve goes towards the other dot: the smaller one."""
    away = {True: [], False: []}
    for joined, curves, dots in drawn:
        cosines = []
        for dot, goal in (dots, dots[::-1]):
            curve = next(curve for curve in split(curves)[:2] if (dot == curve[[0, -1]]).all(1).any())
            near = curve[1] if (dot == curve[0]).all() else curve[-2]
            ways = near - dot, goal - dot
            cosines.append(ways[0] @ ways[1] / np.linalg.norm(ways[0]) / np.linalg.norm(ways[1]))
        away[joined].append(min(cosines))
    assert ks_2samp(away[True], away[False]).pvalue > 0.01


def test_pictures_are_made_once(tmp_path):
    sets = [make_pathfinder(tmp_path / str(n), 5, 2, 24, 4, 2, progress=False, workers=n) for n in range(2)]
    names = sorted(path.relative_to(sets[0]) for path in sets[0].rglob("*.png"))
    assert [
        sum(name.parts[:2] == (split, label) for name in names)
        for split in ("train", "test")
        for label in ("apart", "joined")
    ] == [3, 2, 1, 1]
    for name in names:
        pixels = [np.asarray(Image.open(folder / name)) for folder in sets]
        assert (pixels[0] == pixels[1]).all() and pixels[0].shape == (24, 24) and pixels[0].max() == 255
    assert make_pathfinder(sets[0], 5, 2, 24, 4, 2) == sets[0]
    with pytest.raises(DataError, match="drawn with other arguments"):
        make_pathfinder(sets[0], 5, 2, 24, 4, 3)
    for wrong in ({"train": 1}, {"dashes": 1}, {"dashes": 30}):
        with pytest.raises(ValueError, match="expected 2 or more pictures and dashes, and a size with room"):
            make_pathfinder(tmp_path / "none", **wrong)
