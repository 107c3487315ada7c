"""Where a reader may seek, and decord beside PyAV."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import ndlightnet.data.video as video
from ndlightnet.data.video import (
    DecordReader,
    PyAVReader,
    load_video,
    open_video,
)

from .video_files import (
    COUNT,
    OPEN,
    X264,
    bars,
    moving_bar,
    needs_decord,
)


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
    assert bars(load_video(path, [96], 2)) == [10, 30]
