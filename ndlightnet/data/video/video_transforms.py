"""Transforms from a decoded video to the clips that a network gets.

A video is (frames, height, width, 3) uint8 RGB; a clip is (3, frames, size, size) float32 of
roughly zero mean and unit variance. Every random choice is made once per clip, so that all of its
frames are cropped, flipped and coloured alike; it is drawn from torch's global generator, which
`ndlightnet.data.sampling.SeededSamples` seeds for every clip. Batches are mixed on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torchvision.transforms import v2

from ndlightnet.data.errors import DataError
from ndlightnet.data.image import image_transforms

MEAN, STD = 0.45, 0.225  # of pixels in [0, 1]: round numbers, close to most natural video
LONGEST = 16  # largest long side / short side of a video: `Framing` may set only the short one
MARGIN = 8 / 7  # short side of a video / side of the clips that are cropped from it
SHORTEST_SPAN = 0.5  # a training clip spans at least this share of its video, at most all of it
CropMode = Literal["center", "squash"]


class Frames(Protocol):
    """A video (frames, height, width, 3) uint8: a tensor, or one that decodes what is taken."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: Tensor, /) -> Tensor: ...


def even_indices(length: int, frames: int, phase: float = 0.5) -> Tensor:
    """Return the indices (frames,) int64 of one frame of each of `frames` equal parts of `length`.

    `phase` in [0, 1) is the position of the frame in its part. If the video has fewer frames than
    `frames`, its frames are repeated; the numbers of repeats differ by at most one.
    """
    places = (torch.arange(frames, dtype=torch.float64) + phase) / frames
    return (places * length).long().clamp(max=length - 1)


def random_indices(length: int, frames: int) -> Tensor:
    """Return indices as `even_indices`, jittered and within a random span of the video; sorted.

    The span is between SHORTEST_SPAN and all of the video and lies anywhere in it; each of its
    `frames` equal parts gives one frame, at a random position in the part.
    """
    share, start = (float(draw) for draw in torch.rand(2, dtype=torch.float64))
    span = (SHORTEST_SPAN + (1 - SHORTEST_SPAN) * share) * length
    places = (torch.arange(frames) + torch.rand(frames, dtype=torch.float64)) / frames
    return (places * span + start * (length - span)).long().clamp(max=length - 1)


