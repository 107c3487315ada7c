"""ClipDataset: clips of labelled videos, decoded when a batch needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ndlightnet.data.errors import DataError, fitting
from ndlightnet.data.frame_cache import FrameCache
from ndlightnet.data.video import Sample, load_video
from ndlightnet.data.video_transforms import Framing, eval_clips

TRIES = 16  # videos in a row that training tries in place of one that cannot be read
Item = tuple[Tensor, int, int, str]


def load_for_clips(path: str | Path, frames: int, framing: Framing) -> Tensor:
    """Read a video at the size that a network's clips need, in training and in prediction: (frames,
    height, width, 3) uint8.

    Four times as many frames are read as a clip takes (64 at least), so that random clips of one
    video differ.
    """
    return load_video(path, framing.stored, max_frames=max(64, 4 * frames))


class ClipDataset(torch.utils.data.Dataset[Item]):
    """Clips of labelled videos. Item i is (clips, label, i, problem).

    Without `draw` these are the clips of `eval_clips`, (clips * crops, 3, frames, size, size),
    always the same. With it, in training, it is one clip `draw(video)`, (3, frames, size, size); a
    video that cannot be read is replaced by the next good one, and `problem`, else "", names it.
    With `frames=1` a clip is a single frame.

    A video is decoded when it is needed, and held as bytes as long as there is room in `cache`: at
    size 112, 65 kB for each frame of 4:3, 64 frames or four times those of a clip.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        frames: int,
        framing: Framing,
        *,
        draw: Callable[[Tensor], Tensor] | None = None,
        clips: int = 1,
        crops: int = 1,
        cache: int = 2**32,
    ) -> None:
        if min(frames, framing.size, clips, crops) < 1:
            raise ValueError(
                f"frames, size, clips and crops start at 1, got {frames}, {framing.size}, {clips}, "
                f"{crops}"
            )
        self.samples, self.frames, self.framing = tuple(samples), frames, framing
        self.draw, self.clips, self.crops = draw, clips, crops
        self.cache = FrameCache(len(self.samples), cache)
        first: dict[Path, int] = {}  # a video that comes up several times is held once
        self.held = [first.setdefault(s.path, number) for number, s in enumerate(self.samples)]

    def __len__(self) -> int:
        return len(self.samples)

    def video(self, number: int) -> Tensor:
        """Return (frames, height, width, 3) uint8, as `load_for_clips` does."""
        video = self.cache.get(self.held[number])
        if video is None:
            path = self.samples[number].path
            with fitting(path):
                video = load_for_clips(path, self.frames, self.framing)
            self.cache.put(self.held[number], video)
        return video

    def __getitem__(self, index: int) -> Item:
        if self.draw is None:
            video, label = self.video(index), self.samples[index].label
            clips = eval_clips(video, self.frames, self.framing, self.clips, self.crops)
            return clips, label, index, ""
        problem = ""
        for number in range(index, index + TRIES):
            number %= len(self)
            try:
                return self.draw(self.video(number)), self.samples[number].label, number, problem
            except DataError as error:
                problem = problem or str(error)
        raise DataError(f"{problem}; nor can the {TRIES - 1} videos after it be read")
