"""Videos that the tests write: frames that tell their numbers, and a bar that moves."""

import io
import os
import struct
import threading
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from ndlightnet.data.video.video_decoders import decoders
from ndlightnet.data.video.video_files import PyAVReader, SeekingReader, ThinVideo, quickest

HEIGHT, WIDTH, FRAMES = 48, 128, 50
SEEKING = bool(decoders())
each_decoder = pytest.mark.parametrize("decoder", decoders())  # none here: skipped
# codec, options, file name, container: one row each for the containers and for what misled readers
# that seek. quality 236: two quantiser steps, for codecs without x264's qp.
X264 = {"g": "12", "bf": "2", "qp": "15"}
MPEG = {"g": "12", "bf": "2", "flags": "+qscale", "global_quality": "236"}
OPEN = {"x264-params": "open-gop=1:keyint=12:bframes=3:scenecut=0", "qp": "15"}
STEP, BAR, COUNT = 4, 8, 40
HANGS = 600  # seconds after which a test that would never end is ended


FAST = {"movflags": "faststart"}


def encode(path: Path, pictures: np.ndarray, **options: str) -> Path:
    """(frames, height, width, 3) uint8 -> H.264."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_film(path, pictures, options={"qp": "10", **options}, flags=FAST)


def load(path: Path, size: Sequence[int], max_frames: int) -> Tensor:
    """All frames of a `ThinVideo`."""
    return ThinVideo(path, size, max_frames)[:]


def write_film(
    path: Path,
    pictures: np.ndarray,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    *,
    container: str | None = None,
    options: dict[str, str] | None = None,
    flags: dict[str, str] | None = None,
    aspect: Fraction | int = 1,
    times: Sequence[int] | None = None,
    second: np.ndarray | None = None,
    default: Sequence[int] = (1, 0),
    rotation: tuple[int, bool] = (0, False),
    sound: bool = False,
    cover: bytes = b"",
) -> Path:
    """Films (frames, height, width, 3 or 4) uint8 of `codec`, 25 frames a second, in one file.

    options, flags: of codec and container; aspect: of pixels, width / height; times: of frames, of
    25 a second; second: another film; default: the default flags of the two; rotation: degrees
    anticlockwise, and whether it is mirrored; sound: with silence; cover: a JPEG of 640 x 480. No
    pictures: sound or cover alone, or a film without frames.
    """
    films = [p for p in (pictures, second) if p is not None and (len(p) or not (sound or cover))]
    with av.open(str(path), "w", format=container, options=flags or {}) as file:
        encoders = []
        for film, flag in zip(films, default, strict=False):
            stream = file.add_stream(codec, rate=25)
            stream.height, stream.width = film.shape[1:3]
            stream.pix_fmt, stream.options = pix_fmt, options or {}
            stream.codec_context.sample_aspect_ratio = Fraction(aspect)
            stream.codec_context.thread_count = 1
            if rotation != (0, False):
                stream.set_display_rotation(rotation[0], hflip=rotation[1])
            if len(films) > 1:
                stream.disposition = flag * av.stream.Disposition.default.value
            encoders.append(stream)
        if films and not len(films[0]):
            file.start_encoding()
            return path
        silence = (
            file.add_stream("flac" if path.suffix == ".flac" else "aac", rate=8000, layout="mono") if sound else None
        )
        if cover and path.suffix == ".mkv":
            file.add_attachment("cover.jpg", "image/jpeg", cover)
        elif cover:
            picture = file.add_stream("mjpeg", rate=1)
            picture.width, picture.height, picture.pix_fmt = 640, 480, "yuvj420p"
            picture.disposition = av.stream.Disposition.attached_pic.value
        for stream, film in zip(encoders, films, strict=True):
            for number, rgb in enumerate(film):
                form = "rgb24" if film.shape[-1] == 3 else "rgba"
                frame = av.VideoFrame.from_ndarray(rgb, format=form)
                frame.pts = number if times is None else times[number]
                file.mux(stream.encode(frame))
            file.mux(stream.encode())
        if silence is not None:
            samples = av.AudioFrame.from_ndarray(np.zeros((1, 4096), "i2"), "s16", "mono")
            samples.sample_rate = 8000
            file.mux(silence.encode(samples))
            file.mux(silence.encode())
        if cover and path.suffix != ".mkv":
            packet = av.Packet(cover)
            packet.stream, packet.pts, packet.dts = picture, 0, 0
            file.mux(packet)
    return path


def jpeg() -> bytes:
    """A red picture of 640 x 480 pixels."""
    data = io.BytesIO()
    Image.new("RGB", (640, 480), (255, 0, 0)).save(data, "JPEG")
    return data.getvalue()


def cover_first(path: Path) -> Path:
    """Move the tags of an mp4, with its cover, before its tracks, as tag writers do."""

    def atoms(data: bytes) -> list[bytes]:
        parts, start = [], 0
        while start < len(data):
            size = struct.unpack(">I", data[start : start + 4])[0]
            parts.append(data[start : start + size])
            start += size
        return parts

    whole = atoms(path.read_bytes())
    at = next(number for number, part in enumerate(whole) if part[4:8] == b"moov")
    inner = sorted(atoms(whole[at][8:]), key=lambda part: part[4:8] != b"udta")
    whole[at] = whole[at][:8] + b"".join(inner)
    path.write_bytes(b"".join(whole))
    return path


# (a, b, c, d) of a display matrix: the pixel (x, y) is shown at (a x + c y, b x + d y)
MATRICES = [(a, 0, 0, d) for a in (1, -1) for d in (1, -1)]
MATRICES += [(0, b, c, 0) for b in (1, -1) for c in (1, -1)]


def set_matrix(path: Path, matrix: Sequence[float]) -> Path:
    """Overwrite the display matrix of an mp4's first track (ISO 14496-12, tkhd)."""
    data = bytearray(path.read_bytes())
    a, b, c, d = (round(value * (1 << 16)) for value in matrix)
    place = data.index(b"tkhd") + 44
    data[place : place + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(data)
    return path


def as_shown(pictures: np.ndarray, matrix: Sequence[int] = (1, 0, 0, 1), aspect: Fraction | int = 1) -> np.ndarray:
    """Stored pictures (frames, height, width, 3) made wider by Pillow, each pixel then put where the matrix says."""
    height, width = pictures.shape[1:3]
    size = (round(width * aspect), height)
    wide = np.stack([np.asarray(Image.fromarray(one).resize(size, Image.Resampling.BILINEAR)) for one in pictures])
    (y, x), (a, b, c, d) = np.mgrid[:height, : size[0]], matrix
    right, down = a * x + c * y, b * x + d * y
    right, down = right - right.min(), down - down.min()
    shown = np.zeros((len(wide), down.max() + 1, right.max() + 1, 3), np.uint8)
    shown[:, down, right] = wide
    return shown


def decoded(path: Path, stream: int = 0) -> np.ndarray:
    """The frames of a video stream as they are stored, by PyAV alone."""
    with av.open(str(path)) as file:
        frames = list(file.decode(video=stream))
        size = {"width": frames[0].width, "height": frames[0].height, "format": "rgb24"}
        return np.stack([frame.reformat(**size).to_ndarray() for frame in frames])


def pour(data: bytes, pipe: Path, pause: threading.Event | None = None) -> threading.Thread:
    """A writer of `data` into a new pipe, which halts after two thirds until `pause` is set."""

    def write() -> None:
        with open(pipe, "wb", 0) as file:
            file.write(data[: len(data) * 2 // 3])
            if pause is not None:
                pause.wait(HANGS)
            file.write(data[len(data) * 2 // 3 :])

    os.mkfifo(pipe)
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    return writer


def open_video(path: Path, wanted: int) -> PyAVReader | SeekingReader:
    return quickest(PyAVReader(path), wanted)


def counting(frames: int = FRAMES, height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """Frame k has the brightness 4 k + 20."""
    levels = 4 * np.arange(frames, dtype=np.uint8) + 20
    return np.broadcast_to(levels[:, None, None, None], (frames, height, width, 3)).copy()


def numbers(frames: Tensor) -> list[int]:
    """The inverse of `counting`, of frames (..., frames, height, width, 3)."""
    return [round((frame.float().mean().item() - 20) / 4) for frame in frames]


def moving_bar(path: Path, codec: str, options: dict[str, str], container: str | None, still: int = 0) -> Path:
    """A bar that moves by STEP pixels from frame to frame, from the frame `still` on."""
    if codec not in av.codecs_available:
        pytest.skip(f"this PyAV has no {codec}")
    pictures = np.full((COUNT, 96, STEP * COUNT + 2 * BAR, 3), 30, np.uint8)
    for number, picture in enumerate(pictures):
        place = STEP * max(number, still)
        picture[:, place : place + BAR] = 230
    return write_film(path, pictures, codec, options=options, container=container)


def remux(source: Path, path: Path, first: int = 0, early: int = 0, title: str = "", rotate: str = "") -> Path:
    """The packets of `source` from `first` on, `early` frames earlier, with a title or a tag "rotate"."""
    with av.open(str(source)) as old, av.open(str(path), "w") as new:
        stream = new.add_stream_from_template(old.streams.video[0])
        new.metadata["title"], stream.metadata["rotate"] = title, rotate
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
