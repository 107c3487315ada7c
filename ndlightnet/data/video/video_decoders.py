"""Decoders that seek, each where it is installed: torchcodec, and decord.

Both convert colours as PyAV does on a CPU: `SeekingReader` checks that they find the same frames.
"""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class TorchCodec:
    """An open video: `len` in frames, and `video[numbers]`, (frames, height, width, 3) uint8 RGB.

    With a CUDA device the card decodes (NVDEC) what it can, and the frames lie there; its colours
    differ by a few levels. Any error of torchcodec is passed on.
    """

    def __init__(self, path: Path, device: str = "cpu") -> None:
        from torchcodec.decoders import VideoDecoder

        self._video: Any = VideoDecoder(str(path), dimension_order="NHWC", device=device)

    def __len__(self) -> int:
        return len(self._video)

    def __getitem__(self, numbers: list[int]) -> Tensor:
        return self._video.get_frames_at(numbers).data


class Decord:
    """The same by decord, which decodes on the CPU whatever the device. It has no packages for ARM."""

    def __init__(self, path: Path, device: str = "cpu") -> None:
        import decord

        self._video: Any = decord.VideoReader(str(path), num_threads=1)

    def __len__(self) -> int:
        return len(self._video)

    def __getitem__(self, numbers: list[int]) -> Tensor:
        return torch.from_numpy(self._video.get_batch(numbers).asnumpy())


Decoder = type[TorchCodec] | type[Decord]


@cache  # torchcodec looks for FFmpeg for a while before it gives up
def decoders() -> tuple[Decoder, ...]:
    """Return those that can be used here, the quickest first."""
    usable: list[Decoder] = []
    for module, decoder in (("torchcodec.decoders", TorchCodec), ("decord", Decord)):
        try:
            import_module(module)
        except (ImportError, OSError, RuntimeError):  # torchcodec without FFmpeg's libraries
            continue
        usable.append(decoder)
    return tuple(usable)
