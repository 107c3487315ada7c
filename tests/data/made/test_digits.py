"""Moving digits: the motion is the class, and one frame does not tell it. Coloured digits: their colours do not tell
it."""

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ndlightnet.data.made.digits as digits
from ndlightnet.data.errors import DataError
from ndlightnet.data.folders import class_names
from ndlightnet.data.image.image_folder import list_images, read_image
from ndlightnet.data.made.digits import DIGITS, MOTIONS, make_coloured_digits, make_moving_digits, still_digits
from ndlightnet.data.video.video_files import PyAVReader, Sample, VideoFolder, read_video_folder

FRAMES, SIZE = 8, 24


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> VideoFolder:
    folder = tmp_path_factory.mktemp("digits") / "set"
    return read_video_folder(make_moving_digits(folder, 360, 60, FRAMES, SIZE, progress=False))


@pytest.fixture(scope="module")
def places(videos: VideoFolder) -> tuple[Tensor, Tensor]:
    """Where the digit is on the torus as complex numbers of modulus 1, (clips, frames, 2); labels. The digit is what
    moves: brightness less its median over time, of which the first wave along rows and along columns is taken."""
    wave = torch.polar(torch.ones(SIZE), torch.arange(SIZE) * 2 * math.pi / SIZE)

    def place(path: Path) -> Tensor:
        pictures = PyAVReader(path).frames(range(FRAMES)).float()
        away = (pictures - pictures.median(dim=0).values).abs().sum(dim=-1)
        away = (away - 60).clamp(min=0)  # the noise of the background
        along = torch.stack([away.sum(2).to(wave.dtype) @ wave, away.sum(1).to(wave.dtype) @ wave])
        return (along / along.abs()).T

    return torch.stack([place(s.path) for s in videos.train]), torch.tensor([s.label for s in videos.train])


@pytest.mark.slow
def test_clips_and_that_sources_of_test_are_not_in_train(videos: VideoFolder) -> None:
    assert videos.classes == MOTIONS
    assert (len(videos.train), len(videos.test)) == (360, 60)
    assert {sum(s.label == label for s in videos.test) for label in range(6)} == {10}
    reader = PyAVReader(videos.test[0].path)
    assert len(reader) == FRAMES
    assert reader.frames([0]).shape == (1, SIZE, SIZE, 3)
    train, test = ({s.path.stem.split("-")[1] for s in samples} for samples in (videos.train, videos.test))
    assert len(train) > 100 and len(test) > 20
    assert not train & test


def test_the_motion_is_what_the_class_says() -> None:
    rng = digits.np.random.default_rng(0)
    steps = {m: digits.np.diff(digits._path(m, 16, 40, rng), axis=0) for m in MOTIONS}
    assert (steps["left"][:, 1] < -1).all() and (steps["right"][:, 1] > 1).all()
    assert (steps["up"][:, 0] < -1).all() and (steps["down"][:, 0] > 1).all()
    for motion, sign in (("clockwise", 1), ("anticlockwise", -1)):
        before, after = steps[motion][:-1], steps[motion][1:]
        turn = before[:, 1] * after[:, 0] - before[:, 0] * after[:, 1]  # > 0: right, then down
        assert (sign * turn > 0).all()


@pytest.mark.slow
def test_motion_shows_in_the_files(places: tuple[Tensor, Tensor], videos: VideoFolder) -> None:
    place, label = places
    step = (place[:, 1:] * place[:, :-1].conj()).angle().median(dim=1).values  # (clips, 2)
    for name, axis, sign in (("left", 1, -1), ("right", 1, 1), ("up", 0, -1), ("down", 0, 1)):
        mine = step[label == videos.classes.index(name)]
        assert (sign * mine[:, axis] > 0).float().mean() > 0.9, name
        assert mine[:, 1 - axis].abs().median() < mine[:, axis].abs().median() / 4, name


