"""Readers of videos: frame i is frame i in every container, and nothing is left behind."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from ndlightnet.data.video.video_files import PyAVReader, SeekingReader
from ndlightnet.data.video.video_stream import VideoStream

from .made_videos import (
    COUNT,
    FRAMES,
    HEIGHT,
    MPEG,
    OPEN,
    SEEKING,
    WIDTH,
    X264,
    bars,
    counting,
    encode,
    load,
    moving_bar,
    numbers,
    open_video,
    remux,
)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_a_dropped_reader_leaves_no_threads_to_the_garbage_collector(counted):
    """Freed in a forked worker of a DataLoader, the decoder waits for its threads for ever."""

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    gc.collect()
    gc.disable()
    try:
        before, reader = threads(), PyAVReader(counted)
        reader.frames([0])
        reader.frames([5, 1])
        during = threads()
        del reader
        assert threads() == before
        assert during > before or os.cpu_count() == 1
    finally:
        gc.enable()


def test_frames_by_number(counted: Path) -> None:
    """Twice: the second time from wherever the first has left the reader."""
    opened = PyAVReader(counted)
    assert (len(opened), opened.fps) == (FRAMES, 25.0)
    for indices in 2 * [[0], range(FRAMES), [49, 3, 3, 20, 0], [21, 19], [21, 19], [7, 8, 9, 30]]:
        frames = opened.frames(indices)
        assert frames.shape == (len(indices), HEIGHT, WIDTH, 3) and frames.dtype == torch.uint8
        assert numbers(frames) == list(indices)
    for outside in ([FRAMES], [-1], []):
        with pytest.raises(IndexError):
            opened.frames(outside)


def test_colours_are_red_green_blue(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (1, 6, 17, 3), dtype=np.uint8).repeat(16, 1).repeat(16, 2)
    frame = PyAVReader(encode(tmp_path / "a.mp4", coarse)).frames([0])[0]
    assert frame.shape == (96, 272, 3)
    # four pixels away from the edges
    assert (frame[4:12, 4:12].float().mean((0, 1)) - torch.tensor(coarse[0, 8, 8])).abs().max() < 12


@pytest.mark.parametrize("width", [16, 24, 40, 48, 72, 96])
def test_narrow_videos(tmp_path: Path, width: int) -> None:
    """Rows of some of them are padded in memory."""
    path = encode(tmp_path / "a.mp4", counting(3, 32, width), g="1")
    opened = open_video(path, 1)
    assert numbers(opened.frames([0, 1, 2])) == [0, 1, 2]
    assert isinstance(opened, SeekingReader) == (SEEKING and width >= 96)


COMING = [
    ("libx264", X264, "a.mp4", None),
    ("libx264", X264, "a.mov", None),
    ("libx264", X264, "a.mkv", None),
    ("libvpx-vp9", {"g": "12"}, "a.webm", None),
    ("libvpx", {"g": "12"}, "vp8.webm", None),
    ("libvpx-vp9", {"g": "12"}, "vp9.mp4", None),
    ("libx264", X264, "matroska.mp4", "matroska"),
    ("mpeg4", MPEG, "a.avi", None),
    ("libx264", X264, "a.avi", None),
    ("libx264", X264, "a.flv", "flv"),
    ("libx264", X264, "stream.ts", "mpegts"),
    ("libx264", X264, "stream.mp4", "mpegts"),
    ("mpeg2video", MPEG, "program.mpg", "mpeg"),
    ("mpeg2video", MPEG, "program.avi", "mpeg"),
    ("mpeg2video", MPEG, "closed.mp4", None),
    ("mpeg4", {**MPEG, "bf": "0"}, "mpeg4.mp4", None),
    ("libx264", OPEN, "open.mp4", None),
    ("libx264", OPEN, "open.mkv", None),
    ("libx264", {"intra-refresh": "1", "g": "12"}, "refresh.mp4", None),
    ("libx264", {"intra-refresh": "1", "g": "12", "bf": "0"}, "refresh without B.mp4", None),
    ("libx265", {"x265-params": "keyint=12:bframes=3:log-level=none"}, "hevc.mp4", None),
    ("libsvtav1", {"g": "12"}, "av1.mp4", None),
]
SOUGHT = {"a.mp4", "a.mov", "a.mkv", "a.webm", "vp8.webm", "vp9.mp4", "matroska.mp4"}  # by decoders that seek


@pytest.mark.slow
@pytest.mark.parametrize("codec, options, name, container", COMING, ids=[c[2] for c in COMING])
def test_frame_i_is_frame_i(
    tmp_path: Path, codec: str, options: dict[str, str], name: str, container: str | None
) -> None:
    path = moving_bar(tmp_path / name, codec, options, container)
    assert bars(load(path, [96], COUNT)) == list(range(COUNT))
    assert bars(load(path, [96], 8)) == list(range(2, COUNT, 5))
    assert bars(load(path, [96], 2)) == [10, 30]
    opened = open_video(path, 2)
    assert isinstance(opened, SeekingReader) == (SEEKING and name in SOUGHT)
    for reader in (opened, PyAVReader(path)):
        assert (len(reader), reader.fps) == (COUNT, 25.0)
        for indices in ([COUNT - 1, 3, 20, 0, 1], [25, 13], range(11, 30), range(2, COUNT, 7)):
            assert bars(reader.frames(indices)) == list(indices)
            assert torch.equal(reader.frames(indices), opened.frames(indices))
        with pytest.raises(IndexError):
            reader.frames([COUNT])
    streamed = list(VideoStream(path))
    assert [frame.number for frame in streamed] == list(range(COUNT))
    assert bars(torch.stack([frame.picture for frame in streamed])) == list(range(COUNT))


@pytest.mark.parametrize("codec, options", [("libx264", X264), ("libx264", OPEN), ("mpeg2video", MPEG)])
def test_a_recording_that_was_joined_late(tmp_path: Path, codec: str, options: dict[str, str]) -> None:
    """It begins with its first key frame, 12; the packets before it cannot be decoded."""
    data = moving_bar(tmp_path / "whole.ts", codec, options, "mpegts").read_bytes()
    (tmp_path / "late.ts").write_bytes(data[len(data) // 188 // 6 * 188 :])
    assert bars(load(tmp_path / "late.ts", [96], COUNT)) == list(range(12, COUNT))
    remux(tmp_path / "whole.ts", tmp_path / "late.mkv", first=4)
    assert bars(load(tmp_path / "late.mkv", [96], COUNT)) == list(range(12, COUNT))
    opened = open_video(tmp_path / "late.mkv", 1)
    assert isinstance(opened, PyAVReader) and bars(opened.frames([15, 1])) == [27, 13]


def test_frames_that_an_edit_list_cuts_off(tmp_path: Path) -> None:
    """They are decoded, for others refer to them, but they are no frames of the video."""
    source = moving_bar(tmp_path / "whole.mp4", "libx264", X264, None)
    shortened = remux(source, tmp_path / "cut.mp4", early=5)
    assert bars(load(shortened, [96], COUNT)) == list(range(5, COUNT))
    opened = open_video(shortened, 1)
    assert isinstance(opened, PyAVReader) and bars(opened.frames([30, 1])) == [35, 6]
