"""Made shapes: points on the surfaces of ellipsoids, boxes, cylinders, cones and tori, of any proportions, turned."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ndlightnet.data.made.drawn_set import draw_once

VERSION = 1  # of the shapes; to be raised when a change gives others for the same arguments
Array = NDArray[np.float64]


def _ellipsoid(rng: np.random.Generator, count: int) -> Array:
    points = rng.normal(size=(count, 3))
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def _box(rng: np.random.Generator, count: int) -> Array:
    points = rng.uniform(-1, 1, (count, 3))
    points[np.arange(count), rng.integers(3, size=count)] = rng.choice([-1.0, 1.0], count)
    return points


def _round(rng: np.random.Generator, radius: Array, height: Array) -> Array:
    angle = rng.uniform(0, 2 * math.pi, len(radius))
    return np.stack([radius * np.cos(angle), radius * np.sin(angle), height], 1)


def _cylinder(rng: np.random.Generator, count: int) -> Array:
    """A third of the points at both ends, which have a third of the area."""
    cap = rng.random(count) < 1 / 3
    radius = np.where(cap, np.sqrt(rng.random(count)), 1)
    return _round(rng, radius, np.where(cap, rng.choice([-1.0, 1.0], count), rng.uniform(-1, 1, count)))


def _cone(rng: np.random.Generator, count: int) -> Array:
    base = rng.random(count) < 1 / (1 + math.sqrt(5))  # the side has sqrt(5) times the area
    radius = np.sqrt(rng.random(count))
    return _round(rng, radius, np.where(base, -1, 1 - 2 * radius))


def _torus(rng: np.random.Generator, count: int) -> Array:
    """Points are denser within the ring than outside it, by the angle around the tube being uniform."""
    tube = rng.uniform(0, 2 * math.pi, count)
    return _round(rng, 1 + 0.35 * np.cos(tube), 0.35 * np.sin(tube))


SHAPES: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "box": _box,
    "cone": _cone,
    "cylinder": _cylinder,
    "ellipsoid": _ellipsoid,
    "torus": _torus,
}


def make_shapes(folder: Path, train: int = 1000, test: int = 200, points: int = 1024, seed: int = 0) -> Path:
    """Write clouds of so many points as `train/SHAPE/*.npy` and `test/SHAPE/*.npy`, float32, as many of each shape up
    to a remainder; return `folder`. The same arguments give the same clouds, and a set that exists is left as it is.
    DataError if the folder holds anything else; ValueError for fewer clouds than shapes, and for no points."""
    if min(train, test) < len(SHAPES) or points < 1:
        raise ValueError(f"{train=}, {test=}, {points=}: expected {len(SHAPES)} or more of either, and a point or more")

    def draw(draft: Path) -> None:
        for split, count in (("train", train), ("test", test)):
            for number in range(count):
                name = [*SHAPES][number % len(SHAPES)]
                rng = np.random.default_rng([seed, number, split == "test"])
                path = draft / split / name / f"{number:05d}.npy"
                path.parent.mkdir(parents=True, exist_ok=True)
                np.save(path, draw_shape(rng, name, points).astype(np.float32))

    record = dict(kind="shapes", version=VERSION, train=train, test=test, points=points, seed=seed)
    return draw_once(folder, record, draw)


def draw_shape(rng: np.random.Generator, name: str, points: int) -> Array:
    """Draw a cloud (points, 3) on the surface of a shape of SHAPES: stretched by 0.5 to 1 along each axis, then turned
    any way. After stretching points are no more of the same density everywhere."""
    turn, upper = np.linalg.qr(rng.normal(size=(3, 3)))
    return SHAPES[name](rng, points) * rng.uniform(0.5, 1, 3) @ (turn * np.sign(np.diag(upper)))
