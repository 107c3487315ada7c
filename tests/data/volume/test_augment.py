"""Augmentation of batches, against scipy, formulas and the chances that it names."""

import math
from itertools import combinations, product

import numpy as np
import pytest
import torch
from scipy import ndimage
from scipy.stats import binom
from torch import Tensor

from ndlightnet.data.volume import augment as module
from ndlightnet.data.volume.augment import PER_CHANNEL, PROBABILITIES, Augment, rotations, sample, sampling_grid

from .files import refuses

SPACES = [(9, 7), (9, 7, 11), (8, 1, 5), (1, 13)]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(seed))


def only(monkeypatch: pytest.MonkeyPatch, **chances: float) -> None:
    for name in PROBABILITIES:
        monkeypatch.setitem(PROBABILITIES, name, chances.get(name, 0.0))


def touched(before: Tensor, after: Tensor) -> Tensor:
    return (before != after).flatten(1).any(1)


def within_chance(count: int, of: int, chance: float) -> None:
    low, high = binom.ppf([1e-5, 1 - 1e-5], of, chance)
    assert low <= count <= high, (count, low, high)


@pytest.mark.parametrize("space", SPACES)
def test_batches_follow_from_the_generator(space: tuple[int, ...]) -> None:
    image, label = random(6, 2, *space), torch.randint(0, 3, (6, 1, *space))
    augment = Augment(flip_axes=(0,), shift=1, turn=1.0)
    new, new_label = augment(image, label, seeded(1))
    assert new.dtype == torch.float32 and new_label.dtype == label.dtype
    assert new.shape == image.shape and new_label.shape == label.shape
    assert torch.equal(image, random(6, 2, *space)), "the input was written to"
    assert not torch.equal(augment(image, label, seeded(2))[0], new)
    assert torch.equal(augment(image, None, seeded(1))[0], new)
    for same in ((image, label), (image.mT.contiguous().mT, label.mT.contiguous().mT)):
        again, again_label = augment(*same, seeded(1))
        assert torch.equal(again, new) and torch.equal(again_label, new_label)


@pytest.mark.parametrize("space", SPACES)
def test_samples_that_draw_nothing_are_the_same_bits(space: tuple[int, ...]) -> None:
    image, label = random(400, 1, *space), torch.randint(0, 3, (400, 1, *space))
    new, new_label = Augment()(image, label, seeded())
    chances = [PROBABILITIES[name] * PER_CHANNEL.get(name, 1) for name in PROBABILITIES if name != "mirror"]
    nothing = 0.8**2 * math.prod(1 - chance for chance in chances)
    if 1 not in space:  # rotations and blurs of one cell change nothing
        within_chance(400 - int(touched(image, new).sum()), 400, nothing)
    assert not (touched(label, new_label) & ~touched(image, new)).any()
    still = Augment(turn=0, intensities=False)(image, label, seeded())
    assert torch.equal(still[0], image) and torch.equal(still[1], label)


