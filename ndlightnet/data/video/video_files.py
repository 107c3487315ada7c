"""Videos from files: readers, frames decoded when they are asked for, and a folder of classes.

A folder is read as `train/<class>/*.mp4` and `test/<class>/*.mp4` (or another of ENDINGS). Frames
are (frames, height, width, 3) uint8 RGB in all public functions; video_transforms turns them into
the clips of a network. A file or folder that cannot be used raises DataError.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ndlightnet.data.errors import DataError
from ndlightnet.data.folders import NAMED, Notes, class_folders, class_names, list_files
from ndlightnet.data.media import open_media
from ndlightnet.data.threads import in_threads
from ndlightnet.data.video.film import ORIENTATIONS, choose_film, converter
from ndlightnet.data.video.video_decoders import Decoder, TorchCodec, decoders
from ndlightnet.data.video.video_transforms import check_sides, even_indices, shrink

ENDINGS = (".mp4", ".m4v", ".avi", ".mkv", ".mov", ".webm", ".mpg", ".mpeg", ".gif")
# Where decoders that seek find the right frames: containers and codecs by FFmpeg's names, and the
# width in pixels from which on decord 0.6 reads padded rows correctly.
CONTAINERS, CODECS = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"), ("h264", "vp8", "vp9")
NARROW = 96
CHECKED = 256  # videos that are opened before a training, so that 100,000 start within seconds
CLOSE = 4  # levels of 255 by which the values of a GPU, which converts otherwise, may differ (mean)
DECODED = 2**27  # bytes of full-size frames decoded at a time: bounds the memory of a long video


class PyAVReader:
    """An open video: `len` in frames, `fps` in frames a second (0.0 where the file has none).

    It decodes from the start to the last requested frame, so requests in order are quick. It never seeks: containers
    without an index (MPEG-TS, MPEG-PS), open groups of pictures and intra refresh silently give other frames after a
    seek than the file holds there. `seeks` holds the numbers of the frames to which another reader may seek; it is
    empty if none should. `display` is how stored frames are shown, `notes` has a line if the file holds several films.

    DataError for a missing file, a file without a film, or no frames.
    """

    def __init__(self, path: str | Path) -> None:
        import av

        self.path = Path(path)
        if not self.path.is_file():
            raise DataError(f"{path}: no such file")
        try:
            with open_media(str(self.path)) as file:
                film, self.display, note = choose_film(file, self.path)
                self.notes = [note] if note else []
                # Packets are counted because a header may give a wrong number of frames, or none;
                # what an edit list cuts off is decoded, but not shown.
                packets = [(p.pts, p.is_keyframe, p.is_discard) for p in _packets(film)]
                self._length = sum(not discarded for _, _, discarded in packets)
                self.fps = float(film.average_rate or 0)
                seekable = file.format.name in CONTAINERS and film.codec_context.name in CODECS
                # decord turns frames as an old tag says, which no player does any more
                tagged = "rotate" in map(str.lower, film.metadata)
                sure = seekable and film.width >= NARROW and not note and not tagged
                self.seeks = _seeks(packets) if sure else []
        except av.error.FFmpegError as error:
            raise DataError(f"{self.path}: not a video that can be read") from error
        if not self._length:
            raise DataError(f"{self.path}: has no frames")
        self._restart()

    def __len__(self) -> int:
        return self._length

    def _restart(self) -> None:
        self._decoded, self._to_rgb = _decode(self.path), converter()
        self._position = 0  # the number of the frame that `_decoded` gives next

    def frames(self, indices: Sequence[int]) -> Tensor:
        """Return frames by number, in the given order: (frames, height, width, 3) uint8 RGB, of
        square pixels and as they are shown.

        IndexError for a number outside [0, len); DataError where the file is damaged there.
        """
        stored = self.stored(indices)  # which finds the orientation
        return self.display(stored)

    def stored(self, indices: Sequence[int]) -> Tensor:
        """Return the same, not yet shown by `display`."""
        import av

        numbers = _checked(indices, len(self))
        if min(numbers) < self._position:
            self._restart()
        chosen = dict.fromkeys(numbers, torch.empty(0))
        try:
            for number in range(self._position, max(numbers) + 1):
                frame = next(self._decoded)
                if number == 0:  # size and orientation may change: all get the first one's
                    self._size = frame.width, frame.height
                    self.display = self.display.oriented(frame, self.path)
                if number in chosen:
                    chosen[number] = self._to_rgb(frame, *self._size)
                self._position = number + 1
        except (StopIteration, av.error.FFmpegError) as error:
            self._position = len(self)  # the next request starts over
            raise DataError(f"{self.path}: damaged, some frames cannot be decoded") from error
        return torch.stack([chosen[number] for number in numbers])


def _packets(film: Any) -> Iterator[Any]:
    """Yield the packets of a stream from the first key frame on, without those shown before it: a
    recording that was joined late begins with packets that cannot be decoded."""
    packets = (packet for packet in film.container.demux(film) if packet.size > 0)
    for first in packets:
        if first.is_keyframe:
            yield first
            break
    for packet in packets:
        if None in (packet.pts, first.pts) or packet.pts >= first.pts:
            yield packet


def _seeks(packets: Sequence[tuple[int | None, bool, bool]]) -> list[int]:
    """Return the numbers of the key frames of packets (time, key frame, discarded) in decoding
    order; none if frames are cut off, or if display order moves one across a key frame."""
    times = [time for time, _, discarded in packets if time is not None and not discarded]
    if len(times) < len(packets):
        return []
    display_order = sorted(range(len(times)), key=times.__getitem__)
    last = list(accumulate(display_order, max))  # last decoded of the frames shown so far
    keys = [number for number, (_, is_key, _) in enumerate(packets) if is_key]
    return keys if all(display_order[key] == last[key] == key for key in keys) else []


def _decode(path: Path) -> Iterator[Any]:
    """Yield all frames. Closes the file, and ends the decoder's threads, when it is dropped (so it
    must not refer to the reader): left to the garbage collector, they might be freed in a forked
    process, which does not have these threads and waits for them."""
    with open_media(str(path)) as file:
        film, *_ = choose_film(file, path)
        for packet in _packets(film):
            yield from packet.decode()
        yield from film.decode(None)  # what the decoder still holds


class SeekingReader:
    """Reader of the same frames by a decoder that seeks: quick for few frames of a long video.

    DataError unless it finds as many frames as `reader` does, and the same ones at its first seek: all convert colours
    alike, so that no value differs. Decoders apply the rotation of a display matrix, but no mirrors: which orientation
    gives the stored frames is found there, too, and has to be the only one. Only then a CUDA `device` decodes; there
    frames lie, whose values may differ by CLOSE on average.
    """

    def __init__(self, reader: PyAVReader, decoder: Decoder, device: str = "cpu") -> None:
        self.path, self.fps = reader.path, reader.fps
        key = reader.seeks[:2][-1]
        sought = [key, min(key + 1, len(reader) - 1)]
        right = reader.stored(sought)
        self._display, plain = reader.display, reader.display._replace(aspect=Fraction(1))
        orientations = ORIENTATIONS[:1] if plain == ORIENTATIONS[0] else ORIENTATIONS
        for decoding in dict.fromkeys(("cpu", device)):
            try:
                self._video = decoder(self.path, decoding)
                decoded, count = self._video[sought].cpu(), len(self)
            except Exception as error:  # of many classes
                raise DataError(f"{self.path}: {decoder.__name__} cannot read it") from error
            levels = 0 if decoding == "cpu" else CLOSE
            matches = [turn for turn in orientations if _alike(turn(decoded), right, levels)]
            if count != len(reader) or len(matches) != 1:
                raise DataError(f"{self.path}: {decoder.__name__} finds other frames")
            self._stored = matches[0]

    def __len__(self) -> int:
        return len(self._video)

    def frames(self, indices: Sequence[int]) -> Tensor:
        """Return the same as `PyAVReader.frames`, which is used if the decoder fails."""
        numbers = _checked(indices, len(self))
        try:
            return self._display(self._stored(self._video[numbers]))
        except Exception:  # of many classes
            return PyAVReader(self.path).frames(numbers)


def _alike(a: Tensor, b: Tensor, levels: int) -> bool:
    if not levels or a.shape != b.shape:
        return torch.equal(a, b)
    return bool((a.float() - b).abs().mean() <= levels)


def quickest(reader: PyAVReader, count: int, device: str = "cpu") -> PyAVReader | SeekingReader:
    """Return the quickest reader of about `count` frames of the video: `reader`, or one that seeks
    and gives the same frames.

    As a seek takes as long as PyAV takes for dozens of frames, it has to skip at least every other group of pictures.
    With a CUDA device it is used for any number of frames, for its colours are not quite the same.
    """
    if reader.seeks and (device != "cpu" or 2 * count <= len(reader.seeks)):
        for decoder in decoders() if device == "cpu" else (TorchCodec,):
            try:
                return SeekingReader(reader, decoder, device)
            except DataError:
                pass
    return reader


class ThinVideo:
    """A video of at most `max_frames` frames, evenly spaced in a longer file, that are decoded when they are asked for:
    `video[indices]`, as of a tensor, is (frames, height, width, 3) uint8. `notes`: of its reader.

    Decoding is slow: store what is needed again. DataError where the file cannot be used.

    Args:
        path: the file.
        size: frames are resized to this, [short side] or [height, width].
        max_frames: a longer video is thinned out.
        device: "cpu", or the CUDA device that decodes and resizes. Frames come to the CPU.
    """

    def __init__(self, path: str | Path, size: Sequence[int], max_frames: int, device: str = "cpu") -> None:
        self._reader, self._size, self._device = PyAVReader(path), size, device
        self.notes, count = self._reader.notes, len(self._reader)
        self._numbers = even_indices(count, min(count, max_frames))
        first = self._reader.frames([0])
        check_sides(path, first)
        self._step = max(1, DECODED // first.numel())  # frames that are decoded at a time
        self._first = shrink(first, size)
        self.shape = (len(self), *self._first.shape[1:])

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, indices: Tensor | slice) -> Tensor:
        numbers, places = self._numbers[indices].unique(return_inverse=True)  # sorted, each once
        sought, step = numbers.tolist(), self._step
        reader = quickest(self._reader, len(sought), self._device)
        # asked for its first frame again, PyAV's reader would start over
        pieces = [self._first] if sought[0] == 0 and reader is self._reader else []
        for start in range(len(pieces), len(sought), step):
            pieces.append(shrink(reader.frames(sought[start : start + step]), self._size).cpu())
        frames = torch.cat(pieces)
        return frames if isinstance(indices, slice) else frames[places]  # a slice is in order


class Sample(NamedTuple):
    """A video file and the number of its class."""

    path: Path
    label: int


class VideoFolder(NamedTuple):
    """Contents of a folder of videos; a label is an index into `classes`, which are sorted."""

    folder: Path
    classes: tuple[str, ...]
    train: tuple[Sample, ...]
    test: tuple[Sample, ...]


def read_video_folder(folder: str | Path, notes: Notes = None) -> VideoFolder:
    """List `train/<class>/` and `test/<class>/`, at any depth; opens no video. A line on other entries of each folder
    is added to `notes`. DataError as `class_folders`, and for a class folder without videos."""
    folder = Path(folder)
    classes = class_names(folder / "train")
    train, test = (
        tuple(
            Sample(Path(file), label)
            for class_folder, label in class_folders(folder / split, classes, notes)
            for file in list_files(class_folder, ENDINGS, notes)
        )
        for split in ("train", "test")
    )
    return VideoFolder(folder, classes, train, test)


def find_videos(path: str | Path, notes: Notes = None) -> list[Path]:
    """Return the video at `path`, or all in that folder and its subfolders, sorted; DataError if there is none. A line
    on other files is added to `notes`."""
    return [Path(file) for file in list_files(Path(path), ENDINGS, notes)]


def check_videos(samples: Sequence[Sample]) -> list[str]:
    """Open every video, of many CHECKED evenly spaced ones, and decode its first frame; return
    notes on them. DataError names the first that fails."""
    some = even_indices(len(samples), min(len(samples), CHECKED)).tolist()
    checked = in_threads(_check, [samples[number] for number in some], "checking videos")
    notes = [note for notes in checked for note in notes]
    more = [f"{len(notes) - NAMED} more notes on videos are like these"]
    return notes if len(notes) <= NAMED else notes[:NAMED] + more


def _checked(indices: Sequence[int], length: int) -> list[int]:
    numbers = [int(index) for index in indices]
    if not numbers or min(numbers) < 0 or max(numbers) >= length:
        raise IndexError(f"frame numbers in [0, {length}) expected, got {numbers}")
    return numbers


def _check(sample: Sample) -> list[str]:
    reader = PyAVReader(sample.path)
    reader.frames([0])
    return reader.notes
