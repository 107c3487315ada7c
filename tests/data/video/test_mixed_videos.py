"""A folder of good and bad videos as people have them: every good one is read rightly, and each bad one is one line."""

import zipfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from ndlightnet.data.video.video_files import ENDINGS, PyAVReader, find_videos, quickest
from ndlightnet.data.video.video_stream import VideoStream
from ndlightnet.training import VideoData

from ..refusals import refuses
from .made_videos import FAST, as_shown, cover_first, encode, jpeg, load, set_matrix, write_film

FRAMES, HEIGHT, WIDTH = 6, 48, 96
SHARP = {"qp": "6", "g": "2", "bf": "0"}
VPX = {"crf": "4", "b": "4M", "cpu-used": "8"}
SCALED = {"flags": "+qscale", "global_quality": "236"}  # for codecs without qp


def drawn(frames: int = FRAMES, height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """Four grey corners of different brightness, and a white square that moves to the right."""
    film = np.full((frames, height, width, 3), 40, np.uint8)
    film[:, : height // 2, width // 2 :] = 90
    film[:, height // 2 :, : width // 2] = 140
    film[:, height // 2 :, width // 2 :] = 190
    for number, picture in enumerate(film):
        picture[height // 4 : height // 2, 8 * number : 8 * number + 16] = 240
    return film


def alpha() -> np.ndarray:
    """The same, opaque."""
    return np.concatenate([drawn(), np.full((FRAMES, HEIGHT, WIDTH, 1), 255, np.uint8)], -1)


def film(*settings: str, like: np.ndarray | None = None, **options):
    """A writer of `drawn` (codec and pixel format), and what is read."""
    pictures = options.pop("pictures", drawn())
    right = like if like is not None else pictures
    options = {"options": SHARP if not settings else SCALED} | options
    return lambda path: write_film(path, pictures, *settings, **options), right


def turned(matrix: tuple[int, ...], aspect: Fraction | int = 1):
    def write(path: Path) -> None:
        set_matrix(write_film(path, drawn(), options=SHARP, aspect=aspect), matrix)

    return write, as_shown(drawn(), matrix, aspect)


def cut(path: Path) -> None:
    """The first two thirds of a film of noise."""
    noise = np.random.default_rng(0).integers(0, 256, (30, 48, 96, 3), dtype=np.uint8)
    data = write_film(path, noise, flags=FAST).read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])


def without_index(path: Path) -> None:
    data = write_film(path, drawn()).read_bytes()
    path.write_bytes(data[: data.index(b"moov")])


def archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("film.mp4", b"film")


def unknown(path: Path) -> None:
    data = write_film(path, drawn()).read_bytes()
    path.write_bytes(data.replace(b"avc1", b"zzzz").replace(b"avcC", b"none"))


VFR, NARROW = [0, 1, 5, 6, 20, 21], Fraction(2, 3)
GOOD: dict[str, tuple[Callable[[Path], object], np.ndarray]] = {
    "plain.mp4": film(),
    "LOUD.MP4": film(sound=True),
    "fast start.mp4": film(flags=FAST),
    "fragments.mp4": film(flags={"movflags": "frag_keyframe+empty_moov"}),
    "a.m4v": film(),
    "a.mov": film(),
    "a.mkv": film(sound=True),
    "transport.mp4": film(container="mpegts"),
    "cover last.mp4": film(sound=True, cover=jpeg()),
    "cover first.mp4": (lambda path: cover_first(film(sound=True, cover=jpeg())[0](path)), drawn()),
    "cover.mkv": film(cover=jpeg()),
    "default.mkv": film(second=np.zeros((9, 64, 128, 3), np.uint8)),
    "largest.mp4": film(pictures=np.zeros((9, 32, 64, 3), np.uint8), second=drawn(), default=(1, 1), like=drawn()),
    "upside down.mov": turned((-1, 0, 0, -1)),
    "narrow.mkv": film(aspect=Fraction(8, 9), like=as_shown(drawn(), aspect=Fraction(8, 9))),
    "narrow.mpg": film("mpeg2video", container="mpeg", aspect=NARROW, like=as_shown(drawn(), aspect=NARROW)),
    "wide quarter.mp4": turned((0, -1, 1, 0), Fraction(3, 2)),
    "one frame.mp4": film(pictures=drawn(1)),
    "odd.webm": film("libvpx-vp9", pictures=drawn(6, 45, 87), options=VPX),
    "odd.avi": film("mjpeg", "yuvj444p", pictures=drawn(6, 45, 87)),
    "uneven.mp4": film(times=VFR),
    "uneven.mkv": film(times=VFR),
    "vp8.webm": film("libvpx", options=VPX),
    "grey.mkv": film("ffv1", "gray"),
    "grey.mp4": film("libx264", "gray", options=SHARP | {"x264-params": "fullrange=on"}),
    "ten bits.mp4": film("libx264", "yuv420p10le", options=SHARP),
    "ten bits.mov": film("prores_ks", "yuv422p10le", options={}),
    "alpha.mov": film("png", "rgba", pictures=alpha(), like=drawn()),
    "alpha.mkv": film("ffv1", "bgra", pictures=alpha(), like=drawn()),
    "palette.gif": film("gif", "gray", options={}),
    "raw.avi": film("rawvideo", "yuv420p", options={}),
    "mpeg4.avi": film("mpeg4"),
    "program.mpeg": film("mpeg1video", container="mpeg"),
}
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty.mp4": (lambda path: path.touch(), "not a video that can be read"),
    "text.avi": (lambda path: path.write_text("no video\n" * 99), "not a video that can be read"),
    "zip.mov": (archive, "not a video that can be read"),
    "noise.mkv": (lambda path: path.write_bytes(bytes(range(256)) * 9), "not a video"),
    "no index.mp4": (without_index, "not a video that can be read"),
    "cut.mp4": (cut, "damaged, some frames cannot be decoded"),
    "no frames.mp4": (lambda path: encode(path, drawn(0)), "has no video stream"),
    "sound.mp4": (film(pictures=drawn(0), sound=True)[0], "has no video stream"),
    "sound.mkv": (film(pictures=drawn(0), sound=True)[0], "has no video stream"),
    "song.mp4": (film(pictures=drawn(0), sound=True, cover=jpeg())[0], "only an embedded picture"),
    "song.mkv": (film(pictures=drawn(0), sound=True, cover=jpeg())[0], "only an embedded picture"),
    "unknown.mp4": (unknown, "has a video stream of an unknown codec"),
    "slanted.mp4": (turned((1, 1, -1, 1))[0], "is turned by 45 degrees, expected a multiple of 90"),
    "pixels.mp4": (film(aspect=20)[0], "has pixels 20 times as wide as high"),
    "strip.mp4": (film(pictures=drawn(2, 2, 4000))[0], "has frames of 4000 x 2 pixels"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    for name, (write, _) in (GOOD | BAD).items():
        write(folder / name)
    return folder


def test_the_folder_has_every_ending(folder: Path) -> None:
    assert {path.suffix.lower() for path in find_videos(folder)} == {*ENDINGS}
    assert [path.name for path in find_videos(folder)] == sorted(GOOD | BAD)


@pytest.mark.parametrize("name", GOOD)
def test_a_good_video_is_what_was_drawn(folder: Path, name: str) -> None:
    path, right = folder / name, torch.from_numpy(GOOD[name][1]).float()
    reader = PyAVReader(path)
    frames = reader.frames(range(len(reader)))
    assert frames.shape == right.shape
    assert (frames.float() - right).abs().mean((1, 2, 3)).max() < 3
    assert torch.equal(quickest(reader, 1).frames([len(reader) - 1, 0]), frames[[-1, 0]])
    assert torch.equal(torch.stack([frame.picture for frame in VideoStream(path)]), frames)
    assert torch.equal(load(path, list(right.shape[1:3]), 99), frames)


def test_prediction_goes_through_the_folder(folder: Path) -> None:
    data = VideoData(str(folder), frames=4, size=16, input=str(folder))
    data.classes = ("film", "none")
    videos = {Path(video["path"]).name: video for video in data.predict_dataloader()}
    assert {name for name, video in videos.items() if "clips" in video} == {*GOOD}
    assert {name for name, video in videos.items() if "error" in video} == {*BAD}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_video_is_one_line(folder: Path, name: str) -> None:
    path, words = folder / name, BAD[name][1]
    refuses(lambda: load(path, [16], 99), path, words)
    if name == "cut.mp4":  # a stream gives what it can
        stream = VideoStream(path)
        assert 0 < len(list(stream)) < 30 and "damaged" in stream.damage
    else:
        refuses(lambda: list(VideoStream(path)), path)