def test_one_frame_tells_nothing_by_place(places: tuple[Tensor, Tensor]) -> None:
    """Rayleigh's test: for uniform places n * |mean|^2 is exponential of mean 1 in each class."""
    place, label = places
    for number, frame in product(range(len(MOTIONS)), (0, FRAMES // 2, FRAMES - 1)):
        mine = place[label == number, frame]
        assert len(mine) == 60
        assert (len(mine) * mine.mean(dim=0).abs() ** 2 < 9).all(), (MOTIONS[number], frame)


@pytest.mark.slow
def test_one_frame_tells_nothing_by_pixels(videos: VideoFolder) -> None:
    """Neither the last frame nor its blur and noise: a linear classifier stays at chance, 1/6."""
    from sklearn.linear_model import RidgeClassifier

    def last(samples: tuple[Sample, ...]) -> Tensor:
        frames = [PyAVReader(s.path).frames([FRAMES - 1])[0].float() for s in samples]
        pictures = torch.stack(frames).mean(dim=-1)
        spectrum = torch.fft.rfft2(pictures).abs().log1p()
        return torch.cat([pictures.flatten(1) / 64, spectrum.flatten(1)], dim=1)

    labels = [[s.label for s in samples] for samples in (videos.train, videos.test)]
    score = RidgeClassifier(alpha=100.0).fit(last(videos.train), labels[0])
    right = score.score(last(videos.test), labels[1])
    assert right < 1 / 6 + 3.5 * math.sqrt(5 / 36 / 60)


@pytest.mark.parametrize("make, sizes", [(make_moving_digits, (6, 6, 4, SIZE)), (make_coloured_digits, (20, 10, SIZE))])
def test_same_arguments_same_bytes(tmp_path: Path, make: Any, sizes: tuple[int, ...]) -> None:
    def contents(name: str, seed: int) -> dict[str, bytes]:
        folder = make(tmp_path / name, *sizes, seed, progress=False)
        return {str(f.relative_to(folder)): f.read_bytes() for f in folder.glob("*/*/*")}

    first = contents("a", seed=3)
    assert len(first) == sizes[0] + sizes[1] and first == contents("b", seed=3)
    assert set(first.values()).isdisjoint(contents("c", seed=4).values())


def test_arguments(tmp_path: Path) -> None:
    for wrong in ({"train": 5}, {"test": 5}, {"frames": 1}, {"size": 41}, {"size": 16}):
        with pytest.raises(ValueError, match=r"at least 6 clips .* 2 frames, and an even size .* expected, got"):
            make_moving_digits(tmp_path / "a", **wrong)
    for wrong in ({"train": 9}, {"test": 9}, {"size": 15}):
        with pytest.raises(ValueError, match="at least 10 pictures in train and test, and a size from 16 expected"):
            make_coloured_digits(tmp_path / "a", **wrong)


def test_still_digits_are_the_same_in_every_run() -> None:
    splits = still_digits(12)
    shapes = {split: pixels.shape for split, (pixels, _) in splits.items()}
    assert shapes == {"train": (1500, 12, 12), "test": (297, 12, 12)}
    for split, again in still_digits(12).items():
        for values, same in zip(splits[split], again, strict=True):
            digits.np.testing.assert_array_equal(values, same)
    with pytest.raises(DataError, match="size=7: expected 8 or more pixels"):
        still_digits(7)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures") / "set"
    return make_coloured_digits(folder, train=400, test=100, size=24, progress=False)


def test_coloured_digits_lie_in_class_folders(pictures: Path) -> None:
    sources = {}
    _, labels, _ = digits._sources(0)
    for split, count in (("train", 400), ("test", 100)):
        assert class_names(pictures / split) == DIGITS
        files = list_images(pictures / split, DIGITS)
        assert len(files) == count and set(digits.np.bincount(files.labels)) == {count // 10}
        numbers = [int(files.path(n).stem.split("source")[1]) for n in range(count)]
        assert (labels[numbers] == files.labels).all()
        sources[split] = set(numbers)
    assert not sources["train"] & sources["test"] and len(sources["test"]) > 60


def test_colours_do_not_tell_the_digit(pictures: Path) -> None:
    """The mean colour of a class differs from that of all no more than that of any tenth."""
    files = list_images(pictures / "train", DIGITS)
    images = [read_image(files.path(n), 3) for n in range(len(files))]
    assert {image.size for image in images} == {(24, 24)}
    pixels = torch.stack([torch.from_numpy(digits.np.array(image)).float() for image in images])
    means = pixels.mean((1, 2))
    of_class = means.view(10, 40, 3).mean(1)
    assert ((of_class - means.mean(0)).abs() < 4 * means.std(0) / 40**0.5).all()
    assert (means.std(0) > 3).all()
    brightest = pixels.amax((1, 2, 3))
    assert (brightest > 120).all()  # the digit is brighter than any texture