def train_clip(video: Frames, frames: int, transform: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a random clip (3, frames, size, size) of a video (any, height, width, 3) uint8: of a
    random span in time, with a random `transform` of `training`, one for all frames."""
    clip = video[random_indices(len(video), frames)].permute(0, 3, 1, 2)
    return _to_clip(transform(clip))


def plain_clip(video: Frames, frames: int, framing: Framing, hflip: bool = False) -> Tensor:
    """Return the clip (3, frames, size, size) of `eval_clips`, with `hflip` flipped half of the time."""
    (clip,) = eval_clips(video, frames, framing)
    return v2.RandomHorizontalFlip()(clip) if hflip else clip


def training(size: int, *, hflip: bool = False, **options: Any) -> Callable[[Tensor], Tensor]:
    """Return the transform of training clips, (frames, 3, height, width) uint8 -> (frames, 3, size, size);
    `options` are those of `image_transforms.training`."""
    fill = [round(255 * MEAN)] * 3
    return image_transforms.training((size, size), "bilinear", hflip=0.5 * hflip, fill=fill, **options)


@dataclass(frozen=True)
class Framing:
    """How frames of any size become squares, `size` pixels a side; modes have timm's names. center:
    the short side is made 8/7 of `size`, and the sides are cut off. squash: the whole frame is
    resized, its sides by different factors."""

    size: int
    mode: CropMode = "center"

    @property
    def stored(self) -> list[int]:
        """The size of the frames that clips are cut from, for `shrink`: larger by MARGIN."""
        side = round(self.size * MARGIN)
        return [side, side] if self.mode == "squash" else [side]

    def crop(self, frames: Tensor, place: float = 0.5) -> Tensor:
        """Return squares (frames, 3, size, size) of frames of the size `stored`, in mode "center"
        cut at `place` along the long side: 0 at its start, 0.5 in the middle, 1 at its end."""
        frames, size = frames.permute(0, 3, 1, 2), self.size
        if self.mode == "squash":
            return v2.functional.resize(frames, [size, size], antialias=True)
        height, width = frames.shape[-2:]
        down, right = (place, 0.5) if height > width else (0.5, place)
        top, left = round(down * (height - size)), round(right * (width - size))
        return v2.functional.crop(frames, top, left, size, size)


def eval_clips(video: Frames, frames: int, framing: Framing, clips: int = 1, crops: int = 1) -> Tensor:
    """Return the clips to evaluate a video on, (clips * crops, 3, frames, size, size); none is
    random. video: of the size `framing.stored`.

    Each clip covers the whole video, and the clips are staggered evenly: together they take
    clips * frames evenly spaced frames. crops: 1: from the middle; 3: and from both ends of the long side.
    """
    taken = [even_indices(len(video), frames, (clip + 0.5) / clips) for clip in range(clips)]
    places = [0.5] if crops == 1 else [crop / (crops - 1) for crop in range(crops)]
    pictures = video[torch.cat(taken)]  # at once: each frame is decoded once
    squares = [framing.crop(pictures, place) for place in places]
    return torch.stack([_to_clip(clip) for square in squares for clip in square.split(frames)])


def frame_differences(clips: Tensor, previous: Tensor | None = None) -> Tensor:
    """Return twice the difference of each frame of normalised clips (..., frames, height, width)
    from the one before: about as spread as the frames. previous: the frame before the first one,
    (..., 1, height, width); default: the first one itself, so that its difference is 0."""
    first = clips[..., :1, :, :] if previous is None else previous
    return 2 * (clips - torch.cat([first, clips[..., :-1, :, :]], -3))


def check_sides(name: object, frames: Tensor) -> None:
    """Raise DataError if frames (..., height, width, 3) of the video `name` are so narrow that
    `shrink` might make them huge."""
    height, width = frames.shape[-3:-1]
    if max(height, width) > LONGEST * min(height, width):
        raise DataError(
            f"{name}: has frames of {width} x {height} pixels, expected a long side of at most "
            f"{LONGEST} times the short one"
        )


def shrink(frames: Tensor, size: Sequence[int]) -> Tensor:
    """Resize (frames, height, width, 3) uint8 to this short side, or to [height, width]."""
    frames = v2.functional.resize(frames.permute(0, 3, 1, 2), list(size), antialias=True)
    return frames.permute(0, 2, 3, 1).contiguous()


def eval_frames(frames: Tensor, framing: Framing) -> Tensor:
    """Return all decoded frames (frames, height, width, 3) uint8, resized, cropped and normalised
    as by `eval_clips`: (3, frames, size, size)."""
    return _to_clip(framing.crop(shrink(frames, framing.stored)))


def to_pixels(clip: Tensor) -> Tensor:
    """Undo the normalisation, for pictures: (3, frames, h, w) -> (frames, h, w, 3) uint8."""
    return denormalized(clip).permute(1, 2, 3, 0)


def denormalized(clips: Tensor) -> Tensor:
    """Undo the normalisation of a tensor of any shape: uint8 of this shape, clipped."""
    return ((clips.float() * STD + MEAN) * 255).round().clamp(0, 255).to(torch.uint8)


def normalized(pixels: Tensor) -> Tensor:
    """Normalise uint8 pixels of any shape, as those of a clip."""
    layout: Any = {"memory_format": torch.contiguous_format, "copy": True}
    return pixels.to(torch.float32, **layout).mul_(1 / (255 * STD)).sub_(MEAN / STD)


def _to_clip(pixels: Tensor) -> Tensor:
    """Normalise (frames, 3, height, width) uint8 to (3, frames, height, width) float32."""
    return normalized(pixels.transpose(0, 1))
