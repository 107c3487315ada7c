"""Videos that the tests write: frames that tell their numbers, and a bar that moves."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest
import torch
from torch import Tensor

from ndlightnet.data.video import PyAVReader, SeekingReader, quickest
from ndlightnet.data.video_decoders import decoders

HEIGHT, WIDTH, FRAMES = 48, 128, 50
SEEKING = bool(decoders())
each_decoder = pytest.mark.parametrize("decoder", decoders())  # none here: skipped
# codec, options, file name, container: one row each for the containers and for what misled readers
# that seek. quality 236: two quantiser steps, for codecs without x264's qp.
X264 = {"g": "12", "bf": "2", "qp": "15"}
MPEG = {"g": "12", "bf": "2", "flags": "+qscale", "global_quality": "236"}
OPEN = {"x264-params": "open-gop=1:keyint=12:bframes=3:scenecut=0", "qp": "15"}
STEP, BAR, COUNT = 4, 8, 40


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


def open_video(path: Path, wanted: int) -> PyAVReader | SeekingReader:
    return quickest(PyAVReader(path), wanted)


def counting(frames: int = FRAMES, height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """Frame k has the brightness 4 k + 20."""
    levels = 4 * np.arange(frames, dtype=np.uint8) + 20
    return np.broadcast_to(levels[:, None, None, None], (frames, height, width, 3)).copy()


def numbers(frames: Tensor) -> list[int]:
    """The inverse of `counting`, of frames (..., frames, height, width, 3)."""
    return [round((frame.float().mean().item() - 20) / 4) for frame in frames]


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
