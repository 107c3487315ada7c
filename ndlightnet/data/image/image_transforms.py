"""Transforms from an image file to what a network gets, in the names of torchvision and timm.

Images are Pillow's until the end, then (channels, height, width) uint8; normalisation and the
mixing of a batch are done on the device. Random choices are drawn from torch's global generator,
which `ndlightnet.data.sampling.SeededSamples` seeds for every image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

from ndlightnet.data.image.image_files import of_any_size
from ndlightnet.data.sampling import seeded_draws

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, pixels from 0 to 1
Interpolation = Literal["nearest", "bilinear", "bicubic"]
Mixing = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class RandAugment:
    """torchvision's RandAugment: `num_ops` operations on each image, of the strength `magnitude`
    out of `num_magnitude_bins`. What timm calls m9 is 9 of 11 here: it counts from 0 to 10."""

    num_ops: int = 2
    magnitude: int = 9
    num_magnitude_bins: int = 31

    def transform(self, fill: Sequence[int]) -> Any:
        """Return the transform; fill: the colour, one number per channel, of what an operation leaves empty."""
        bins, mode = self.num_magnitude_bins, InterpolationMode.BILINEAR
        return v2.RandAugment(self.num_ops, self.magnitude, bins, mode, list(fill))


def central_crop(image: Image.Image, space: tuple[int, int], pct: float, interpolation: Interpolation) -> Image.Image:
    """Return the middle of an image at size `space` (height, width): the largest part with these
    proportions, of which a centred fraction `pct` along each axis is kept. An enlarged copy of the
    whole image is never made, whatever its proportions are."""
    scale = pct * min(side / size for side, size in zip(image.size, space[::-1], strict=True))
    # rounding must not lead out of the image, which Pillow refuses
    width, height = (min(scale * n, side) for n, side in zip(space[::-1], image.size, strict=True))
    left, top = (image.width - width) / 2, (image.height - height) / 2
    box = (left, top, left + width, top + height)
    return image.resize(space[::-1], getattr(Image.Resampling, interpolation.upper()), box)


def evaluation(
    space: tuple[int, int], crop_pct: float, interpolation: Interpolation
) -> Callable[[Image.Image], Tensor]:
    """Return the transform of validation, test and prediction, and of training without crops."""
    crop = partial(central_crop, space=space, pct=crop_pct, interpolation=interpolation)
    return v2.Compose([crop, v2.PILToTensor()])


class RandomResizedCrop(v2.RandomResizedCrop):  # type: ignore[misc]
    """torchvision's, of images of any size."""

    def forward(self, *inputs: Any) -> Any:
        return of_any_size(super().forward, *inputs)


def training(
    space: tuple[int, int],
    interpolation: Interpolation,
    *,
    scale: tuple[float, float] | None,
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    padding: int = 0,
    hflip: float = 0.0,
    rotation: float = 0.0,
    randaugment: RandAugment | None = None,
    color_jitter: float = 0.0,
    grayscale: float = 0.0,
    random_erasing: float = 0.0,
    fill: Sequence[int] = (0,),
) -> Callable[[Any], Tensor]:
    """Return the transform of training, of an image or of all frames of a clip (frames, channels, height, width) alike;
    ndlightnet.training.ImageFolders and VideoData explain the arguments. fill: the colour, one number per channel, of
    what an operation leaves empty."""
    steps: list[Any] = [
        partial(central_crop, space=space, pct=1.0, interpolation=interpolation)
        if scale is None
        else RandomResizedCrop(space, scale, ratio, InterpolationMode(interpolation))
    ]
    if padding:
        steps.append(v2.RandomCrop(space, padding, fill=list(fill)))
    if hflip:
        steps.append(v2.RandomHorizontalFlip(hflip))
    if rotation:
        steps.append(v2.RandomRotation(rotation, InterpolationMode.BILINEAR, fill=list(fill)))
    if randaugment is not None:
        steps.append(randaugment.transform(fill))
    if color_jitter:
        steps.append(v2.ColorJitter(color_jitter, color_jitter, color_jitter))
    if grayscale:
        steps.append(v2.RandomGrayscale(grayscale))
    steps.append(v2.PILToTensor())  # which leaves tensors as they are
    if random_erasing:
        steps.append(v2.RandomErasing(random_erasing, value=list(fill)))
    return v2.Compose(steps)


def mixing(mixup: float, cutmix: float, classes: int) -> Mixing | None:
    """Return MixUp or CutMix of these alphas (0: not), at random if both, on batches of images and
    labels; the labels become (batch, classes) floats. None if both are 0."""
    transforms = [v2.MixUp(alpha=mixup, num_classes=classes)] if mixup else []
    transforms += [v2.CutMix(alpha=cutmix, num_classes=classes)] if cutmix else []
    return v2.RandomChoice(transforms) if transforms else None


def seeded(mix: Mixing, seed: int, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mixed batch, with draws that follow from `seed` alone; torch's generator stays as it is."""
    with seeded_draws(seed):
        return mix(images, labels)
