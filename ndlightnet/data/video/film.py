"""The film of a media file: which of its streams that is, and how its frames are shown."""

import math
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ndlightnet.data.errors import DataError
from ndlightnet.data.video.video_transforms import LONGEST, shrink

HEIGHT, WIDTH = -3, -2  # axes of frames (..., height, width, 3)


class Display(NamedTuple):
    """How stored frames are shown, as players do it: resized to square pixels, turned, mirrored.

    aspect: width of a stored pixel / its height. The width of the frames is multiplied by it, the height stays.
    transpose: then height and width are exchanged. flips: then these axes, HEIGHT or WIDTH, are reversed.
    """

    aspect: Fraction = Fraction(1)
    transpose: bool = False
    flips: tuple[int, ...] = ()

    def __call__(self, frames: Tensor) -> Tensor:
        """Return stored frames (frames, height, width, 3) uint8 as they are shown."""
        if self.aspect != 1:
            height, width = frames.shape[HEIGHT], frames.shape[WIDTH]
            frames = shrink(frames, [height, max(1, round(width * self.aspect))])
        frames = frames.transpose(HEIGHT, WIDTH) if self.transpose else frames
        return frames.flip(self.flips) if self.flips else frames

    def oriented(self, frame: Any, name: object) -> "Display":
        """Return the same with the orientation of a frame of PyAV: one of ORIENTATIONS. DataError
        if it is turned by no multiple of 90 degrees."""
        a, b, c, d = _matrix(frame)  # (x, y) is shown at (a x + c y, b x + d y)
        transpose = abs(b) + abs(c) > abs(a) + abs(d)
        (x, y), rest = ((c, b), (a, d)) if transpose else ((a, d), (b, c))
        if max(map(abs, rest)) > SLANT * max(abs(x), abs(y)):
            angle = round(math.degrees(math.atan2(b, a)))  # clockwise
            raise DataError(f"{name}: is turned by {angle} degrees, expected a multiple of 90")
        flips = (HEIGHT,) * (y < 0) + (WIDTH,) * (x < 0)
        return self._replace(transpose=transpose, flips=flips)


SLANT = 0.02  # about the tangent of one degree
ORIENTATIONS = tuple(
    Display(transpose=transpose, flips=flips)
    for transpose, flips in product((False, True), ((), (HEIGHT,), (WIDTH,), (HEIGHT, WIDTH)))
)  # the first one leaves frames as they are


def _matrix(frame: Any) -> Sequence[int]:
    """Return a, b, c, d of the display matrix (ISO 14496-12) of a frame of PyAV."""
    try:
        data = frame.side_data.get("DISPLAYMATRIX")
    except ValueError:  # beside it lies data of a kind that PyAV has no name for, such as EXIF
        quarters = round(frame.rotation / 90) % 4
        return ((1, 0, 0, 1), (0, -1, 1, 0), (-1, 0, 0, -1), (0, 1, -1, 0))[quarters]
    if data is None:
        return 1, 0, 0, 1
    a, b, _, c, d, *_ = struct.unpack("=9i", bytes(data))
    return a, b, c, d


def converter() -> Callable[..., Tensor]:
    """Return a function of a frame of PyAV, and of a width and height or of neither, that returns its
    pixels (height, width, 3) uint8 RGB. PyAV 19 would give all frames one reformatter, whose threads stay."""
    from av.video.reformatter import VideoReformatter

    scale: Any = VideoReformatter()
    return lambda frame, *size: torch.from_numpy(scale.reformat(frame, *size, format="rgb24").to_ndarray())


def choose_film(file: Any, name: object) -> tuple[Any, Display, str]:
    """Return the video stream that is the film of an open file, how it is shown but for its
    orientation, and a note on the choice, "" if there is none.

    Embedded pictures, such as covers, are no films. Of several films it is, as FFmpeg chooses, one
    with the default flag, and of these the largest. DataError if there is none.
    """
    from av.stream import Disposition

    films = [s for s in file.streams.video if not s.disposition & Disposition.attached_pic]
    if not films:
        only = ", only an embedded picture" if file.streams.video else ""
        raise DataError(f"{name}: has no video stream{only}")
    decodable = [film for film in films if film.codec_context is not None]
    if not decodable:
        raise DataError(f"{name}: has a video stream of an unknown codec")
    default = [film for film in decodable if film.disposition & Disposition.default]
    film = max(default or decodable, key=lambda s: s.width * s.height)
    note = ""
    if len(films) > 1:
        note = (
            f"{name}: {len(films)} video streams, the one read is stream {film.index} "
            f"({film.width} x {film.height} pixels)"
        )
    aspect = film.sample_aspect_ratio or Fraction(1)
    if max(aspect, 1 / aspect) > LONGEST:
        raise DataError(f"{name}: has pixels {aspect} times as wide as high, expected 1/{LONGEST} to {LONGEST}")
    return film, Display(aspect), note
