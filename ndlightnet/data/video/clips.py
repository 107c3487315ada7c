"""ClipDataset: clips of labelled videos, decoded when a batch needs them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ndlightnet.data.errors import first_good, fitting
from ndlightnet.data.video.frame_cache import FrameCache
from ndlightnet.data.video.video_files import Sample, ThinVideo
from ndlightnet.data.video.video_transforms import Frames, Framing, eval_clips

Item = tuple[Tensor, int, int, str]


def open_for_clips(path: str | Path, frames: int, framing: Framing, device: str = "cpu") -> ThinVideo:
    """Open a video at the size that a network's clips need, in training and in prediction.

    It has four times as many frames as a clip takes (64 at least), so that random clips of one
    video differ; those that a clip takes are decoded, on `device`.
    """
    return ThinVideo(path, framing.stored, max(64, 4 * frames), device)


class ClipDataset(torch.utils.data.Dataset[Item]):
    """Clips of labelled videos. Item i is (clips, label, i, problem).

    Without `draw` these are the clips of `eval_clips`, (clips * crops, 3, frames, size, size), always the same. With
    it, in training, it is one clip `draw(video)`, (3, frames, size, size); a video that cannot be read is replaced by
    the next good one, and `problem`, else "", names it. With `frames=1` a clip is a single frame.

    A video is decoded when it is needed, and held as bytes as long as there is room in `cache`: at size 112, 65 kB for
    each frame of 4:3, 64 frames or four times those of a clip. Without room only the frames of the clip are decoded:
    the same ones, but damage elsewhere is not noticed. `device`: of `open_for_clips`.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        frames: int,
        framing: Framing,
        *,
        draw: Callable[[Frames], Tensor] | None = None,
        clips: int = 1,
        crops: int = 1,
        cache: int = 2**32,
        device: str = "cpu",
    ) -> None:
        if min(frames, framing.size, clips, crops) < 1:
            raise ValueError(
                f"frames, size, clips and crops start at 1, got {frames}, {framing.size}, {clips}, {crops}"
            )
        self.samples, self.frames, self.framing = tuple(samples), frames, framing
        self.draw, self.clips, self.crops, self.device = draw, clips, crops, device
        self.cache = FrameCache(len(self.samples), cache)
        first: dict[Path, int] = {}  # a video that comes up several times is held once
        self.held = [first.setdefault(s.path, number) for number, s in enumerate(self.samples)]

    def __len__(self) -> int:
        return len(self.samples)

    def video(self, number: int) -> Frames:
        """Return a video, decoded if it is held, or else to be decoded."""
        held = self.held[number]
        if (video := self.cache.get(held)) is not None:
            return video
        path = self.samples[number].path
        opened = open_for_clips(path, self.frames, self.framing, self.device)
        if not self.cache.fits(math.prod(opened.shape)):
            return opened
        video = opened[:]
        self.cache.put(held, video)
        return video

    def clip(self, number: int) -> Tensor:
        """Return the clips of a video, or in training a random one."""
        with fitting(self.samples[number].path):
            video = self.video(number)
            if self.draw is not None:
                return self.draw(video)
            return eval_clips(video, self.frames, self.framing, self.clips, self.crops)

    def __getitem__(self, index: int) -> Item:
        if self.draw is None:
            return self.clip(index), self.samples[index].label, index, ""
        clip, number, problem = first_good(self.clip, index, len(self))
        return clip, self.samples[number].label, number, problem
