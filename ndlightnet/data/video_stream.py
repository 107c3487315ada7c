"""A video as it comes: one frame after the other from a file or a pipe, none of them kept."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ndlightnet.data.errors import DataError

EARLY = 0.25  # of the time between two frames: how much too early one may come and still count


class Frame(NamedTuple):
    """A picture (height, width, 3) uint8 RGB, its number in the video and its time in seconds,
    both from 0."""

    number: int
    time: float
    picture: Tensor


class VideoStream:
    """Iterates over the frames of a video file, of a named pipe or, for "-", of standard input.

    A pipe has to carry a container that can be read without going back, such as matroska or mpegts.
    fps: so many frames a second, as evenly as the video has them; None: every frame. What cannot be
    decoded is left out, and `damage` says so afterwards. DataError for no file, or no video in it.
    """

    def __init__(self, source: str | Path, fps: float | None = None) -> None:
        import av

        if fps is not None and fps <= 0:
            raise DataError(f"fps={fps}: expected more than 0")
        self.name = "standard input" if str(source) == "-" else str(source)
        self.fps, self.damage = fps, ""
        opened: Any = str(source)  # a file may be gone through in any order
        try:
            # unbuffered, so that a read gives what is there and does not wait for more
            if str(source) == "-":
                opened = open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)
            elif not Path(source).is_file():
                opened = open(source, "rb", buffering=0)
            self._file = av.open(opened)
        except av.error.FFmpegError as error:
            why = "not a video that can be read"
            if opened != str(source):
                why += ": a pipe needs a container such as matroska or mpegts, mp4 cannot be piped"
            raise DataError(f"{self.name}: {why}") from error
        except OSError as error:
            why = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
            raise DataError(f"{self.name}: {why}") from error
        if not self._file.streams.video:
            raise DataError(f"{self.name}: has no video stream")

    def __iter__(self) -> Iterator[Frame]:
        number, first, now, slot = -1, 0.0, 0.0, -1
        step = 1 / float(self._file.streams.video[0].average_rate or 25)
        for number, frame in enumerate(self._decoded()):  # noqa: B007
            if number == 0:
                first = frame.time or 0.0
            # raw streams tell no time
            now = number * step if frame.time is None else frame.time - first
            if self.fps is not None:
                last, slot = slot, int(now * self.fps + EARLY)
                if slot == last:
                    continue
            picture = torch.from_numpy(frame.to_ndarray(format="rgb24"))
            # a telephone held upright writes a lying picture and a note to turn it
            yield Frame(number, now, torch.rot90(picture, frame.rotation // 90))
        if number < 0:
            raise DataError(f"{self.name}: has no frames that can be decoded")

    def _decoded(self) -> Iterator[Any]:
        import av

        frames = lost = 0
        with self._file:
            packets = self._file.demux(video=0)
            while True:
                try:
                    packet = next(packets, None)
                except av.error.FFmpegError as error:
                    self.damage = f"{self.name}: damaged, ends after {frames} frames ({error})"
                    return
                if packet is None:
                    return
                try:
                    found = packet.decode()
                except av.error.FFmpegError:
                    # one who joins a camera late has nothing to decode before the next key frame
                    lost += frames > 0
                    self.damage = f"{self.name}: damaged, {lost} frames or so cannot be decoded"
                    self.damage *= lost > 0
                    continue
                frames += len(found)
                yield from found
