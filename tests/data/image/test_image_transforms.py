"""Transforms of images: crops at the right places, random choices from the seed alone."""

import numpy as np
import pytest
import torch
from PIL import Image

from ndlightnet.data.image.image_transforms import RandAugment, central_crop, evaluation, mixing, seeded, training

PLAIN = {"scale": None, "fill": (1, 2, 3)}
EVERYTHING = {"hflip": 0.5, "color_jitter": 0.4, "randaugment": RandAugment(2, 9, 11), "random_erasing": 0.5}
rng = np.random.default_rng(0)


def noise(height: int, width: int, channels: int = 3) -> Image.Image:
    cells = rng.integers(0, 256, (height, width, channels), np.uint8)
    return Image.fromarray(cells if channels == 3 else cells[..., 0])


def test_an_image_of_the_size_stays_as_it_is():
    image = noise(8, 12)
    for transform in (evaluation((8, 12), 1.0, "bicubic"), training((8, 12), "bicubic", **PLAIN)):
        cells = transform(image)
        assert cells.dtype == torch.uint8
        assert np.array_equal(cells.permute(1, 2, 0), np.asarray(image))


def test_the_middle_is_kept():
    """As by a resize of the short side and a central crop, where both end at whole pixels."""
    image = noise(32, 64)
    middle = np.asarray(central_crop(image, (12, 12), 0.75, "bilinear")).astype(int)
    resized = image.resize((32, 16), Image.Resampling.BILINEAR)
    expected = np.asarray(resized.crop((10, 2, 22, 14))).astype(int)
    assert np.abs(middle - expected)[1:-1, 1:-1].max() <= 1  # Pillow sees the border from within only
    wide = central_crop(image, (4, 8), 1.0, "nearest")
    assert wide.size == (8, 4) and wide.getpixel((7, 3)) == image.getpixel((60, 28))


@pytest.mark.parametrize("side", [29, 58, 116])
def test_a_crop_of_the_whole_image_ends_at_its_border(side):
    """side / 224 * 224 is more than `side` in float64."""
    assert side / 224 * 224 > side
    for sides in ((side, side), (side, 300), (300, side)):
        assert central_crop(noise(*sides), (224, 224), 1.0, "bicubic").size == (224, 224)


@pytest.mark.parametrize("sides", [(1, 1), (1, 3000), (3000, 1), (2, 2)])
def test_absurd_sides(sides):
    transforms = [
        evaluation((16, 16), 0.875, "bicubic"),
        training((16, 16), "bicubic", **PLAIN | EVERYTHING | {"scale": (0.08, 1.0), "randaugment": RandAugment()}),
        training((16, 16), "bicubic", **PLAIN | EVERYTHING, padding=4),
    ]
    for transform in transforms:
        assert transform(noise(*sides)).shape == (3, 16, 16)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("scale, padding", [((0.2, 1.0), 0), (None, 3)])
def test_everything_at_once_follows_from_the_seed(channels, scale, padding):
    options = {**EVERYTHING, "scale": scale, "padding": padding, "fill": (9,) * channels}
    transform, image = training((10, 8), "bilinear", **options), noise(20, 30, channels)

    def run(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.stack([transform(image) for _ in range(8)])

    assert run(0).shape == (8, channels, 10, 8)
    assert torch.equal(run(0), run(0)) and not torch.equal(run(0), run(1))


def test_each_option_does_what_its_name_says():
    image = noise(12, 12)
    plain = evaluation((12, 12), 1.0, "bicubic")(image)
    fill = torch.tensor([1, 2, 3], dtype=torch.uint8)[:, None, None]

    def draw(**option: object) -> torch.Tensor:
        return training((12, 12), "bicubic", **PLAIN, **option)(image)

    assert torch.equal(draw(hflip=1.0), plain.flip(2))
    erased_image = draw(random_erasing=1.0)
    erased = (erased_image == fill).all(0)
    assert 1 <= erased.sum() < 80 and torch.equal(erased_image[:, ~erased], plain[:, ~erased])
    torch.manual_seed(3)
    padded = draw(padding=4)
    assert (padded == fill).all(0).any() and not torch.equal(padded, plain)
    assert not torch.equal(draw(color_jitter=0.5), plain)
    for magnitude, changed in ((0, False), (30, True)):
        torch.manual_seed(0)
        draws = torch.stack([draw(randaugment=RandAugment(1, magnitude)) for _ in range(9)])
        # some operations have no strength: AutoContrast and Equalize change noise hardly
        assert ((draws.float() - plain).abs().mean() > 20) == changed


def test_mixing_gives_soft_labels_from_the_seed():
    images, labels = torch.randn(6, 3, 8, 8), torch.arange(6) % 4
    assert mixing(0, 0, 4) is None
    kinds = set()
    for seed in range(12):
        ways = mixing(0.8, 1.0, 4)
        assert ways is not None
        state = torch.get_rng_state()
        mixed, soft = seeded(ways, seed, images, labels)
        again = seeded(ways, seed, images, labels)
        assert torch.equal(state, torch.get_rng_state())
        assert torch.equal(mixed, again[0]) and torch.equal(soft, again[1])
        assert soft.shape == (6, 4) and torch.allclose(soft.sum(1), torch.ones(6))
        share = soft[0, 0]  # of the label of the first image; the other is label 1 of image 5
        if torch.allclose(mixed, share * images + (1 - share) * images.roll(1, 0), atol=1e-5):
            kinds.add("mixup")
        else:
            kinds.add("cutmix")
            kept_cells = (mixed == images).all(1).float().mean((1, 2))
            assert torch.allclose(kept_cells, share.expand(6), atol=1e-5)
    assert kinds == {"mixup", "cutmix"}
