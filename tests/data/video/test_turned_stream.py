"""A film that was taken with a turned camera, as it arrives through a pipe."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest
import torch

from ndlightnet.data.video.film import Display
from ndlightnet.data.video.video_stream import VideoStream

from .made_videos import decoded, pour


@pytest.mark.parametrize("quarters", range(4))
def test_a_pipe_turns_the_pictures(tmp_path: Path, quarters: int) -> None:
    """Anticlockwise, as numpy does. Each corner of a picture has another colour."""
    corners = np.array([[[230, 20, 20], [20, 230, 20]], [[20, 20, 230], [230, 230, 20]]], np.uint8)
    picture, path = corners.repeat(32, 0).repeat(48, 1), tmp_path / "a.mkv"
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=25)
        stream.height, stream.width, stream.pix_fmt = 64, 96, "yuv420p"
        stream.set_display_rotation(90 * quarters)
        for _ in range(30):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        file.mux(stream.encode())
    right = np.rot90(decoded(path), quarters, axes=(1, 2))
    writer = pour(path.read_bytes(), tmp_path / "pipe")
    shown = torch.stack([frame.picture for frame in VideoStream(tmp_path / "pipe")])
    writer.join(20)
    assert torch.equal(shown, torch.from_numpy(right.copy()))
    error = np.rot90(picture, quarters).astype(int) - shown[0].numpy()  # what encoding does to it
    assert np.abs(error[8, 8]).max() < 20 and np.abs(error[-8, 8]).max() < 20


@pytest.mark.parametrize("matrix", [False, True])
@pytest.mark.parametrize("degrees", [0, 90, 180, -90])
def test_both_ways_in_which_a_frame_says_how_it_is_turned(degrees: int, matrix: bool) -> None:
    """Its display matrix, and where PyAV cannot read that, its rotation: anticlockwise, in degrees."""
    turn = np.radians(degrees)
    a, b, c, d = (round(65536 * value) for value in (np.cos(turn), -np.sin(turn), np.sin(turn), np.cos(turn)))

    class Frame:
        rotation = degrees

        @property
        def side_data(self) -> dict[str, bytes]:
            if not matrix:
                raise ValueError("31 is not a valid Type")
            return {"DISPLAYMATRIX": np.array([a, b, 0, c, d, 0, 0, 0, 1 << 30], np.int32).tobytes()}

    frames = torch.arange(2 * 3 * 4 * 3, dtype=torch.uint8).reshape(2, 3, 4, 3)
    display = Display().oriented(Frame(), "a.mp4")
    assert torch.equal(display(frames), torch.rot90(frames, degrees // 90, (1, 2)))
