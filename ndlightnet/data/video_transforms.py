"""From a decoded video to the clips that a network sees.

A video is (frames, height, width, 3) uint8 RGB; a clip is (3, frames, size, size) float32 of
roughly zero mean and unit variance. Every random choice is made once for a clip, so that all of its
frames are cropped, flipped and coloured alike; it is drawn from torch's global generator, which
`ndlightnet.data.visits.Visits` seeds for every clip.
"""

import torch
from torch import Tensor
from torchvision.transforms import v2

from ndlightnet.data.errors import DataError

MEAN, STD = 0.45, 0.225  # of pixels in [0, 1]: round numbers that most natural video is near to
LONGEST = 16  # long side / short side of a video, at most: the short one is given a size
MARGIN = 8 / 7  # short side of a video / side of the clips that are cropped from it
SHORTEST_SPAN = 0.5  # a training clip spans at least this share of its video, at most all of it


def even_indices(length: int, frames: int, phase: float = 0.5) -> Tensor:
    """Which of `length` frames to take: one out of each of `frames` equal parts, (frames,) int64.

    `phase` in [0, 1) says where in its part a frame lies. Where the video has fewer frames than
    `frames`, each is repeated, equally often up to one.
    """
    parts = (torch.arange(frames, dtype=torch.float64) + phase) / frames
    return (parts * length).long().clamp(max=length - 1)


def random_indices(length: int, frames: int) -> Tensor:
    """As `even_indices`, but jittered and within a random span of the video; sorted.

    The span is between SHORTEST_SPAN and all of the video and lies anywhere in it; each of its
    `frames` equal parts gives one frame, at a random place in the part.
    """
    share, start = (float(draw) for draw in torch.rand(2, dtype=torch.float64))
    span = (SHORTEST_SPAN + (1 - SHORTEST_SPAN) * share) * length
    parts = (torch.arange(frames) + torch.rand(frames, dtype=torch.float64)) / frames
    return (parts * span + start * (length - span)).long().clamp(max=length - 1)


def train_clip(video: Tensor, frames: int, size: int, hflip: bool = False) -> Tensor:
    """One random clip (3, frames, size, size) of a video (any, height, width, 3) uint8.

    A random span in time, a random crop of 0.5-1 of the area, a mild change of colour, and, only
    with `hflip`, a mirror image every other time (off by default: left or right can be the class).
    """
    clip = video[random_indices(len(video), frames)].permute(0, 3, 1, 2)
    clip = v2.RandomResizedCrop(size, scale=(0.5, 1.0), antialias=True)(clip)
    if hflip:
        clip = v2.RandomHorizontalFlip()(clip)
    return _jitter(_to_clip(clip))


def eval_clips(video: Tensor, frames: int, size: int, clips: int = 1) -> Tensor:
    """The clips that a video is judged by, (clips, 3, frames, size, size); nothing is random.

    Each clip runs over the whole video, and they are staggered evenly: together they take
    clips * frames evenly spaced frames. The crop is the centre.
    """
    pixels = _centre(video, size)
    phases = [(clip + 0.5) / clips for clip in range(clips)]
    taken = [pixels[even_indices(len(video), frames, phase)] for phase in phases]
    return torch.stack([_to_clip(clip) for clip in taken])


def check_sides(name: object, frames: Tensor) -> None:
    """DataError for frames (..., height, width, 3) of a video of this name that are so narrow that
    `shrink` would make them huge."""
    height, width = frames.shape[-3:-1]
    if max(height, width) > LONGEST * min(height, width):
        raise DataError(
            f"{name}: has frames of {width} x {height} pixels, expected a long side of at most "
            f"{LONGEST} times the short one"
        )


def shrink(frames: Tensor, short_side: int) -> Tensor:
    """(frames, height, width, 3) uint8 at the size that a video is kept in; see MARGIN."""
    frames = v2.functional.resize(frames.permute(0, 3, 1, 2), [short_side], antialias=True)
    return frames.permute(0, 2, 3, 1).contiguous()


def eval_frames(frames: Tensor, size: int) -> Tensor:
    """Decoded frames (frames, height, width, 3) uint8, all of them, as `eval_clips` would show
    them: (3, frames, size, size)."""
    return _to_clip(_centre(shrink(frames, round(size * MARGIN)), size))


def to_pixels(clip: Tensor) -> Tensor:
    """Undo the normalisation, for pictures: (3, frames, h, w) -> (frames, h, w, 3) uint8."""
    pixels = (clip.float() * STD + MEAN) * 255
    return pixels.round().clamp(0, 255).to(torch.uint8).permute(1, 2, 3, 0)


def _centre(frames: Tensor, size: int) -> Tensor:
    """(frames, height, width, 3) uint8 -> (frames, 3, size, size)."""
    return v2.functional.center_crop(frames.permute(0, 3, 1, 2), [size, size])


def _to_clip(pixels: Tensor) -> Tensor:
    """(frames, 3, height, width) uint8 -> (3, frames, height, width) float32, normalised."""
    clip = pixels.transpose(0, 1).to(torch.float32, memory_format=torch.contiguous_format)
    return clip.mul_(1 / (255 * STD)).sub_(MEAN / STD)


def _jitter(clip: Tensor) -> Tensor:
    """Contrast, brightness and tint as one affine map for each colour, in place."""
    contrast = 0.8 + 0.4 * torch.rand(())
    brightness = 0.6 * torch.rand(()) - 0.3  # in standard deviations: 0.3 are 17 grey levels
    tint = 0.2 * torch.rand(3, 1, 1, 1) - 0.1
    shift = (1 - contrast) * clip.mean() + brightness + tint  # contrast turns about the mean
    return clip.mul_(contrast).add_(shift)
