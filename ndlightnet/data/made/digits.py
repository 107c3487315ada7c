"""Moving digits and coloured digits: a small set of videos and one of images, made on this machine from scikit-learn's
handwritten digits (8 x 8 pixels).

The classes of the videos are motions only. A digit moves over a soft background. One frame says nothing about the
class: digit, colours, background, position and speed are drawn independently of it. Positions are uniform on a torus
(what leaves on one side comes in on the other), and moving a uniform position along any path leaves it uniform, so in
every frame of every class all positions are equally likely. Each frame is encoded separately, so that the codec leaks
no motion into it.
"""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ndlightnet.data.errors import DataError
from ndlightnet.data.made.drawn_set import draw_once
from ndlightnet.data.media import write_video

MOTIONS = ("anticlockwise", "clockwise", "down", "left", "right", "up")
DIGITS = tuple("0123456789")
VERSION = 1  # of the files; to be raised when a change gives other pixels for the same arguments
TEST_SOURCES = 297  # of the 1797 images of digits; the others are for train
FPS = 12

Array = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]


def make_moving_digits(
    folder: Path,
    train: int = 480,
    test: int = 120,
    frames: int = 16,
    size: int = 40,
    seed: int = 0,
    progress: bool = True,
) -> Path:
    """Write `train` and `test` clips of `frames` frames of size x size pixels; return `folder`.

    The files are `train/<motion>/*.mp4` and `test/<motion>/*.mp4` (H.264), equally many of each motion up to a
    remainder; a name ends in the number of the source image, and no source is in both. The same arguments give the same
    clips, and a set that exists is left as it is. The folder appears when all is written. DataError if it holds
    anything else; ValueError for fewer clips than motions, fewer than 2 frames, or a size that is odd or under 24.
    """
    if min(train, test) < len(MOTIONS) or frames < 2 or size < 24 or size % 2:
        raise ValueError(
            f"at least {len(MOTIONS)} clips in train and test, 2 frames, and an even size from 24 expected, "
            f"got {train=}, {test=}, {frames=}, {size=}"
        )

    def draw(split: Path, number: int, rng: np.random.Generator) -> None:
        images, _, sources = _sources(seed)
        motion = MOTIONS[number % len(MOTIONS)]
        source = int(rng.choice(sources[split.name]))
        pictures = _draw(images[source], _path(motion, frames, size, rng), size, rng, size * 9 // 20)
        write_video(_file(split, motion, number, source, "mp4"), pictures, FPS)

    record = dict(kind="moving digits", version=VERSION, train=train, test=test, frames=frames, size=size, seed=seed)
    return _draw_files(folder, record, draw, progress)


def make_coloured_digits(
    folder: Path, train: int = 3000, test: int = 500, size: int = 32, seed: int = 0, progress: bool = True
) -> Path:
    """Write `train` and `test` pictures of size x size pixels; return `folder`.

    The files are `train/<digit>/*.png` and `test/<digit>/*.png`, equally many of each digit up to a remainder. Colours,
    texture, place and size of the digit are drawn independently of its class. Names, sources, a set that exists, and
    errors are as those of `make_moving_digits`.
    """
    from PIL import Image

    if min(train, test) < len(DIGITS) or size < 16:
        raise ValueError(
            f"at least {len(DIGITS)} pictures in train and test, and a size from 16 expected, "
            f"got {train=}, {test=}, {size=}"
        )

    def draw(split: Path, number: int, rng: np.random.Generator) -> None:
        images, labels, sources = _sources(seed)
        digit = number % len(DIGITS)
        source = int(rng.choice([n for n in sources[split.name] if labels[n] == digit]))
        glyph = int(rng.integers(size * 5 // 8, size * 7 // 8 + 1))
        middle = size / 2 + rng.uniform(-1, 1, (1, 2)) * (size - glyph) / 2
        picture = _draw(images[source], middle, size, rng, glyph)[0]
        Image.fromarray(picture).save(_file(split, DIGITS[digit], number, source, "png"))

    record = dict(kind="coloured digits", version=VERSION, train=train, test=test, size=size, seed=seed)
    return _draw_files(folder, record, draw, progress)


def still_digits(size: int) -> dict[str, tuple[npt.NDArray[np.uint8], Labels]]:
    """Return images (n, size, size), grey, and labels (n,) of "train", 1,500 digits, and "test", the 297 others. The
    images have 8 x 8 pixels and are enlarged; DataError for a smaller size."""
    if size < 8:
        raise DataError(f"data.size={size}: expected 8 or more pixels")
    images, labels, sources = _sources(0)
    pixels = (np.stack([_smooth(image, size) for image in images]) * 255).round().astype(np.uint8)
    return {split: (pixels[numbers], labels[numbers]) for split, numbers in sources.items()}


@cache
def _sources(seed: int) -> tuple[Array, Labels, dict[str, Labels]]:
    """Return the images of digits, (1797, 8, 8) in [0, 1], the digit of each, (1797,), and the numbers of those for
    train and for test."""
    from sklearn.datasets import load_digits

    sources = load_digits()
    order = np.random.default_rng(seed).permutation(len(sources.images))
    splits = {"train": order[TEST_SOURCES:], "test": order[:TEST_SOURCES]}
    return sources.images / 16, sources.target.astype(np.int64), splits


def _draw_files(
    folder: Path, record: dict[str, Any], draw: Callable[[Path, int, np.random.Generator], None], progress: bool
) -> Path:
    """Draw the files of a set, each from draws of its own: draw(folder of the split, number of the file, draws)."""
    from rich.progress import track

    def draw_splits(draft: Path) -> None:
        for split in ("train", "test"):
            title = f"drawing {record['kind']}, {split}"
            for number in track(range(record[split]), title, disable=not progress):
                draw(draft / split, number, np.random.default_rng([record["seed"], number, split == "test"]))

    return draw_once(folder, record, draw_splits)


def _file(split: Path, kind: str, number: int, source: int, ending: str) -> Path:
    path = split / kind / f"{number:05d}-source{source:04d}.{ending}"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _path(motion: str, frames: int, size: int, rng: np.random.Generator) -> Array:
    """Return the digit's centres (frames, 2), row and column in pixels, to be taken modulo size."""
    start = rng.uniform(0, size, 2)
    speed = rng.uniform(0.03, 0.06) * size  # pixels a frame, for every motion
    radius = rng.uniform(0.13, 0.2) * size
    angle = rng.uniform(0, 2 * math.pi)
    way = speed * np.arange(frames)
    straight = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
    if motion in straight:
        return np.asarray(start + way[:, None] * np.array(straight[motion]))
    sense = 1 if motion == "clockwise" else -1  # rows count downwards: a growing angle is clockwise
    turned = angle + sense * way / radius
    return np.asarray(start + radius * np.stack([np.sin(turned), np.cos(turned)], axis=1))


def _draw(image: Array, path: Array, size: int, rng: np.random.Generator, glyph: int) -> npt.NDArray[np.uint8]:
    """Return the frames of one clip, (frames, size, size, 3); the digit is `glyph` pixels high."""
    stamp = np.zeros((size, size))
    stamp[:glyph, :glyph] = _smooth(image, glyph)
    # A shift by fractions of a pixel on the torus multiplies each Fourier mode by a phase.
    wave = np.fft.fftfreq(size)
    rows, columns = (path - glyph / 2).T[:, :, None, None]
    shift = np.exp(-2j * np.pi * (rows * wave[:, None] + columns * wave))
    ink = np.fft.ifft2(np.fft.fft2(stamp) * shift).real.clip(0, 1)[..., None]

    hue, ground_hue = rng.uniform(0, 1, 2)
    texture = _smooth(rng.uniform(0, 1, (5, 5)), size)[..., None]
    ground = texture * _colour(ground_hue, 0.42) + (1 - texture) * _colour(ground_hue + 0.2, 0.16)
    picture = ground + ink * (_colour(hue, 1.0) - ground)
    picture = picture + rng.normal(0, 0.015, picture.shape)
    return (picture.clip(0, 1) * 255).round().astype(np.uint8)


def _smooth(image: Array, size: int) -> Array:
    """Return a square image enlarged to size x size, bicubic, clamped to [0, 1]."""
    import torch
    from torch.nn.functional import interpolate

    large = interpolate(torch.from_numpy(image)[None, None], size=(size, size), mode="bicubic")
    return np.asarray(large[0, 0].clamp(0, 1).numpy())


def _colour(hue: float, value: float) -> Array:
    """Return a soft colour, (3,) in [0, 1]: `hue` a fraction of the circle, `value` lightness."""
    circle = np.cos(2 * math.pi * (hue - np.arange(3) / 3))
    return np.asarray(value * (0.75 + 0.25 * circle))
