"""Clips take the right frames, decoded when they are needed."""

import gc
from functools import partial
from pathlib import Path

import pytest
import torch

import ndlightnet.data.video.clips as clips_module
import ndlightnet.data.video.video_files as video_module
from ndlightnet.data.video.clips import ClipDataset
from ndlightnet.data.video.video_files import Sample
from ndlightnet.data.video.video_transforms import Framing, plain_clip, to_pixels, train_clip, training

from ..refusals import refuses
from .made_videos import counting, encode, numbers


def random_clips(frames: int, size: int):
    return partial(train_clip, frames=frames, transform=training(size, scale=(0.5, 1.0), color_jitter=0.2))


@pytest.fixture(scope="module")
def samples(counted: Path) -> list[Sample]:
    short = encode(counted.parent / "b.mp4", counting(3, 64, 64))
    return [Sample(counted, 4), Sample(short, 7)]


@pytest.fixture(scope="module")
def thinned(counted: Path) -> Sample:
    """A video of which every other frame is read."""
    return Sample(encode(counted.parent / "c.mp4", counting(128, 48, 96)), 2)


@pytest.mark.parametrize("frames", [1, 8])
def test_train_clips(samples, frames):
    data = ClipDataset(samples, frames, Framing(32), draw=random_clips(frames, 32))
    torch.manual_seed(0)
    assert len(data) == 2
    for number, label in ((0, 4), (1, 7)):
        clip, *labels_and_notes = data[number]
        assert clip.shape == (3, frames, 32, 32) and clip.dtype == torch.float32
        assert clip.is_contiguous() and labels_and_notes == [label, number, ""]
    assert not torch.equal(data[0][0], data[0][0])
    torch.manual_seed(1)
    first = data[0][0]
    torch.manual_seed(1)
    assert torch.equal(first, data[0][0])


@pytest.mark.parametrize(
    "number, frames, clips, crops, expected",
    [
        # 5 fifths of 10 frames; the clips lie at a quarter and at three quarters of each
        (0, 5, 2, 1, [[2, 12, 22, 32, 42], [7, 17, 27, 37, 47]]),
        (0, 5, 2, 3, [[2, 12, 22, 32, 42], [7, 17, 27, 37, 47]] * 3),
        (0, 1, 5, 1, [[5], [15], [25], [35], [45]]),
        (1, 6, 1, 1, [[0, 0, 1, 1, 2, 2]]),  # a short video repeats its frames
    ],
)
def test_clips_of_a_test(samples, number, frames, clips, crops, expected):
    data = ClipDataset(samples, frames, Framing(42), clips=clips, crops=crops)
    x, *labels_and_notes = data[number]
    assert x.shape == (clips * crops, 3, frames, 42, 42) and labels_and_notes == [samples[number].label, number, ""]
    assert [numbers(to_pixels(clip)) for clip in x] == expected and torch.equal(data[number][0], x)


def counted_loads(monkeypatch) -> list[Path]:
    """The paths that are decoded from now on."""
    load, paths = clips_module.open_for_clips, []
    monkeypatch.setattr(clips_module, "open_for_clips", lambda path, *more: paths.append(path) or load(path, *more))
    return paths


@pytest.mark.parametrize("cache, visits", [(2**32, 1), (100, 3)])
def test_a_video_is_decoded_when_it_is_needed_and_once_if_there_is_room(samples, monkeypatch, cache, visits):
    """Also one that comes up twice."""
    loads = counted_loads(monkeypatch)
    data = ClipDataset([*samples, samples[1]], 4, Framing(28), cache=cache)
    assert loads == []
    first, same, again = data[1], data[1], data[2]
    assert torch.equal(first[0], same[0]) and torch.equal(first[0], again[0]) and (first[2], again[2]) == (1, 2)
    assert loads == [samples[1].path] * visits