@pytest.mark.parametrize("space", [(9, 7), (9, 7, 11), (8, 1, 5)])
def test_resampling_is_scipys(space: tuple[int, ...]) -> None:
    axes, volume = len(space), random(2, 1, *space)
    matrix = rotations(random(2, axes * (axes - 1) // 2) * 20, [*combinations(range(axes), 2)], axes) * 1.2
    offset = random(2, axes, 1, seed=1).double()
    grid = sampling_grid(torch.cat([matrix, offset], 2), space, volume.device)
    for n, (mode, order) in product(range(2), (("bilinear", 1), ("nearest", 0))):
        ours = sample(volume, grid, mode)[n, 0]
        centre = (np.array(space) - 1) / 2
        start = centre + offset[n, :, 0].numpy() - matrix[n].numpy() @ centre
        voxels = volume[n, 0].double().numpy()
        truth = ndimage.affine_transform(voxels, matrix[n].numpy(), start, order=order, mode="reflect")
        wrong = ~np.isclose(ours.numpy(), truth, atol=1e-4)
        # a point halfway between two cells may go to either of them
        assert wrong.mean() <= (0 if order else 0.01), (mode, wrong.sum())


def drawn_matrices(monkeypatch: pytest.MonkeyPatch, augment: Augment, axes: int) -> Tensor:
    """Of 500 samples: (500, axes, axes + 1), output cells -> input cells."""
    drawn: list[Tensor] = []
    monkeypatch.setattr(module, "sampling_grid", lambda m, *rest: (drawn.append(m), sampling_grid(m, *rest))[1])
    augment(random(500, 1, *(3,) * axes), None, seeded())
    return drawn[0]


def test_turns_keep_distances_in_millimetres(monkeypatch: pytest.MonkeyPatch) -> None:
    spacing = (1.0, 0.8, 2.3)
    matrix = drawn_matrices(monkeypatch, Augment(spacing=spacing, turn=1.0), 3)[:, :, :3]
    mm = torch.diag(torch.tensor(spacing, dtype=torch.float64))
    turn = mm @ matrix @ mm.inverse()
    square = turn.mT @ turn
    steps = square[:, 0, 0].sqrt()
    identity = torch.eye(3, dtype=torch.float64).expand_as(square)
    # spacing is exact in float64 and zooms are float32
    torch.testing.assert_close(square / square[:, :1, :1], identity, atol=1e-6, rtol=0)
    assert 0.7 <= steps.min() < 0.72 and 1.37 < steps.max() <= 1.4
    within_chance(int((steps < 1).sum()), 500, 0.5)
    angle = torch.rad2deg(torch.atan2(turn[:, 1, 0], turn[:, 0, 0])).abs()
    assert 25 < angle.max() < 60


def test_a_coarse_axis_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = drawn_matrices(monkeypatch, Augment(spacing=(1, 5, 1.5), turn=1.0), 3)
    for row in (matrix[:, 1, :3], matrix[:, :, 1]):
        torch.testing.assert_close(row, torch.eye(3, dtype=torch.float64)[1].expand_as(row))
    angle = torch.rad2deg(torch.atan2(matrix[:, 2, 0] * 1.5, matrix[:, 0, 0])).abs()
    assert 28 < angle.max() <= 30 + 1e-4 and matrix[:, 0, 0].std() > 0.05


def test_shifts_are_whole_cells() -> None:
    image = random(60, 1, 9, 8)
    new = Augment(shift=2, turn=0, intensities=False)(image, None, seeded())[0]
    steps = set()
    for before, after in zip(image[:, 0].numpy(), new[:, 0].numpy(), strict=True):
        padded = np.pad(before, 2, mode="symmetric")
        windows = {(a, b): padded[2 - a : 11 - a, 2 - b : 10 - b] for a, b in product(range(-2, 3), repeat=2)}
        (step,) = [step for step, window in windows.items() if np.abs(window - after).max() < 1e-4]
        steps.add(step)
    assert len(steps) > 15  # of 25


@pytest.mark.parametrize("axes", [2, 3])
def test_the_label_follows_its_ball(axes: int) -> None:
    space = (33, 29, 21)[:axes]
    place = torch.stack(torch.meshgrid(*[torch.arange(n) for n in space], indexing="ij"), -1)
    centre = torch.tensor([20, 12, 8])[:axes]
    ball = ((place - centre).square().sum(-1) <= 25)[None, None].expand(40, 1, *space)
    augment = Augment(flip_axes=tuple(range(axes)), shift=2, turn=1.0, intensities=False)
    image, label = augment(ball.float(), ball.long(), seeded())
    assert set(label.unique().tolist()) == {0, 1}
    sure = (image - 0.5).abs() > 0.49  # nearest and linear agree away from the border
    assert sure.float().mean() > 0.8
    assert torch.equal((image > 0.5)[sure], label.bool()[sure])
    assert len({tuple(x.flatten().tolist()) for x in label}) > 35


@pytest.mark.parametrize("name", sorted(PROBABILITIES))
def test_chances(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, **{name: PROBABILITIES[name]})
    image = random(1000, 2, 6, 5, 4)
    new = Augment(flip_axes=(1,), turn=0)(image, None, seeded())[0]
    channels = touched(image.flatten(0, 1), new.flatten(0, 1)).view(1000, 2)
    each = PER_CHANNEL.get(name, 1.0)
    within_chance(int(channels.any(1).sum()), 1000, PROBABILITIES[name] * (1 - (1 - each) ** 2))
    within_chance(int(channels.all(1).sum()), 1000, PROBABILITIES[name] * each**2)


@pytest.mark.parametrize("still", [("ZOOM", (1.0, 1.0)), ("ANGLE", 0.0)])
def test_chances_of_turns(still: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, *still)
    matrix = drawn_matrices(monkeypatch, Augment(), 3)[:, :, :3]
    changed = (matrix != torch.eye(3, dtype=torch.float64)).flatten(1).any(1)
    within_chance(int(changed.sum()), 500, 0.2)


def test_mirrors_are_flips_of_image_and_label() -> None:
    image, label = random(50, 2, 4, 5, 3), torch.randint(0, 4, (50, 1, 4, 5, 3))
    new, new_label = Augment((0, 2), turn=0, intensities=False)(image, label, seeded())
    kinds = set()
    for n in range(50):
        kind = [axes for axes in ((), (1,), (3,), (1, 3)) if torch.equal(new[n], image[n].flip(axes))]
        assert len(kind) == 1 and torch.equal(new_label[n], label[n].flip(kind[0]))
        kinds.add(kind[0])
    assert len(kinds) == 4


@pytest.mark.parametrize("space", SPACES)
def test_blur_is_scipys(space: tuple[int, ...]) -> None:
    x, sigmas = random(3, *space), [0.5 + 0.5 * torch.rand(3) for _ in space]
    ours = module.blur(x, *(s.view(-1, *(1,) * len(space)) for s in sigmas))
    for n in range(3):
        truth = x[n].double().numpy()
        for axis, sigma in enumerate(sigmas):
            truth = ndimage.gaussian_filter1d(truth, float(sigma[n]), axis, mode="nearest", radius=3)
        np.testing.assert_allclose(ours[n], truth, atol=1e-5)


def test_low_resolution_keeps_cells_and_axes() -> None:
    x = torch.arange(8.0)[:, None].repeat(1, 3)
    half = module.low_resolution(x, 0.5, (0,))
    # nearest-exact keeps cells 1, 3, 5, 7, at places 0.5, 2.5, 4.5, 6.5 of the way back
    expected = np.interp(np.arange(8), [0.5, 2.5, 4.5, 6.5], [1, 3, 5, 7])
    np.testing.assert_allclose(half, np.repeat(expected[:, None], 3, 1), atol=1e-6)
    assert torch.equal(module.low_resolution(x, 1.0, (0, 1)), x)
    uneven = torch.arange(12.0).view(1, 3, 4).repeat(6, 1, 1)
    assert torch.equal(module.low_resolution(uneven, 0.5, (0,)), uneven)


def test_contrast_and_gamma_keep_what_they_say() -> None:
    x = random(4, 9, 7, 11) * torch.tensor([1.0, 100, 1e6, 1e-3]).view(4, 1, 1, 1) + 3
    factor = torch.tensor([0.75, 0.9, 1.1, 1.25]).view(4, 1, 1, 1)
    a, space = x.double().numpy(), (1, 2, 3)
    mean, low, high = (f(a, axis=space, keepdims=True) for f in (np.mean, np.min, np.max))
    # rounding of the values, and of what is made of their differences
    scale = 4 * 2.0**-23 * np.abs(a).max(space, keepdims=True) + (high - low) * 1e-5
    truth = np.clip((a - mean) * factor.numpy() + mean, low, high)
    assert (np.abs(module.contrast(x, factor).numpy() - truth) <= scale).all()
    power = ((a - low) / (high - low)) ** factor.double().numpy()
    truth = (power - power.mean(space, keepdims=True)) / power.std(space, keepdims=True)
    truth = truth * a.std(space, keepdims=True) + mean
    assert (np.abs(module.gamma(x, factor).numpy() - truth) <= scale).all()


@pytest.mark.parametrize("value", [0.0, 1.0, -1e6, 1e6])
@pytest.mark.parametrize("space", [(5, 6, 4), (1, 1), (1, 7)])
def test_constant_images_stay_finite(value: float, space: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, **{n: 1.0 for n in PROBABILITIES if n not in ("noise", "brightness")})
    image = torch.full((8, 2, *space), value)
    new = Augment(flip_axes=(0,), shift=1, turn=1.0)(image, None, seeded())[0]
    torch.testing.assert_close(new, image, rtol=1e-5, atol=0)


def test_draws_around_one_and_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = module.around_one(torch.linspace(0, 1, 5), 0.7, 1.5)
    torch.testing.assert_close(numbers, torch.tensor([0.7, 0.85, 1.0, 1.25, 1.5]))
    only(monkeypatch, noise=1.0)
    image = torch.zeros(40, 1, 20, 20, 20)
    new = Augment(turn=0)(image, None, seeded())[0].flatten(1)
    variance = new.var(1)
    assert variance.max() < 0.1 * 1.1 and variance.min() < 0.02 and variance.max() > 0.08
    assert (new.mean(1).abs() < 5 * (variance / 8000).sqrt()).all()


def test_bfloat16_and_autocast_run_in_float32() -> None:
    image = random(5, 1, 6, 5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        inside = Augment(turn=1.0)(image, None, seeded())[0]
    assert torch.equal(inside, Augment(turn=1.0)(image, None, seeded())[0])
    assert Augment()(image.bfloat16(), None, seeded())[0].dtype == torch.float32


def test_the_device_is_never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """On meta tensors, which have no values, all that would wait for values raises."""
    monkeypatch.setattr(module, "noise_like", lambda x, seed: torch.zeros_like(x))
    only(monkeypatch, **dict.fromkeys(PROBABILITIES, 1.0))
    image = torch.empty(4, 2, 6, 5, 4, device="meta")
    label = torch.empty(4, 1, 6, 5, 4, device="meta", dtype=torch.int64)
    new, new_label = Augment((0, 1), shift=1, turn=1.0)(image, label, seeded())
    assert new.device.type == "meta" and new_label.shape == label.shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_no_synchronisation_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, **dict.fromkeys(PROBABILITIES, 1.0))
    image = random(4, 2, 16, 15, 14).cuda()
    label = torch.randint(0, 3, (4, 1, 16, 15, 14)).cuda()
    augment = Augment((0, 1), shift=1, turn=1.0)
    first = augment(image, label, seeded())
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = augment(image, label, seeded())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@pytest.mark.parametrize(
    ("arguments", "image", "label", "words"),
    [
        ({"spacing": (1, 0, 1)}, (2, 1, 4, 4, 4), None, "spacing.*above 0"),
        ({"spacing": (1, 1)}, (2, 1, 4, 4, 4), None, "spacing.*3 numbers"),
        ({"flip_axes": (3,)}, (2, 1, 4, 4, 4), None, r"flip_axes=\(3,\): axes are 0 to 2"),
        ({"turn": 1.5}, (2, 1, 4, 4, 4), None, "turn=1.5"),
        ({"shift": -1}, (2, 1, 4, 4, 4), None, "shift=-1"),
        ({}, (2, 1, 4), None, r"image.*\(2, 1, 4\)"),
        ({}, (2, 0, 4, 4), None, "image"),
        ({}, (2, 1, 4, 4), torch.zeros(2, 1, 4, 5, dtype=torch.int64), "label.*5"),
        ({}, (2, 1, 4, 4), torch.zeros(2, 1, 4, 4), "label.*float32"),
    ],
)
def test_refuses(arguments: dict, image: tuple, label: Tensor | None, words: str) -> None:
    refuses(lambda: Augment(**arguments)(torch.zeros(image), label, seeded()), None, words)
