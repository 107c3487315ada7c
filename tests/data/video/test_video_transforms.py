"""Clips: which frames, which part of them, and how bright."""

import pytest
import torch
from torch import Tensor

from ndlightnet.data.image.image_transforms import RandAugment
from ndlightnet.data.video.video_transforms import (
    Framing,
    eval_clips,
    eval_frames,
    even_indices,
    frame_differences,
    random_indices,
    shrink,
    to_pixels,
    train_clip,
    training,
)


def test_even_indices() -> None:
    for arguments, expected in (
        ((50, 50), [*range(50)]),
        ((12, 4), [1, 4, 7, 10]),
        ((12, 4, 0.0), [0, 3, 6, 9]),
        ((3, 6), [0, 0, 1, 1, 2, 2]),
        ((1, 5), [0] * 5),
        ((10**9, 3), [166666666, 500000000, 833333333]),  # float64
    ):
        assert even_indices(*arguments).tolist() == expected


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
    assert shrink(torch.zeros(1, 90, 160, 3, dtype=torch.uint8), Framing(112).stored).shape == (1, 128, 227, 3)
    frame = torch.zeros(2, 40, 60, 3, dtype=torch.uint8)
    frame[:, 4:36, 14:46] = 255  # the 32 x 32 in the middle
    assert (to_pixels(eval_clips(frame, 2, Framing(32))[0]) == 255).all()
    assert (to_pixels(eval_clips(frame, 2, Framing(34))[0]) == 0).any()


@pytest.mark.parametrize("wide", [True, False])
def test_three_crops_reach_both_ends_of_the_long_side(wide: bool) -> None:
    columns = torch.arange(60, dtype=torch.uint8)[None, None, :, None].expand(2, 40, 60, 3)
    video = (columns if wide else columns.transpose(1, 2)).contiguous()
    clips = eval_clips(video, 2, Framing(32), clips=1, crops=3)
    assert [to_pixels(clip)[0, 0, 0, 0].item() for clip in clips] == [0, 14, 28]
    assert torch.equal(clips[1], eval_clips(video, 2, Framing(32))[0])


@pytest.mark.parametrize("height, width", [(90, 160), (160, 90), (57, 57)])
def test_squashed_frames_are_whole(height: int, width: int) -> None:
    video = torch.zeros(2, height, width, 3, dtype=torch.uint8)
    video[:, : height // 2, : width // 2, 0] = 255  # a quarter of the frame stays one
    framing = Framing(56, "squash")
    stored = shrink(video, framing.stored)
    assert stored.shape == (2, 64, 64, 3)
    clip = to_pixels(eval_clips(stored, 2, framing)[0]).float()
    assert clip.shape == (2, 56, 56, 3)
    assert clip[..., 0].mean() / 255 == pytest.approx((height // 2) * (width // 2) / height / width, abs=0.01)
    assert clip[..., 1:].max() == 0
    assert torch.equal(to_pixels(eval_frames(video, framing)).float(), clip)


def test_frame_differences() -> None:
    torch.manual_seed(0)
    clips = torch.randn(2, 5, 3, 6, 4, 4)
    differences = frame_differences(clips)
    assert differences.shape == clips.shape and (differences[..., 0, :, :] == 0).all()
    torch.testing.assert_close(differences[..., 1:, :, :], 2 * clips.diff(dim=-3))
    # frame by frame with the one before, as a stream
    steps = [differences[..., :1, :, :]]
    steps += [frame_differences(clips[..., t : t + 1, :, :], clips[..., t - 1 : t, :, :]) for t in range(1, 6)]
    assert torch.equal(torch.cat(steps, -3), differences)


def ramp() -> Tensor:
    """A still video that grows brighter to the right; frames are alike."""
    columns = torch.linspace(40, 215, 64).round().to(torch.uint8)
    return columns[None, None, :, None].expand(8, 48, 64, 3).contiguous()


def draw(video: Tensor, frames: int = 4, size: int = 24, **options: object) -> Tensor:
    return train_clip(video, frames, training(size, **{"scale": (0.5, 1.0), **options}))


def test_flips_only_when_asked() -> None:
    torch.manual_seed(0)
    for options, least, most in (({}, 0, 0), ({"hflip": True}, 16, 44)):
        clips = [draw(ramp(), **options) for _ in range(60)]
        assert least <= sum(bool(clip[..., 0].mean() > clip[..., -1].mean()) for clip in clips) <= most


AUGMENTATIONS = {
    "hflip": {"hflip": True},
    "rotation": {"rotation": 30.0},
    "color_jitter": {"color_jitter": 0.5},
    "randaugment": {"randaugment": RandAugment(2, 9)},
    "grayscale": {"grayscale": 0.5},
    "random_erasing": {"random_erasing": 0.9},
}


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_augmentation_is_one_for_all_frames(name: str) -> None:
    """Of a still video, coloured so that a loss of colour shows."""
    video = ramp()
    video[..., 2] = 255 - video[..., 2]
    torch.manual_seed(1)
    clips = torch.stack([draw(video, **AUGMENTATIONS[name]) for _ in range(30)])
    assert torch.equal(clips, clips[:, :, :1].expand_as(clips))
    torch.manual_seed(1)
    first = draw(video)  # whose crop is drawn first
    plain = torch.stack([first, *(draw(video) for _ in range(29))])
    assert (clips[:, :, 0] != plain[:, :, 0]).flatten(1).any(1).sum() > 5


def test_colours_change_as_much_as_asked() -> None:
    torch.manual_seed(0)
    means = torch.tensor([draw(ramp(), scale=(1.0, 1.0), color_jitter=0.2).mean() for _ in range(100)])
    assert 0.05 < means.std() < 0.5
    grey = draw(torch.randint(256, (8, 48, 64, 3), dtype=torch.uint8), grayscale=1.0)
    assert torch.equal(grey[0], grey[1]) and torch.equal(grey[0], grey[2])


def test_crops_differ_and_keep_half_of_the_area() -> None:
    torch.manual_seed(0)
    rows = torch.arange(64.0)[:, None].expand(64, 64)
    place = torch.stack([rows, rows.T, rows * 0], dim=-1).to(torch.uint8).expand(2, 64, 64, 3)
    areas, corners = [], set()
    for _ in range(100):
        clip = to_pixels(draw(place, 1, 32))[0].float()
        height, width = ((clip[..., c].amax() - clip[..., c].amin()).item() for c in (0, 1))
        areas.append(height * width / 63**2)
        corners.add(tuple(clip[0, 0].tolist()))
    assert 0.4 < min(areas) < 0.6 and 0.8 < max(areas) < 1.05
    assert len(corners) > 50
    whole = to_pixels(draw(place, 1, 32, scale=(1.0, 1.0)))[0].float()
    assert whole[..., 0].amax() - whole[..., 0].amin() > 50


def test_normalisation_and_back() -> None:
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (4, 16, 16, 3), dtype=torch.uint8)
    clip = eval_clips(pixels, 4, Framing(16))[0]
    assert clip.mean().abs() < 0.3 and 0.8 < clip.std() < 1.5
    assert torch.equal(to_pixels(clip), pixels)
