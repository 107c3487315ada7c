"""Videos that cannot be read say so; folders of classes; whole videos in memory."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch

import ndlightnet.data.video.video_files as video
from ndlightnet.data.media import open_media
from ndlightnet.data.video.video_files import PyAVReader, Sample, check_videos
from ndlightnet.data.video.video_stream import VideoStream

from ..refusals import refuses
from .made_videos import FRAMES, HEIGHT, WIDTH, encode, load, numbers, remux


def test_a_hole_in_a_file(tmp_path: Path) -> None:
    """The file opens, and what is lost in the middle is an error when its frames are wanted."""
    pictures = np.random.default_rng(0).integers(0, 256, (30, 48, 128, 3), dtype=np.uint8)
    path = encode(tmp_path / "a.mp4", pictures, g="10", qp="30")
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 20000] = bytes(20000)
    path.write_bytes(data)
    opened = PyAVReader(path)
    assert len(opened) == 30
    refuses(lambda: opened.frames(range(30)), path, "damaged")


def test_check_names_the_first_bad_file(tmp_path: Path, counted: Path) -> None:
    good = Sample(counted, 0)
    for name in ("1.mp4", "2.mp4"):
        (tmp_path / name).write_text("text")
    check_videos([good, good])
    samples = [good, Sample(tmp_path / "1.mp4", 0), good, Sample(tmp_path / "2.mp4", 0)]
    refuses(lambda: check_videos(samples), tmp_path / "1.mp4", "not a video")


def test_frames_of_two_sizes_come_in_the_first_one(tmp_path: Path) -> None:
    """Black ones of 128 x 96 pixels, then white ones of 64 x 48."""
    path = tmp_path / "a.avi"
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mjpeg", rate=25)
        stream.width, stream.height, stream.pix_fmt = 128, 96, "yuvj420p"
        other = av.CodecContext.create("mjpeg", "w")
        other.width, other.height, other.pix_fmt = 64, 48, "yuvj420p"
        other.time_base = Fraction(1, 25)
        for encoder, level in ((stream.codec_context, 0), (other, 255)):
            size = (encoder.height, encoder.width, 3)
            for number in range(40):
                frame = av.VideoFrame.from_ndarray(np.full(size, level, np.uint8), format="rgb24")
                frame = frame.reformat(format="yuvj420p")
                frame.pts, frame.time_base = number + 40 * (level > 0), Fraction(1, 25)
                for packet in encoder.encode(frame):
                    packet.stream = stream
                    file.mux(packet)
    reader = PyAVReader(path)
    assert reader.frames([3, 43]).shape == (2, 96, 128, 3)
    assert reader.frames([50]).shape == (1, 96, 128, 3)
    frames = load(path, [24], 99)
    assert frames.shape == (80, 24, 32, 3)
    assert frames[:40].max() < 5 and frames[40:].min() > 250


def test_few_frames_are_held_at_full_size(counted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    frames = PyAVReader.frames
    monkeypatch.setattr(PyAVReader, "frames", lambda reader, i: asked.append(len(i)) or frames(reader, i))
    monkeypatch.setattr(video, "DECODED", 20 * HEIGHT * WIDTH * 3)
    loaded = load(counted, [12], 99)
    assert loaded.dtype == torch.uint8 and loaded.is_contiguous() and loaded.shape == (FRAMES, 12, 32, 3)
    assert numbers(loaded) == list(range(FRAMES)) and asked == [1, 20, 20, 9]
    assert numbers(load(counted, [12], 5)) == [5, 15, 25, 35, 45]


def test_a_title_that_is_not_utf8(tmp_path: Path, counted: Path) -> None:
    path = remux(counted, tmp_path / "a.mkv", title="TITLE")
    assert path.read_bytes().count(b"TITLE") == 1
    path.write_bytes(path.read_bytes().replace(b"TITLE", b"TITL\xc9"))
    assert numbers(PyAVReader(path).frames([7])) == [7]
    assert len(list(VideoStream(path))) == FRAMES


def test_pyav_19_opens_without_the_argument_for_titles(monkeypatch) -> None:
    asked: list[dict[str, str]] = []
    monkeypatch.setattr(av, "open", lambda source, **options: asked.append(options))
    for version in ("18.1.0", "19.0.2"):
        monkeypatch.setattr(av, "__version__", version)
        open_media("a.mkv")
    assert asked == [{"metadata_errors": "replace"}, {}]


def test_a_video_is_smoothed_before_it_shrinks(tmp_path: Path) -> None:
    stripes = np.zeros((1, 128, 128, 3), np.uint8)
    stripes[:, :, 3::8] = stripes[:, :, 4::8] = 255
    path = encode(tmp_path / "a.mp4", stripes)
    mean = load(path, [16], 9).float().mean()
    assert 45 < mean < 100  # a quarter is white; without antialiasing only that would be seen
