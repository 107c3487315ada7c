"""Videos: what cannot be read says so, frame i is frame i, clips take the right frames."""

import gc
import os
import struct
from collections.abc import Sequence
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from torch import Tensor

import ndlightnet.data.video as video
from ndlightnet.data.errors import DataError
from ndlightnet.data.video import (
    ClipDataset,
    DecordReader,
    PyAVReader,
    Sample,
    check_videos,
    find_videos,
    load_video,
    open_video,
    read_video_folder,
)
from ndlightnet.data.video_stream import VideoStream
from ndlightnet.data.video_transforms import to_pixels

SHARED = Path(__file__).parents[3] / "shared" / "data"
HEIGHT, WIDTH, FRAMES = 48, 128, 50
DECORD = find_spec("decord") is not None
needs_decord = pytest.mark.skipif(not DECORD, reason="decord has no packages for ARM")


def encode(path: Path, pictures: np.ndarray, **options: str) -> Path:
    """(frames, height, width, 3) uint8 -> H.264."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", options={"movflags": "faststart"}) as file:
        stream = file.add_stream("libx264", rate=25)
        stream.height, stream.width = pictures.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.options = {"qp": "10", **options}
        stream.codec_context.thread_count = 1
        if len(pictures) == 0:
            file.start_encoding()
            return path
        for picture in pictures:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        file.mux(stream.encode())
    return path


def counting(frames: int = FRAMES, height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """Frame k has the brightness 4 k + 20."""
    levels = 4 * np.arange(frames, dtype=np.uint8) + 20
    return np.broadcast_to(levels[:, None, None, None], (frames, height, width, 3)).copy()


def numbers(frames: Tensor) -> list[int]:
    """The inverse of `counting`, of frames (..., frames, height, width, 3)."""
    return [round((frame.float().mean().item() - 20) / 4) for frame in frames]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 frames that tell their numbers, with B-frames and key frames 20 apart."""
    return encode(tmp_path_factory.mktemp("v") / "a.mp4", counting(), bf="3", g="20")


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


@pytest.mark.parametrize(
    "indices", [[0], range(FRAMES), [49, 3, 3, 20, 0], [21, 19], [7, 8, 9, 30]]
)
def test_frames_by_number(counted: Path, indices: Sequence[int]) -> None:
    opened = PyAVReader(counted)
    assert (len(opened), opened.fps) == (FRAMES, 25.0)
    for _ in range(2):  # the second time from wherever the first has left the reader
        frames = opened.frames(indices)
        assert frames.shape == (len(indices), HEIGHT, WIDTH, 3) and frames.dtype == torch.uint8
        assert numbers(frames) == list(indices)


@pytest.mark.parametrize("indices", [[FRAMES], [-1], []])
def test_frames_outside(counted: Path, indices: list[int]) -> None:
    with pytest.raises(IndexError):
        PyAVReader(counted).frames(indices)


def test_colours_are_red_green_blue(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (1, 6, 17, 3), dtype=np.uint8).repeat(16, 1).repeat(16, 2)
    frame = PyAVReader(encode(tmp_path / "a.mp4", coarse)).frames([0])[0]
    assert frame.shape == (96, 272, 3)
    # four pixels away from the edges
    assert (frame[4:12, 4:12].float().mean((0, 1)) - torch.tensor(coarse[0, 8, 8])).abs().max() < 12


