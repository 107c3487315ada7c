"""A video read as it arrives: one frame after the other from a file or a pipe, none stored."""

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ndlightnet.data.errors import DataError
from ndlightnet.data.media import open_media
from ndlightnet.data.video.film import choose_film, converter
from ndlightnet.data.video.video_transforms import check_sides

EARLY = 0.25  # of the time between two frames, by which a frame may come early: clocks jitter


class Frame(NamedTuple):
    """A frame: picture (height, width, 3) uint8 RGB, number in the video and time in seconds, both from 0."""

    number: int
    time: float
    picture: Tensor


class _Pipe(io.FileIO):
    """A pipe that returns what is there without waiting for more. Ctrl-C, lost by PyAV, ends it."""

    interrupted = False

    def read(self, size: int | None = -1, /) -> bytes:
        try:
            return b"" if self.interrupted else super().read(size) or b""
        except KeyboardInterrupt:
            self.interrupted = True
            return b""


class VideoStream:
    """Iterates over the frames of a video file, of a named pipe or, for "-", of standard input.

    A pipe has to carry a container that can be read without going back, such as matroska or mpegts.
    fps: frames to give per second, as evenly as the video has them; None: every frame. Frames that
    cannot be decoded are left out, and `damage` says so afterwards. `notes` has a line if the file
    holds several films. DataError if it is missing or holds none.
    """

    def __init__(self, source: str | Path, fps: float | None = None) -> None:
        import av

        if fps is not None and fps <= 0:
            raise DataError(f"fps={fps}: expected more than 0")
        self.name = "standard input" if str(source) == "-" else str(source)
        self.fps, self.damage = fps, ""
        self._piped = str(source) == "-" or not Path(source).is_file()
        opened: Any = str(source)  # a file may be read in any order
        try:
            if self._piped:
                stdin = str(source) == "-"
                opened = _Pipe(sys.stdin.fileno() if stdin else opened, closefd=not stdin)
            self._file = open_media(opened)
        except av.error.FFmpegError as error:
            if self._piped and opened.interrupted:
                raise KeyboardInterrupt from None
            raise self._unreadable() from error
        except OSError as error:
            gone = isinstance(error, FileNotFoundError)
            why = "no such file" if gone else str(error.strerror)
            raise DataError(f"{self.name}: {why}") from error
        self._film, self._display, note = choose_film(self._file, self.name)
        self.notes = [note] if note else []

    def __iter__(self) -> Iterator[Frame]:
        number, first, now, slot = -1, 0.0, 0.0, -1
        to_rgb = converter()
        step = 1 / float(self._film.average_rate or 25)
        for number, frame in enumerate(self._decoded()):
            if number == 0:
                first = frame.time or 0.0
                self._display = self._display.oriented(frame, self.name)
            # raw streams hold no times
            now = number * step if frame.time is None else frame.time - first
            if self.fps is not None:
                last, slot = slot, int((now + EARLY * step) * self.fps)
                if slot == last:
                    continue
            picture = self._display(to_rgb(frame)[None])[0]
            check_sides(self.name, picture)
            yield Frame(number, now, picture)
        if number < 0:
            raise self._unreadable()

    def _unreadable(self) -> DataError:
        why = " (a pipe needs a container such as matroska or mpegts)" if self._piped else ""
        return DataError(f"{self.name}: not a video that can be read{why}")

    def _decoded(self) -> Iterator[Any]:
        import av

        frames = lost = 0
        with self._file:
            packets = self._file.demux(self._film)
            while True:
                try:
                    packet = next(packets, None)
                except (av.error.FFmpegError, OSError) as error:
                    self.damage = f"{self.name}: damaged, ends after {frames} frames ({error})"
                    return
                if packet is None:
                    return
                try:
                    decoded = packet.decode()
                except av.error.FFmpegError:
                    # a stream joined late has nothing that can be decoded before the next key frame
                    if frames:
                        lost += 1
                        self.damage = f"{self.name}: damaged, undecodable packets: {lost}"
                    continue
                frames += len(decoded)
                yield from decoded