@pytest.mark.parametrize("mode", ["center", "squash"])
@pytest.mark.parametrize("clips, crops", [(None, 1), (0, 1), (1, 1), (3, 3)])
def test_clips_do_not_depend_on_whether_the_cache_is_full(samples, thinned, mode, clips, crops):
    """Random ones (None), those of training without augmentation (0), and those of a test."""
    framing = Framing(28, mode)
    draw = random_clips(16, 28) if clips is None else None
    if clips == 0:
        draw = partial(plain_clip, frames=16, framing=framing, hflip=True)
    crops = 1 if mode == "squash" else crops
    options = {"draw": draw, "clips": clips or 1, "crops": crops}
    held, full = (ClipDataset([*samples, thinned], 16, framing, cache=cache, **options) for cache in (2**32, 0))
    for number in (0, 1, 2, 2):
        torch.manual_seed(number)
        clip, *labels_and_notes = held[number]
        torch.manual_seed(number)
        same, *expected = full[number]
        assert torch.equal(clip, same) and labels_and_notes == expected
    assert isinstance(held.video(2), torch.Tensor) and not isinstance(full.video(2), torch.Tensor)


def test_without_room_only_the_frames_of_a_clip_are_decoded(thinned, monkeypatch):
    decoded = []
    frames = video_module.PyAVReader.frames
    monkeypatch.setattr(video_module.PyAVReader, "frames", lambda r, i: decoded.extend(i) or frames(r, i))
    monkeypatch.setattr(video_module, "decoders", lambda: ())
    draw = random_clips(16, 28)
    full = ClipDataset([thinned], 16, Framing(28), draw=draw, cache=2**15)
    assert full[0][0].shape == (3, 16, 28, 28)
    assert decoded.pop(0) == 0  # tells the size of the frames
    assert len(decoded) == len(set(decoded)) <= 16 and decoded == sorted(decoded)
    decoded.clear()
    ClipDataset([thinned], 16, Framing(28), draw=draw)[0]
    assert decoded == [0, *range(1, 128, 2)]  # all 64 that are held


def test_workers_share_what_they_decode(samples, monkeypatch):
    """The second epoch decodes nothing, whichever process decoded a video in the first."""
    gc.collect()  # readers that earlier tests left in tracebacks: a forked worker would wait for their threads
    data = ClipDataset(samples * 4, 4, Framing(28))
    expected = torch.stack([item[0] for item in data])
    again = ClipDataset(samples * 4, 4, Framing(28))
    loader = torch.utils.data.DataLoader(again, batch_size=1, num_workers=2)
    assert torch.equal(torch.cat([batch[0] for batch in loader]), expected)
    monkeypatch.setattr(clips_module, "open_for_clips", lambda *_: pytest.fail("decoded again"))
    assert torch.equal(torch.cat([batch[0] for batch in loader]), expected)


def test_a_video_that_cannot_be_read(samples, tmp_path):
    """Training takes the next good one and names it; a test raises."""
    broken = Sample(tmp_path / "c.mp4", 0)
    train = ClipDataset([broken, *samples], 4, Framing(32), draw=random_clips(4, 32))
    clip, label, index, problem = train[0]
    assert (label, index) == (4, 1) and problem == f"{broken.path}: no such file"
    assert clip.shape == (3, 4, 32, 32)
    assert train[2][1:] == (7, 2, "")
    refuses(lambda: ClipDataset([broken], 4, Framing(32))[0], broken.path, "no such file$")
    bad = ClipDataset([broken] * 40, 4, Framing(32), draw=random_clips(4, 32))
    refuses(lambda: bad[0], broken.path, "no such file; nor can the 15 after it")


def test_wrong_arguments(samples):
    with pytest.raises(ValueError, match="start at 1, got 0, 32, 1, 1"):
        ClipDataset(samples, 0, Framing(32))


def test_clips_without_augmentation_are_those_of_a_test(samples):
    """In training, too, perhaps mirrored: for a network that generates them."""
    framing = Framing(28)
    plain = ClipDataset(samples, 4, framing, draw=partial(plain_clip, frames=4, framing=framing))
    (one,), *labels_and_notes = ClipDataset(samples, 4, framing)[0]
    assert torch.equal(plain[0][0], one) and plain[0][1:] == tuple(labels_and_notes)
    torch.manual_seed(0)
    video = torch.randint(256, (9, 32, 40, 3), dtype=torch.uint8)
    one, draws = plain_clip(video, 4, framing), [plain_clip(video, 4, framing, hflip=True) for _ in range(20)]
    assert {(torch.equal(x, one), torch.equal(x, one.flip(-1))) for x in draws} == {(True, False), (False, True)}
