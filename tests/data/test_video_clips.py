"""Clips take the right frames."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ndlightnet.data.video as video
from ndlightnet.data.errors import DataError
from ndlightnet.data.video import (
    ClipDataset,
    Sample,
    read_video_folder,
)
from ndlightnet.data.video_transforms import to_pixels

from .video_files import (
    counting,
    encode,
    numbers,
)

SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(scope="module")
def samples(counted: Path) -> list[Sample]:
    short = encode(counted.parent / "b.mp4", counting(3, 64, 64))
    return [Sample(counted, 4), Sample(short, 7)]


@pytest.mark.parametrize("frames", [1, 8])
def test_train_clips(samples: list[Sample], frames: int) -> None:
    data = ClipDataset(samples, frames, size=32, train=True)
    torch.manual_seed(0)
    assert len(data) == 2
    for number, label in ((0, 4), (1, 7)):
        clip, found, index = data[number]
        assert clip.shape == (3, frames, 32, 32) and clip.dtype == torch.float32
        assert clip.is_contiguous() and (found, index) == (label, number)
    assert not torch.equal(data[0][0], data[0][0])
    torch.manual_seed(1)
    first = data[0][0]
    torch.manual_seed(1)
    assert torch.equal(first, data[0][0])


def test_test_clips(samples: list[Sample]) -> None:
    data = ClipDataset(samples, frames=5, size=42, train=False, clips=2)
    (clips, label, index), again = data[0], data[0]
    assert clips.shape == (2, 3, 5, 42, 42) and (label, index) == (4, 0)
    assert torch.equal(clips, again[0])
    # 5 parts of 10 frames; the clips lie at a quarter and at three quarters of each part
    assert numbers(to_pixels(clips[0])) == [2, 12, 22, 32, 42]
    assert numbers(to_pixels(clips[1])) == [7, 17, 27, 37, 47]


def test_single_frames(samples: list[Sample]) -> None:
    data = ClipDataset(samples, frames=1, size=42, train=False, clips=5)
    clips = data[0][0]
    assert clips.shape == (5, 3, 1, 42, 42)
    assert numbers(to_pixels(torch.cat(list(clips), dim=1))) == [5, 15, 25, 35, 45]


def test_a_short_video_repeats_frames_evenly(samples: list[Sample]) -> None:
    clips = ClipDataset(samples, frames=6, size=32, train=False)[1][0]
    assert numbers(to_pixels(clips[0])) == [0, 0, 1, 1, 2, 2]


def test_all_in_memory(samples: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    data = ClipDataset(samples, frames=4, size=28, train=False)
    monkeypatch.setattr(video, "PyAVReader", lambda path: pytest.fail("decoded again"))
    assert data[1][0].shape == (1, 3, 4, 28, 28)


def test_dataset_errors(samples: list[Sample], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"c\.mp4: no such file"):
        ClipDataset([*samples, Sample(tmp_path / "c.mp4", 0)], 4, 32, train=True)
    with pytest.raises(ValueError, match="start at 1"):
        ClipDataset(samples, frames=0, size=32, train=True)


def test_the_dataset_flips_only_when_asked(
    samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(video, "train_clip", lambda _video, _frames, _size, hflip: hflip)
    assert ClipDataset(samples, 4, 28, train=True)[0] == (False, 4, 0)
    assert ClipDataset(samples, 4, 28, train=True, hflip=True)[0] == (True, 4, 0)


@pytest.mark.skipif(not SHARED.exists(), reason="needs the shared data beside the checkout")
@pytest.mark.parametrize(
    "name, classes, train, test",
    [
        ("surveillance", ("calm", "fight"), 203, 60),
        ("lung_ultrasound", ("covid", "pneumonia", "regular"), 79, 25),
    ],
)
def test_real_videos(name: str, classes: tuple[str, ...], train: int, test: int) -> None:
    found = read_video_folder(SHARED / name)
    assert (found.classes, len(found.train), len(found.test)) == (classes, train, test)
    data = ClipDataset(found.test[:1], frames=8, size=64, train=False, clips=2)
    clips, label, _ = data[0]
    assert clips.shape == (2, 3, 8, 64, 64) and label == 0
    assert 0.2 < clips.std() < 2 and clips.mean().abs() < 2.1
    assert (clips[:, :, 0] != clips[:, :, -1]).any()  # something moves


def test_clips_without_augmentation_are_those_of_a_test(samples):
    """In training, too: for a network that generates them."""
    plain = ClipDataset(samples, 4, 28, train=True, augment=False)
    for number in range(len(samples)):
        clip, label, index = plain[number]
        (same,), *others = ClipDataset(samples, 4, 28, train=False)[number]
        assert torch.equal(clip, same) and [label, index] == others
    torch.manual_seed(0)
    flipped = ClipDataset(samples, 4, 28, train=True, hflip=True, augment=False)
    found = [flipped[0][0] for _ in range(20)]
    both = [plain[0][0], plain[0][0].flip(-1)]
    assert all(any(torch.equal(one, other) for other in both) for one in found)
    assert any(torch.equal(one, both[1]) for one in found)
