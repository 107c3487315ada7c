"""Pathfinder (Linsley et al., 2018, arXiv 1805.08315): does a dashed curve join two dots?

Each picture has two long curves that do not touch, and shorter ones. Two dots mark both ends of one long curve
("joined"), or an end of each ("apart"). In every picture there are two such pairs of ends that are alike in their
distance and in the directions in which the curves leave them, so that these say little: one pair is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.progress import track
from torch.utils.data import DataLoader, Dataset

from ndlightnet.data.made.drawn_set import draw_once

VERSION = 2  # of the pictures; to be raised when a change gives others for the same arguments
CLASSES = ("apart", "joined")
DASH, GAP, CLEAR = 2.5, 1.5, 3.0  # pixels: of a dash, between dashes, between curves
TURN = math.radians(35)  # most from dash to dash
SHORT = 3  # dashes of a shorter curve
ALIKE = 0.3  # most difference of two pairs' directions
PICTURES = 2000  # attempts at one
PLACES, TURNS = 20, 8  # tries of a curve, and of a dash of it
POINTS, FINE = 7, 4  # of a dash; cells of a pixel
ALONG = np.linspace(0, DASH, POINTS)[:, None]

Array = npt.NDArray[np.float64]


def make_pathfinder(
    folder: Path,
    train: int = 20000,
    test: int = 2000,
    size: int = 32,
    dashes: int = 7,
    others: int = 4,
    seed: int = 0,
    progress: bool = True,
    workers: int = 0,
) -> Path:
    """Write pictures of size x size pixels, `train/<class>/*.png` and `test/<class>/*.png`, half of each class up to a
    remainder; return `folder`. dashes: of a long curve. others: number of shorter curves. workers: processes that draw.
    The same arguments give the same pictures, and a set that exists is left as it is. DataError if the folder holds
    anything else; ValueError for fewer pictures than classes, and for curves that have no room."""
    if min(train, test) < len(CLASSES) or dashes < 2 or others < 0 or 2 * dashes * (DASH + GAP) > size * size / 16:
        sizes = f"{train=}, {test=}, {size=}, {dashes=}, {others=}"
        raise ValueError(f"{sizes}: expected 2 or more pictures and dashes, and a size with room for the curves")

    def draw(draft: Path) -> None:
        for split, count in (("train", train), ("test", test)):
            for name in CLASSES:
                (draft / split / name).mkdir(parents=True)
            written = DataLoader(
                _Pictures(draft / split, count, seed, (size, dashes, others)), None, num_workers=workers
            )
            for _ in track(written, f"drawing pathfinder, {split}", disable=not progress):
                pass

    record: dict[str, Any] = dict(kind="pathfinder", version=VERSION, train=train, test=test)
    return draw_once(folder, {**record, "size": size, "dashes": dashes, "others": others, "seed": seed}, draw)


@dataclass
class _Pictures(Dataset[int]):
    """Writes a picture when it is asked for its number, so that processes write as well; even numbers are apart."""

    folder: Path
    count: int
    seed: int
    sizes: tuple[int, int, int]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> int:
        from PIL import Image

        label, rng = number % 2, np.random.default_rng([self.seed, number, self.folder.name == "test"])
        picture = Image.fromarray(draw_picture(rng, bool(label), *self.sizes))
        picture.save(self.folder / CLASSES[label] / f"{number:06d}.png")
        return number


def draw_picture(rng: np.random.Generator, joined: bool, size: int, dashes: int, others: int) -> npt.NDArray[np.uint8]:
    """Draw one picture, (size, size)."""
    for _ in range(PICTURES):
        free = np.zeros((FINE * size, FINE * size), bool)
        edge = slice(round(FINE * 1.5), round(FINE * (size - 2.5)))
        free[edge, edge] = True
        curves = _curves(rng, size, [dashes] * 2, free)
        if len(curves) < 2:
            continue
        one, two = ([_End(curve[0], curve[1]), _End(curve[-1], curve[-2])] for curve in curves)
        alike = [(own, (a, b)) for own in (one, two) for a in one for b in two if _alike(own, (a, b), size)]
        if alike:
            own, across = alike[rng.integers(len(alike))]
            curves += _curves(rng, size, [SHORT] * others, free)
            first, second = own if joined else across
            return _paint(np.concatenate(curves), (first.at, second.at), size)
    raise ValueError(f"size={size}, dashes={dashes}: no picture in {PICTURES} attempts, expected room for two curves")


class _End(NamedTuple):
    """An end of a curve, and the point next to it."""

    at: Array
    next: Array


def _alike(one: Sequence[_End], two: Sequence[_End], size: int) -> bool:
    """Return whether two pairs of ends are as far apart, and their curves leave them in about the same directions, as
    seen along the line between them, from either side and end."""
    distances = [math.dist(a.at, b.at) for a, b in (one, two)]
    if abs(distances[0] - distances[1]) >= size / 32:
        return False
    first, second = _directions(*one), _directions(*two)
    views = [end * side for end in (first, first[::-1]) for side in ([1, 1], [1, -1])]
    return min(abs(view - second).max() for view in views) < ALIKE


def _directions(a: _End, b: _End) -> Array:
    """Return, of each end, how far its curve goes towards the other end, and to the side of the line from a to b, for a
    step of 1: (2, 2)."""
    line = (b.at - a.at) / math.dist(a.at, b.at)
    ways = [(end.next - end.at) / math.dist(end.next, end.at) for end in (a, b)]
    side = np.array([-line[1], line[0]])
    return np.array([[ways[0] @ line, ways[0] @ side], [-(ways[1] @ line), ways[1] @ side]])


def _curves(rng: np.random.Generator, size: int, lengths: list[int], free: npt.NDArray[np.bool_]) -> list[Array]:
    """Return curves of so many dashes, those that there was room for, as points (dashes * POINTS, 2); what is near them
    is no more free."""
    curves: list[Array] = []
    for length in lengths:
        curve = _curve(rng, size, length, free)
        if curve is not None:
            curves.append(curve)
            free &= ~_around(curve, size)
    return curves


def _curve(rng: np.random.Generator, size: int, length: int, free: npt.NDArray[np.bool_]) -> Array | None:
    """Walk dash by dash where it is free, clear of the curve's own earlier dashes, from PLACES at once: the first
    curve that gets to its end, None if there is none."""
    at, angle = rng.uniform(2, size - 3, (PLACES, 2)), rng.uniform(0, 2 * math.pi, PLACES)
    curves = np.zeros((PLACES, 0, 2))
    for _ in range(length):
        walks = np.arange(len(at))
        angles = angle[:, None] + rng.uniform(-TURN, TURN, (len(at), TURNS))
        steps = np.stack([np.sin(angles), np.cos(angles)], -1)
        points = at[:, None, None] + ALONG * steps[:, :, None]  # (walks, turns, points, 2)
        cells = (FINE * points).round().astype(int).clip(0, len(free) - 1)
        fits = free[cells[..., 0], cells[..., 1]].all(2)
        if curves.shape[1] > POINTS:
            gaps = points[:, :, ::3, None] - curves[:, None, None, :-POINTS:3]  # of every third point
            fits &= (gaps * gaps).sum(-1).min((2, 3)) >= CLEAR * CLEAR
        first = fits.argmax(1)
        walks = walks[fits[walks, first]]
        if not len(walks):
            return None
        dash, step = points[walks, first[walks]], steps[walks, first[walks]]
        curves = np.concatenate([curves[walks], dash], 1)
        at, angle = dash[:, -1] + GAP * step, angles[walks, first[walks]]
    return np.asarray(curves[0])


def _around(curve: Array, size: int) -> npt.NDArray[np.bool_]:
    """Return the fine cells (FINE size, FINE size) within CLEAR of a curve."""
    near, reach = np.zeros((FINE * size, FINE * size), bool), math.ceil(FINE * CLEAR)
    disc = np.hypot(*np.mgrid[-reach : reach + 1, -reach : reach + 1]) <= FINE * CLEAR
    for row, column in (FINE * curve).round().astype(int):
        top, left = max(0, row - reach), max(0, column - reach)
        window = near[top : row + reach + 1, left : column + reach + 1]
        window |= disc[top - row + reach :, left - column + reach :][: window.shape[0], : window.shape[1]]
    return near


def _paint(curves: Array, dots: tuple[Array, Array], size: int) -> npt.NDArray[np.uint8]:
    rows = np.moveaxis(np.mgrid[:size, :size].astype(float), 0, -1)
    ends = curves.reshape(-1, POINTS, 2)[:, [0, -1]]
    start, way = ends[:, 0], ends[:, 1] - ends[:, 0]
    along = ((rows[:, :, None] - start) * way).sum(-1) / (way * way).sum(-1)
    near = np.linalg.norm(rows[:, :, None] - start - along.clip(0, 1)[..., None] * way, axis=-1).min(2)
    ink = (1.1 - near).clip(0, 1)
    for dot in dots:
        ink = np.maximum(ink, (2.2 - np.linalg.norm(rows - dot, axis=-1)).clip(0, 1))
    return np.asarray((ink * 255).round().astype(np.uint8))
