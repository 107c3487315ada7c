"""Videos as they come: files and pipes give the same frames, at once, and damage is told."""

import io
import os
import select
import signal
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from ndlightnet.data.errors import DataError
from ndlightnet.data.video import video_stream
from ndlightnet.data.video.video_files import PyAVReader
from ndlightnet.data.video.video_stream import VideoStream

from .made_videos import HANGS, pour, write_film

FRAMES = 30


def encode(path: Path, frames: int = FRAMES, **flags: str) -> Path:
    """Noise (96 x 128 pixels, 25 a second, so that packets are large), a key frame every ten."""
    noise = np.random.default_rng(0).integers(0, 256, (frames, 96, 128, 3), dtype=np.uint8)
    return write_film(path, noise, options={"g": "10", "qp": "30", "bf": "2"}, flags=flags)


ENDINGS = ("mkv", "ts", "nut", "mp4")
WAYS = [(ending, pipe) for ending in ENDINGS for pipe in (False, True)][:-1]  # an mp4 cannot be read from a pipe


@pytest.mark.parametrize("ending, pipe", WAYS)
def test_frames_are_those_of_the_reader(tmp_path, ending, pipe):
    source = path = encode(tmp_path / f"a.{ending}")
    if pipe:
        source = tmp_path / "pipe"
        pour(path.read_bytes(), source)
    video = VideoStream(source)
    frames = list(video)
    assert [frame.number for frame in frames] == list(range(FRAMES)) and video.damage == ""
    assert [frame.time for frame in frames] == pytest.approx([k / 25 for k in range(FRAMES)])
    assert torch.equal(torch.stack([frame.picture for frame in frames]), PyAVReader(path).frames(range(FRAMES)))


@pytest.mark.parametrize("name", ["a.mkv", "a.ts"])
def test_frames_come_before_the_pipe_ends(tmp_path, name):
    pause = threading.Event()
    path = encode(tmp_path / name, 60)  # FFmpeg looks at 20 before it gives the first
    writer = pour(path.read_bytes(), tmp_path / "pipe", pause)
    for frame in VideoStream(tmp_path / "pipe"):
        if frame.number == 10:
            assert writer.is_alive() and not pause.is_set()
            pause.set()
    assert frame.number == 59


@pytest.mark.parametrize(
    "fps, numbers",
    [(10.0, [0, 3, 5, 8, 10, 13, 15, 18, 20, 23, 25, 28]), (25.0, range(30)), (60.0, range(30)), (0.5, [0])],
)
def test_frames_a_second(tmp_path, fps, numbers):
    found = list(VideoStream(encode(tmp_path / "a.mkv"), fps))
    assert [frame.number for frame in found] == list(numbers)
    assert [frame.time for frame in found] == pytest.approx([k / 25 for k in numbers])


def test_a_pipe_that_is_joined_late(tmp_path):
    """What comes before the first key frame is no damage."""
    data = encode(tmp_path / "a.ts").read_bytes()
    (tmp_path / "late.ts").write_bytes(data[len(data) // 188 // 6 * 188 :])
    video = VideoStream(tmp_path / "late.ts")
    found = list(video)
    assert len(found) in range(15, FRAMES) and video.damage == ""
    assert (found[0].number, found[0].time) == (0, 0.0)


@pytest.mark.parametrize("share", [0, 1])
def test_an_interrupt_ends_a_pipe_that_waits(tmp_path, monkeypatch, share):
    """PyAV swallows a KeyboardInterrupt in the read that it calls, and would read on."""
    data, pipe = encode(tmp_path / "a.mkv", 60).read_bytes(), tmp_path / "pipe"
    os.mkfifo(pipe)
    written, over = threading.Event(), threading.Event()

    class Interrupting(io.FileIO):
        """Ctrl-C comes when all that was written has been read; reading on ends the writer."""

        told = False

        def read(self, size=-1):
            if self.told:
                over.set()
            done = written.is_set()
            while not select.select([self], [], [], 0.01)[0]:
                if done and not self.told:
                    self.told = True
                    signal.raise_signal(signal.SIGINT)
                done = written.is_set()
            return super().read(size)

    reader = type("Reader", (video_stream._Pipe, Interrupting), {})
    monkeypatch.setattr(video_stream, "_Pipe", reader)

    def write() -> None:
        with open(pipe, "wb", 0) as file:
            file.write(data[: share * len(data) * 2 // 3])
            written.set()
            over.wait(HANGS)

    threading.Thread(target=write, daemon=True).start()
    frames, ended = 0, False
    # a process that a shell has put in the background ignores Ctrl-C, and so do those it starts
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with suppress(KeyboardInterrupt):
            video = VideoStream(pipe)
            assert share, "nothing came, so that there is nothing to show"
            for frame in video:
                frames = frame.number + 1
            ended = True
    finally:
        signal.signal(signal.SIGINT, before)
    assert not over.is_set()
    over.set()
    assert share == 0 or (frames > 30 and video.damage == "")
    assert ended == (share > 0)


@pytest.mark.parametrize("kind", ["cut", "hole"])
def test_damage_is_told_after_the_frames(tmp_path, kind):
    path = encode(tmp_path / "a.mp4", movflags="faststart")
    data = bytearray(path.read_bytes())
    half = len(data) // 2
    if kind == "cut":
        del data[half:]
    else:
        data[half : half + 20000] = bytes(20000)
    path.write_bytes(data)
    video = VideoStream(path)
    assert len(list(video)) in range(8, FRAMES)
    assert video.damage.startswith(f"{path}: damaged, ")


def test_what_is_no_video(tmp_path):
    (tmp_path / "text").write_text("no video " * 100)
    for message, *source in (
        (r"text: not a video that can be read$", tmp_path / "text"),
        ("gone: no such file", tmp_path / "gone"),
        ("Is a directory", tmp_path),
        ("fps=0", tmp_path / "text", 0),
    ):
        with pytest.raises(DataError, match=message):
            VideoStream(*source)
    for number, data in enumerate([b"", b"no video " * 100, encode(tmp_path / "a.mp4").read_bytes()]):
        writer = pour(data, tmp_path / f"pipe{number}")
        with pytest.raises(DataError, match=r"not a video .*a pipe needs a container such as"):
            list(VideoStream(tmp_path / f"pipe{number}"))
        writer.join(20)