@pytest.mark.parametrize("turn, matrix", [(-1, (0, 1, -1, 0)), (1, (0, -1, 1, 0))])
def test_a_telephone_held_upright(tmp_path: Path, turn: int, matrix: tuple[int, ...]) -> None:
    """The picture is turned as the file says: its matrix is overwritten with a quarter turn."""
    pictures = counting(3, 96, 128)
    pictures[:, :48, :64] = 0  # one corner is dark
    path = encode(tmp_path / "a.mp4", pictures)
    data = bytearray(path.read_bytes())
    place = data.index(b"tkhd") + 44
    a, b, c, d = (value << 16 for value in matrix)
    data[place : place + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(data)
    frame = PyAVReader(path).frames([1])[0]
    assert frame.shape == (128, 96, 3)
    expected = torch.rot90(torch.from_numpy(pictures[1]), turn).int()
    assert (frame.int() - expected).abs().float().mean() < 3


@pytest.mark.parametrize("width", [16, 24, 40, 48, 72, 96])
def test_narrow_videos(tmp_path: Path, width: int) -> None:
    """Rows of some of them are padded in memory."""
    path = encode(tmp_path / "a.mp4", counting(3, 32, width), g="1")
    opened = open_video(path, 1)
    assert numbers(opened.frames([0, 1, 2])) == [0, 1, 2]
    assert isinstance(opened, DecordReader) == (DECORD and width >= 96)


# codec, options, file name, container: one row each for the containers and for what misled readers
# that seek. quality 236: two quantiser steps, for codecs without x264's qp.
X264 = {"g": "12", "bf": "2", "qp": "15"}
MPEG = {"g": "12", "bf": "2", "flags": "+qscale", "global_quality": "236"}
OPEN = {"x264-params": "open-gop=1:keyint=12:bframes=3:scenecut=0", "qp": "15"}
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
SOUGHT = {"a.mp4", "a.mov", "a.mkv", "a.webm", "vp8.webm", "vp9.mp4", "matroska.mp4"}  # by decord
STEP, BAR, COUNT = 4, 8, 40


def moving_bar(
    path: Path, codec: str, options: dict[str, str], container: str | None, still: int = 0
) -> Path:
    """A bar that moves by STEP pixels from frame to frame, from the frame `still` on."""
    if codec not in av.codecs_available:
        pytest.skip(f"this PyAV has no {codec}")
    with av.open(str(path), "w", format=container) as file:
        stream = file.add_stream(codec, rate=25)
        stream.height, stream.width, stream.pix_fmt = 96, STEP * COUNT + 2 * BAR, "yuv420p"
        stream.options = options
        stream.codec_context.thread_count = 1
        for number in range(COUNT):
            picture = np.full((stream.height, stream.width, 3), 30, np.uint8)
            place = STEP * max(number, still)
            picture[:, place : place + BAR] = 230
            file.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        file.mux(stream.encode())
    return path


def remux(source: Path, path: Path, first: int = 0, early: int = 0) -> Path:
    """The packets of `source` from `first` on, `early` frames earlier."""
    with av.open(str(source)) as old, av.open(str(path), "w") as new:
        stream = new.add_stream_from_template(old.streams.video[0])
        packets = [packet for packet in old.demux(video=0) if packet.size > 0]
        for packet in packets[first:]:
            shift = round(early / 25 / packet.time_base)
            packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
            packet.stream = stream
            new.mux(packet)
    return path


def bars(frames: Tensor) -> list[int]:
    """The inverse of `moving_bar`: where the brightness above the ground has its centre."""
    light = (frames.float().mean((1, 3)) - 60).clamp(min=0)
    centres = (light * torch.arange(light.shape[1])).sum(1) / light.sum(1)
    return [round((centre - (BAR - 1) / 2) / STEP) for centre in centres.tolist()]


@pytest.mark.parametrize("codec, options, name, container", COMING, ids=[c[2] for c in COMING])
def test_frame_i_is_frame_i(
    tmp_path: Path, codec: str, options: dict[str, str], name: str, container: str | None
) -> None:
    path = moving_bar(tmp_path / name, codec, options, container)
    assert bars(load_video(path, 96, COUNT)) == list(range(COUNT))
    assert bars(load_video(path, 96, 8)) == list(range(2, COUNT, 5))
    assert bars(load_video(path, 96, 2)) == [10, 30]
    opened = open_video(path, 2)
    assert isinstance(opened, DecordReader) == (DECORD and name in SOUGHT)
    for reader in (opened, PyAVReader(path)):
        assert (len(reader), reader.fps) == (COUNT, 25.0)
        for wanted in ([COUNT - 1, 3, 20, 0, 1], [25, 13], range(11, 30), range(2, COUNT, 7)):
            assert bars(reader.frames(wanted)) == list(wanted)
            assert torch.equal(reader.frames(wanted), opened.frames(wanted))
        with pytest.raises(IndexError):
            reader.frames([COUNT])
    found = list(VideoStream(path))
    assert [frame.number for frame in found] == list(range(COUNT))
    assert bars(torch.stack([frame.picture for frame in found])) == list(range(COUNT))


@pytest.mark.parametrize(
    "codec, options", [("libx264", X264), ("libx264", OPEN), ("mpeg2video", MPEG)]
)
def test_a_recording_that_was_joined_late(
    tmp_path: Path, codec: str, options: dict[str, str]
) -> None:
    """It begins with its first key frame, 12; the packets before it cannot be decoded."""
    data = moving_bar(tmp_path / "whole.ts", codec, options, "mpegts").read_bytes()
    (tmp_path / "late.ts").write_bytes(data[len(data) // 188 // 6 * 188 :])
    assert bars(load_video(tmp_path / "late.ts", 96, COUNT)) == list(range(12, COUNT))
    remux(tmp_path / "whole.ts", tmp_path / "late.mkv", first=4)
    assert bars(load_video(tmp_path / "late.mkv", 96, COUNT)) == list(range(12, COUNT))
    opened = open_video(tmp_path / "late.mkv", 1)
    assert isinstance(opened, PyAVReader) and bars(opened.frames([15, 1])) == [27, 13]


def test_frames_that_an_edit_list_cuts_off(tmp_path: Path) -> None:
    """They are decoded, for others refer to them, but they are no frames of the video."""
    whole = moving_bar(tmp_path / "whole.mp4", "libx264", X264, None)
    cut = remux(whole, tmp_path / "cut.mp4", early=5)
    assert bars(load_video(cut, 96, COUNT)) == list(range(5, COUNT))
    opened = open_video(cut, 1)
    assert isinstance(opened, PyAVReader) and bars(opened.frames([30, 1])) == [35, 6]


@needs_decord
@pytest.mark.parametrize("wanted", [1, 2, 3, COUNT])
def test_decord_reads_what_skips_every_other_group(tmp_path: Path, wanted: int) -> None:
    path = moving_bar(tmp_path / "a.mp4", "libx264", X264, None)  # of 4 groups of pictures
    assert isinstance(open_video(path, wanted), DecordReader) == (wanted <= 2)


@pytest.mark.parametrize("name", ["open.mp4", "open.mkv"])
def test_one_look_where_nothing_moves_is_not_enough(tmp_path: Path, name: str) -> None:
    """What decord shows after its first seek is right, and wrong after the others."""
    opened = open_video(moving_bar(tmp_path / name, "libx264", OPEN, None, still=20), 1)
    assert isinstance(opened, PyAVReader) and bars(opened.frames([25, 13, 38])) == [25, 20, 38]


I, P, CUT = (True, False), (False, False), (False, True)  # (key frame, discarded)


@pytest.mark.parametrize(
    "times, kinds, expected",
    [
        ([0, 2, 1, 3, 5, 4], [I, P, P, I, P, P], [0, 3]),
        ([-1, 0, 7, 9], [I, I, I, P], [0, 1, 2]),
        ([0, 1, 4, 3, 5], [I, P, I, P, P], []),  # 3 is shown before the key frame it follows
        ([0, 2, 1, 3], [I, P, I, P], []),  # 2 is shown after the key frame it precedes
        ([0, 1, 2, 3], [I, CUT, I, P], []),
        ([0, 1, 2, None], [I, P, I, P], []),
    ],
)
def test_where_a_reader_may_seek(
    times: list[int | None], kinds: list[tuple[bool, bool]], expected: list[int]
) -> None:
    assert (
        video._seeks([(time, *kind) for time, kind in zip(times, kinds, strict=True)]) == expected
    )


@needs_decord
@pytest.mark.parametrize("wrong", ["a frame before", "another length", "an error", "a colour"])
def test_what_decord_does_not_read_rightly_is_left_to_pyav(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    import decord

    class Wrong(decord.VideoReader):
        def __len__(self) -> int:
            return super().__len__() + (wrong == "another length")

        def get_batch(self, indices: list[int]) -> decord.nd.NDArray:
            if wrong == "an error":
                raise decord.DECORDError("no frame")
            found = super().get_batch([i - (wrong == "a frame before") for i in indices]).asnumpy()
            return decord.nd.array(found ^ (wrong == "a colour"))

    path = moving_bar(tmp_path / "a.mp4", "libx264", X264, None)
    assert isinstance(open_video(path, 1), DecordReader)
    monkeypatch.setattr(decord, "VideoReader", Wrong)
    opened = open_video(path, 1)
    assert isinstance(opened, PyAVReader) and bars(opened.frames([30, 2])) == [30, 2]


@needs_decord
def test_pyav_takes_over_where_decord_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import decord

    def stop(*_: object) -> None:
        raise decord.DECORDError("no frame")

    opened = open_video(moving_bar(tmp_path / "a.mp4", "libx264", X264, None), 1)
    monkeypatch.setattr(decord.VideoReader, "get_batch", stop)
    assert isinstance(opened, DecordReader) and bars(opened.frames([30, 2])) == [30, 2]


def test_without_decord(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "find_spec", lambda name: None)
    opened = open_video(moving_bar(tmp_path / "a.mp4", "libx264", X264, None), 1)
    assert isinstance(opened, PyAVReader) and bars(opened.frames([30, 2])) == [30, 2]


def test_a_name_that_decord_cannot_open(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.mp4")
    moving_bar(tmp_path / "a.mp4", "libx264", X264, None).rename(path)
    assert bars(load_video(path, 96, 2)) == [10, 30]


def test_frames_of_uneven_length(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=25)
        stream.height, stream.width, stream.pix_fmt = HEIGHT, WIDTH, "yuv420p"
        stream.options = X264
        for number, picture in enumerate(counting()):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts = number * number
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    assert numbers(PyAVReader(path).frames([30, 3, 49])) == [30, 3, 49]
    assert numbers(load_video(path, HEIGHT, FRAMES)) == list(range(FRAMES))


@pytest.fixture(params=["missing", "folder", "text", "empty", "no frames", "cut", "sound"])
def bad(request: pytest.FixtureRequest, tmp_path: Path, counted: Path) -> Path:
    path = tmp_path / "bad.mp4"
    if request.param == "folder":
        path.mkdir()
    elif request.param == "text":
        path.write_text("not a video")
    elif request.param == "empty":
        path.touch()
    elif request.param == "no frames":
        encode(path, counting(0))
    elif request.param == "cut":
        path.write_bytes(counted.read_bytes()[:2800])
    elif request.param == "sound":
        with av.open(str(path), "w") as file:
            stream = file.add_stream("aac", rate=44100, layout="mono")
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 4096), "f4"), "fltp", "mono")
            silence.sample_rate = 44100
            file.mux(stream.encode(silence))
            file.mux(stream.encode())
    return path


def test_bad_files(bad: Path) -> None:
    with pytest.raises(DataError) as error:
        opened = PyAVReader(bad)
        opened.frames(range(len(opened)))
    assert str(error.value).startswith(f"{bad}: ")
    assert "\n" not in str(error.value)


def test_a_hole_in_a_file(tmp_path: Path) -> None:
    """The file opens, and what is lost in the middle is an error when its frames are wanted."""
    pictures = np.random.default_rng(0).integers(0, 256, (30, 48, 128, 3), dtype=np.uint8)
    path = encode(tmp_path / "a.mp4", pictures, g="10", qp="30")
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 20000] = bytes(20000)
    path.write_bytes(data)
    opened = PyAVReader(path)
    assert len(opened) == 30
    with pytest.raises(DataError, match="damaged"):
        opened.frames(range(30))


def make_folder(root: Path, source: Path, names: Sequence[str]) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(source.read_bytes())
    return root


NAMES = ["train/b/2.mp4", "train/b/1.MKV", "train/a/x.webm", "test/a/1.avi", "test/b/3.mov"]


def test_folder(tmp_path: Path, counted: Path) -> None:
    root = make_folder(tmp_path, counted, [*NAMES, "train/a/notes.txt", "train/a/._x.webm"])
    (root / "train" / ".cache").mkdir()
    found = read_video_folder(root)
    assert found.classes == ("a", "b") and found.folder == root
    assert [(str(p.relative_to(root)), y) for p, y in found.train] == [
        ("train/a/x.webm", 0),
        ("train/b/1.MKV", 1),
        ("train/b/2.mp4", 1),
    ]
    assert [label for _, label in found.test] == [0, 1]


@pytest.mark.parametrize(
    "names, empty, about, what",
    [
        ([], "", "nowhere", "no such folder"),
        (["test/a/1.mp4"], "", "train", "no such folder"),
        (["train/a/1.mp4"], "", "test", "no such folder"),
        ([], "train", "train", "no class folders"),
        (NAMES, "train/c", "", "only one of train/ and test/: c"),
        ([*NAMES, "test/c/1.mp4"], "train/c", "train/c", "has no videos"),
        ([*NAMES, "train/c/1.mp4", "test/c/1.txt"], "", "test/c", "has no videos"),
    ],
)
def test_bad_folders(
    tmp_path: Path, counted: Path, names: list[str], empty: str, about: str, what: str
) -> None:
    make_folder(tmp_path, counted, names)
    (tmp_path / empty).mkdir(parents=True, exist_ok=True)
    with pytest.raises(DataError) as error:
        read_video_folder(tmp_path / "nowhere" if about == "nowhere" else tmp_path)
    assert str(error.value).startswith(f"{tmp_path / about}: ") and what in str(error.value)


def test_check_names_the_first_bad_file(tmp_path: Path, counted: Path) -> None:
    good = Sample(counted, 0)
    for name in ("1.mp4", "2.mp4"):
        (tmp_path / name).write_text("text")
    check_videos([good, good])
    with pytest.raises(DataError, match=r"1\.mp4: not a video"):
        check_videos([good, Sample(tmp_path / "1.mp4", 0), good, Sample(tmp_path / "2.mp4", 0)])


def test_find_videos(tmp_path: Path, counted: Path) -> None:
    with pytest.raises(DataError, match=f"^{tmp_path}: no video here"):
        find_videos(tmp_path)
    make_folder(tmp_path, counted, ["deep/er/b.mp4", "a.avi", "c.txt"])
    assert find_videos(tmp_path) == [tmp_path / "a.avi", tmp_path / "deep/er/b.mp4"]
    assert find_videos(tmp_path / "a.avi") == [tmp_path / "a.avi"]
    with pytest.raises(DataError, match=r"c\.txt: no video here"):
        find_videos(tmp_path / "c.txt")
    with pytest.raises(DataError, match=r"d\.mp4: no such file"):
        find_videos(tmp_path / "d.mp4")


@pytest.mark.parametrize("max_frames, expected", [(99, list(range(50))), (5, [5, 15, 25, 35, 45])])
def test_load_video(counted: Path, max_frames: int, expected: list[int]) -> None:
    loaded = load_video(counted, short_side=12, max_frames=max_frames)
    assert loaded.dtype == torch.uint8 and loaded.is_contiguous()
    assert loaded.shape == (len(expected), 12, 32, 3)
    assert numbers(loaded) == expected


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
    frames = load_video(path, 24, 99)
    assert frames.shape == (80, 24, 32, 3)
    assert frames[:40].max() < 5 and frames[40:].min() > 250


def test_narrow_frames_are_refused(tmp_path: Path) -> None:
    """They would become huge: 128 x 1,024,000 pixels."""
    path = encode(tmp_path / "a.mp4", np.zeros((3, 2, 16_000, 3), np.uint8))
    words = f"^{path}: has frames of 16000 x 2 pixels, expected a long side of at most 16 times"
    with pytest.raises(DataError, match=words):
        load_video(path, 128, 9)
    with pytest.raises(DataError, match=words):
        list(VideoStream(path))
    assert len(load_video(encode(tmp_path / "b.mp4", counting(3, 16, 256)), 8, 9)) == 3


def test_few_frames_are_held_at_full_size(counted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    frames = PyAVReader.frames
    monkeypatch.setattr(
        PyAVReader, "frames", lambda reader, i: asked.append(len(i)) or frames(reader, i)
    )
    monkeypatch.setattr(video, "DECODED", 20 * HEIGHT * WIDTH * 3)
    assert numbers(load_video(counted, 12, 99)) == list(range(FRAMES))
    assert asked == [1, 20, 20, 9]


def test_a_title_that_is_not_utf8(tmp_path: Path, counted: Path) -> None:
    path = tmp_path / "a.mkv"
    with av.open(str(counted)) as source, av.open(str(path), "w") as file:
        stream = file.add_stream_from_template(source.streams.video[0])
        file.metadata["title"] = "TITLE"
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                file.mux(packet)
    assert path.read_bytes().count(b"TITLE") == 1
    path.write_bytes(path.read_bytes().replace(b"TITLE", b"TITL\xc9"))
    assert numbers(PyAVReader(path).frames([7])) == [7]
    assert len(list(VideoStream(path))) == FRAMES


def test_load_video_smooths_before_it_shrinks(tmp_path: Path) -> None:
    stripes = np.zeros((1, 128, 128, 3), np.uint8)
    stripes[:, :, 3::8] = stripes[:, :, 4::8] = 255
    path = encode(tmp_path / "a.mp4", stripes)
    mean = load_video(path, 16, 9).float().mean()
    assert 45 < mean < 100  # a quarter is white; without antialiasing only that would be seen


@pytest.fixture(scope="module")
def samples(counted: Path) -> list[Sample]:
    short = encode(counted.parent / "b.mp4", counting(3, 64, 64))
    return [Sample(counted, 4), Sample(short, 7)]


@pytest.mark.parametrize("frames", [1, 8])
def test_train_clips(samples: list[Sample], frames: int) -> None:
    data = ClipDataset(samples, frames, size=32, train=True)
    torch.manual_seed(0)
    assert len(data) == 2
    for number, label in ((0, 4), (1, 7)):
        clip, found, index = data[number]
        assert clip.shape == (3, frames, 32, 32) and clip.dtype == torch.float32
        assert clip.is_contiguous() and (found, index) == (label, number)
    assert not torch.equal(data[0][0], data[0][0])
    torch.manual_seed(1)
    first = data[0][0]
    torch.manual_seed(1)
    assert torch.equal(first, data[0][0])


def test_test_clips(samples: list[Sample]) -> None:
    data = ClipDataset(samples, frames=5, size=42, train=False, clips=2)
    (clips, label, index), again = data[0], data[0]
    assert clips.shape == (2, 3, 5, 42, 42) and (label, index) == (4, 0)
    assert torch.equal(clips, again[0])
    # 5 parts of 10 frames; the clips lie at a quarter and at three quarters of each part
    assert numbers(to_pixels(clips[0])) == [2, 12, 22, 32, 42]
    assert numbers(to_pixels(clips[1])) == [7, 17, 27, 37, 47]


def test_single_frames(samples: list[Sample]) -> None:
    data = ClipDataset(samples, frames=1, size=42, train=False, clips=5)
    clips = data[0][0]
    assert clips.shape == (5, 3, 1, 42, 42)
    assert numbers(to_pixels(torch.cat(list(clips), dim=1))) == [5, 15, 25, 35, 45]


def test_a_short_video_repeats_frames_evenly(samples: list[Sample]) -> None:
    clips = ClipDataset(samples, frames=6, size=32, train=False)[1][0]
    assert numbers(to_pixels(clips[0])) == [0, 0, 1, 1, 2, 2]


def test_all_in_memory(samples: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    data = ClipDataset(samples, frames=4, size=28, train=False)
    monkeypatch.setattr(video, "PyAVReader", lambda path: pytest.fail("decoded again"))
    assert data[1][0].shape == (1, 3, 4, 28, 28)


def test_dataset_errors(samples: list[Sample], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"c\.mp4: no such file"):
        ClipDataset([*samples, Sample(tmp_path / "c.mp4", 0)], 4, 32, train=True)
    with pytest.raises(ValueError, match="start at 1"):
        ClipDataset(samples, frames=0, size=32, train=True)


def test_the_dataset_flips_only_when_asked(
    samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(video, "train_clip", lambda _video, _frames, _size, hflip: hflip)
    assert ClipDataset(samples, 4, 28, train=True)[0] == (False, 4, 0)
    assert ClipDataset(samples, 4, 28, train=True, hflip=True)[0] == (True, 4, 0)


@pytest.mark.skipif(not SHARED.exists(), reason="needs the shared data beside the checkout")
@pytest.mark.parametrize(
    "name, classes, train, test",
    [
        ("surveillance", ("calm", "fight"), 203, 60),
        ("lung_ultrasound", ("covid", "pneumonia", "regular"), 79, 25),
    ],
)
def test_real_videos(name: str, classes: tuple[str, ...], train: int, test: int) -> None:
    found = read_video_folder(SHARED / name)
    assert (found.classes, len(found.train), len(found.test)) == (classes, train, test)
    data = ClipDataset(found.test[:1], frames=8, size=64, train=False, clips=2)
    clips, label, _ = data[0]
    assert clips.shape == (2, 3, 8, 64, 64) and label == 0
    assert 0.2 < clips.std() < 2 and clips.mean().abs() < 2.1
    assert (clips[:, :, 0] != clips[:, :, -1]).any()  # something moves
