"""Transforms from a decoded video to the clips that a network gets.

A video is (frames, height, width, 3) uint8 RGB; a clip is (3, frames, size, size) float32 of
roughly zero mean and unit variance. Every random choice is made once per clip, so that all of its
frames are cropped, flipped and coloured alike; it is drawn from torch's global generator, which
`ndlightnet.data.visits.Visits` seeds for every clip.
"""

from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import v2

from ndlightnet.data.errors import DataError

MEAN, STD = 0.45, 0.225  # of pixels in [0, 1]: round numbers, close to most natural video
LONGEST = 16  # largest long side / short side of a video: `shrink` sets only the short one
MARGIN = 8 / 7  # short side of a video / side of the clips that are cropped from it
SHORTEST_SPAN = 0.5  # a training clip spans at least this share of its video, at most all of it


def even_indices(length: int, frames: int, phase: float = 0.5) -> Tensor:
    """Return the indices (frames,) int64 of one frame of each of `frames` equal parts of `length`.

    `phase` in [0, 1) is the position of the frame in its part. If the video has fewer frames than
    `frames`, its frames are repeated; the numbers of repeats differ by at most one.
    """
    parts = (torch.arange(frames, dtype=torch.float64) + phase) / frames
    return (parts * length).long().clamp(max=length - 1)


def random_indices(length: int, frames: int) -> Tensor:
    """Return indices as `even_indices`, jittered and within a random span of the video; sorted.

    The span is between SHORTEST_SPAN and all of the video and lies anywhere in it; each of its
    `frames` equal parts gives one frame, at a random position in the part.
    """
    share, start = (float(draw) for draw in torch.rand(2, dtype=torch.float64))
    span = (SHORTEST_SPAN + (1 - SHORTEST_SPAN) * share) * length
    parts = (torch.arange(frames) + torch.rand(frames, dtype=torch.float64)) / frames
    return (parts * span + start * (length - span)).long().clamp(max=length - 1)


def train_clip(video: Tensor, frames: int, size: int, hflip: bool = False) -> Tensor:
    """Return a random clip (3, frames, size, size) of a video (any, height, width, 3) uint8.

    It has a random span in time, a random crop of 0.5-1 of the area, a mild change of colour and,
    only with `hflip`, a flip half of the time (off by default: left or right can be the class).
    """
    clip = video[random_indices(len(video), frames)].permute(0, 3, 1, 2)
    clip = v2.RandomResizedCrop(size, scale=(0.5, 1.0), antialias=True)(clip)
    if hflip:
        clip = v2.RandomHorizontalFlip()(clip)
    return _jitter(_to_clip(clip))


def plain_clip(video: Tensor, frames: int, size: int, hflip: bool = False) -> Tensor:
    """Return the clip (3, frames, size, size) of `eval_clips`, with `hflip` flipped half of the
    time."""
    (clip,) = eval_clips(video, frames, size)
    return v2.RandomHorizontalFlip()(clip) if hflip else clip


def eval_clips(video: Tensor, frames: int, size: int, clips: int = 1) -> Tensor:
    """Return the clips to evaluate a video on, (clips, 3, frames, size, size); none is random.

    Each clip covers the whole video, and the clips are staggered evenly: together they take
    clips * frames evenly spaced frames. The crop is the centre.
    """
    pixels = _centre(video, size)
    phases = [(clip + 0.5) / clips for clip in range(clips)]
    taken = [pixels[even_indices(len(video), frames, phase)] for phase in phases]
    return torch.stack([_to_clip(clip) for clip in taken])


def check_sides(name: object, frames: Tensor) -> None:
    """Raise DataError if frames (..., height, width, 3) of the video `name` are so narrow that
    `shrink` would make them huge."""
    height, width = frames.shape[-3:-1]
    if max(height, width) > LONGEST * min(height, width):
        raise DataError(
            f"{name}: has frames of {width} x {height} pixels, expected a long side of at most "
            f"{LONGEST} times the short one"
        )


def shrink(frames: Tensor, short_side: int) -> Tensor:
    """Resize (frames, height, width, 3) uint8 to this short side; see MARGIN."""
    frames = v2.functional.resize(frames.permute(0, 3, 1, 2), [short_side], antialias=True)
    return frames.permute(0, 2, 3, 1).contiguous()


def eval_frames(frames: Tensor, size: int) -> Tensor:
    """Return all decoded frames (frames, height, width, 3) uint8, resized, cropped and normalised
    as by `eval_clips`: (3, frames, size, size)."""
    return _to_clip(_centre(shrink(frames, round(size * MARGIN)), size))


def to_pixels(clip: Tensor) -> Tensor:
    """Undo the normalisation, for pictures: (3, frames, h, w) -> (frames, h, w, 3) uint8."""
    return denormalized(clip).permute(1, 2, 3, 0)


def denormalized(clips: Tensor) -> Tensor:
    """Undo the normalisation of a tensor of any shape: uint8 of this shape, clipped."""
    return ((clips.float() * STD + MEAN) * 255).round().clamp(0, 255).to(torch.uint8)


def normalized(pixels: Tensor) -> Tensor:
    """Normalise uint8 pixels of any shape, as those of a clip."""
    how: Any = {"memory_format": torch.contiguous_format, "copy": True}
    return pixels.to(torch.float32, **how).mul_(1 / (255 * STD)).sub_(MEAN / STD)


def _centre(frames: Tensor, size: int) -> Tensor:
    """Crop the centre: (frames, height, width, 3) uint8 -> (frames, 3, size, size)."""
    return v2.functional.center_crop(frames.permute(0, 3, 1, 2), [size, size])


def _to_clip(pixels: Tensor) -> Tensor:
    """Normalise (frames, 3, height, width) uint8 to (3, frames, height, width) float32."""
    return normalized(pixels.transpose(0, 1))


def _jitter(clip: Tensor) -> Tensor:
    """Change contrast, brightness and tint by one affine map for each colour, in place."""
    contrast = 0.8 + 0.4 * torch.rand(())
    brightness = 0.6 * torch.rand(()) - 0.3  # in standard deviations: 0.3 are 17 grey levels
    tint = 0.2 * torch.rand(3, 1, 1, 1) - 0.1
    shift = (1 - contrast) * clip.mean() + brightness + tint  # contrast is about the mean
    return clip.mul_(contrast).add_(shift)
