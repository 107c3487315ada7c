"""Moving digits: a small video set made on this machine, whose classes are motions only.

A handwritten digit (scikit-learn's 8x8 images) moves over a soft background. One frame says nothing
about the class: digit, colours, background, position and speed are drawn independently of it.
Positions are uniform on a torus (what leaves on one side comes in on the other), and moving a
uniform position along any path leaves it uniform, so in every frame of every class all positions
are equally likely. Each frame is encoded separately, so that the codec leaks no motion into it.
"""

import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from ndlightnet.data.errors import DataError

MOTIONS = ("anticlockwise", "clockwise", "down", "left", "right", "up")
VERSION = 1  # of the clips; to be raised when a change gives other pixels for the same arguments
RECORD = "digits.json"  # the arguments of a finished set
TEST_SOURCES = 297  # of the 1797 images of digits; the others are for train
FPS = 12

Array = npt.NDArray[np.float64]


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

    The files are `train/<motion>/*.mp4` and `test/<motion>/*.mp4` (H.264), equally many of each
    motion up to a remainder; a name ends in the number of the source image, and no source is in
    both. The same arguments give the same clips, and a set that exists is left as it is. The folder
    appears when all is written. DataError if it holds anything else; ValueError for
    fewer clips than motions, fewer than 2 frames, or a size that is odd or under 24.
    """
    from rich.progress import track

    if min(train, test) < len(MOTIONS) or frames < 2 or size < 24 or size % 2:
        raise ValueError(
            f"at least {len(MOTIONS)} clips in train and test, 2 frames, and an even size from 24 "
            f"wanted, got {train=}, {test=}, {frames=}, {size=}"
        )
    folder = Path(folder)
    record = dict(version=VERSION, train=train, test=test, frames=frames, size=size, seed=seed)
    if _holds(folder, record):
        return folder
    images = _source_images()
    order = np.random.default_rng(seed).permutation(len(images))
    sources = {"train": order[TEST_SOURCES:], "test": order[:TEST_SOURCES]}
    jobs = [("train", number) for number in range(train)]
    jobs += [("test", number) for number in range(test)]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        made = Path(scratch) / "digits"
        for split, number in track(jobs, "drawing moving digits", disable=not progress):
            motion = MOTIONS[number % len(MOTIONS)]
            rng = np.random.default_rng([seed, number, split == "test"])
            source = int(rng.choice(sources[split]))
            path = made / split / motion / f"{number:05d}-source{source:04d}.mp4"
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, _draw(images[source], _path(motion, frames, size, rng), size, rng))
        (made / RECORD).write_text(json.dumps(record))
        if not _holds(folder, record):  # another process may have been quicker
            made.rename(folder)
    return folder


def _holds(folder: Path, record: dict[str, int]) -> bool:
    """Return whether the set exists: False for no folder or an empty one, DataError for others."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        found = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: holds something else than moving digits") from error
    if found != record:
        raise DataError(f"{folder}: holds moving digits made with other arguments: {found}")
    return True


def _source_images() -> Array:
    """Return the images of digits, (1797, 8, 8) in [0, 1]."""
    from sklearn.datasets import load_digits

    images: Array = load_digits().images / 16
    return images


def still_digits(size: int) -> dict[str, tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]]:
    """Return images (n, size, size), grey, and labels (n,) of "train", 1,500 digits, and "test",
    the 297 others. The images have 8 x 8 pixels and are enlarged; DataError for a smaller size."""
    from sklearn.datasets import load_digits

    if size < 8:
        raise DataError(f"data.size={size}: expected 8 or more pixels")
    images = np.stack([_smooth(image, size) for image in _source_images()])
    pixels, labels = (images * 255).round().astype(np.uint8), load_digits().target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    parts = {"train": order[TEST_SOURCES:], "test": order[:TEST_SOURCES]}
    return {part: (pixels[numbers], labels[numbers]) for part, numbers in parts.items()}


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


def _draw(image: Array, path: Array, size: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Return the frames of one clip, (frames, size, size, 3)."""
    glyph = size * 9 // 20
    stamp = np.zeros((size, size))
    stamp[:glyph, :glyph] = _smooth(image, glyph)
    # A shift by fractions of a pixel on the torus multiplies each Fourier mode by a phase.
    wave = np.fft.fftfreq(size)
    rows, columns = (path - glyph / 2).T[:, :, None, None]
    shift = np.exp(-2j * np.pi * (rows * wave[:, None] + columns * wave))
    ink = np.fft.ifft2(np.fft.fft2(stamp) * shift).real.clip(0, 1)[..., None]

    hue, other = rng.uniform(0, 1, 2)
    texture = _smooth(rng.uniform(0, 1, (5, 5)), size)[..., None]
    ground = texture * _colour(other, 0.42) + (1 - texture) * _colour(other + 0.2, 0.16)
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


def _write(path: Path, pictures: npt.NDArray[np.uint8]) -> None:
    """Write (frames, height, width, 3) as an H.264 file in which every frame is a key frame."""
    import av

    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=FPS)
        stream.height, stream.width = pictures.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.thread_count = 1
        # One quantiser for all frames: rate control would depend on the frames that come next.
        stream.options = {"g": "1", "qp": "16", "preset": "veryfast"}
        for picture in pictures:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        file.mux(stream.encode())
