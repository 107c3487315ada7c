"""Clips: which frames, which part of them, and how bright."""

import pytest
import torch
from torch import Tensor

from ndlightnet.data.video_transforms import (
    eval_clips,
    even_indices,
    random_indices,
    to_pixels,
    train_clip,
)


def test_even_indices() -> None:
    assert even_indices(50, 50).tolist() == list(range(50))
    assert even_indices(12, 4).tolist() == [1, 4, 7, 10]
    assert even_indices(12, 4, 0.0).tolist() == [0, 3, 6, 9]
    assert even_indices(3, 6).tolist() == [0, 0, 1, 1, 2, 2]
    assert even_indices(9, 1).tolist() == [4]
    assert even_indices(1, 5).tolist() == [0] * 5
    assert even_indices(10**9, 3).tolist() == [166666666, 500000000, 833333333]  # float64


@pytest.mark.parametrize("length, frames", [(160, 16), (7, 16), (90, 1), (1, 4)])
def test_random_indices(length: int, frames: int) -> None:
    torch.manual_seed(0)
    draws = torch.stack([random_indices(length, frames) for _ in range(1000)])
    assert draws.shape == (1000, frames)
    assert (draws.diff(dim=1) >= 0).all()
    assert draws.min() >= 0 and draws.max() < length
    # nothing is left out, though with one frame the ends are rare: a span seldom begins there
    assert draws.min() <= length // 30 and draws.max() >= length - 1 - length // 30
    if (length, frames) == (160, 16):
        reach = (draws[:, -1] - draws[:, 0]).float() / 160
        assert 0.4 < reach.min() < 0.55 and 0.88 < reach.max() < 1.0  # spans of 0.5 to 1
        steps = draws.diff(dim=1).float()
        assert steps.mean() == pytest.approx(7.5, abs=0.2)  # 0.75 of 160 / 16
        assert steps.std(dim=1).min() > 0.5  # jitter
    if length == 90:
        assert len(draws.unique()) > 80


def test_eval_crop_is_the_centre() -> None:
    frame = torch.zeros(2, 40, 60, 3, dtype=torch.uint8)
    frame[:, 4:36, 14:46] = 255  # the 32 x 32 in the middle
    assert (to_pixels(eval_clips(frame, 2, 32)[0]) == 255).all()
    assert (to_pixels(eval_clips(frame, 2, 34)[0]) == 0).any()


def ramp() -> Tensor:
    """A still video that grows brighter to the right; frames are alike."""
    columns = torch.linspace(40, 215, 64).round().to(torch.uint8)
    return columns[None, None, :, None].expand(8, 48, 64, 3).contiguous()


def test_flips_only_when_asked() -> None:
    torch.manual_seed(0)

    def mirrored(**options: bool) -> int:
        clips = [train_clip(ramp(), 4, 24, **options) for _ in range(60)]
        return sum(bool(clip[..., 0].mean() > clip[..., -1].mean()) for clip in clips)

    assert mirrored() == 0
    assert 15 < mirrored(hflip=True) < 45


def test_augmentation_is_one_for_all_frames_and_mild() -> None:
    torch.manual_seed(0)
    clips = torch.stack([train_clip(ramp(), 4, 24, hflip=True) for _ in range(200)])
    assert torch.equal(clips, clips[:, :, :1].expand_as(clips))
    means, stds = clips.mean((1, 2, 3, 4)), clips.std((1, 2, 3, 4))
    assert 0.05 < means.std() < 0.6 and 0.05 < stds.std() < 0.4  # differ, and not much
    tint = clips.mean((2, 3, 4)) - means[:, None]
    assert 0.02 < tint.abs().mean() < 0.1 and tint.abs().max() < 0.2


def test_crops_differ_and_keep_half_of_the_area() -> None:
    torch.manual_seed(0)
    rows = torch.arange(64.0)[:, None].expand(64, 64)
    place = torch.stack([rows, rows.T, rows * 0], dim=-1).to(torch.uint8).expand(2, 64, 64, 3)
    ranges, corners = [], set()
    for _ in range(100):
        clip = train_clip(place, 1, 32)[:, 0]
        # colour is affine, so divide by its gain: blue is flat, the others run over the crop
        height, width = ((clip[c].amax() - clip[c].amin()).item() * 255 * 0.225 for c in (0, 1))
        ranges.append(height * width / 63**2)
        corners.add(round(clip[0, 0, 0].item(), 3))
    assert 0.5 * 0.64 * 0.9 < min(ranges) < 0.6 and 0.8 < max(ranges) < 1.44  # contrast 0.8-1.2
    assert len(corners) > 50


def test_normalisation_and_back() -> None:
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (4, 16, 16, 3), dtype=torch.uint8)
    clip = eval_clips(pixels, 4, 16)[0]
    assert clip.mean().abs() < 0.3 and 0.8 < clip.std() < 1.5
    assert torch.equal(to_pixels(clip), pixels)
