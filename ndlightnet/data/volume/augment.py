"""Random augmentation of a whole batch of images or volumes, on the device where the batch is.

Random choices are drawn on the CPU from a given generator, so that a batch follows from the seed, and they select the
samples to change on the CPU, so that the code never waits for the device. Probabilities and strengths are those of
nnU-Net v2's 3-D training. The same code serves images, volumes and series of volumes over time, whose frames are moved,
blurred and changed alike: to `grid_sample` and `interpolate`, which take three axes of space at most, frames are
channels. No matrices are multiplied on the device, so autocast and TF32 change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
import torch.nn.functional as F
from torch import Tensor

from ndlightnet.data.errors import DataError

ANGLE = 30.0  # degrees, at most, in every plane
ZOOM = (0.7, 1.4)  # step between the sampled points, in cells
COARSE = 3.0  # an axis over so many times coarser than the finest is not rotated, zoomed or lowered
NOISE = 0.1  # variance, at most
SIGMA = (0.5, 1.0)  # of the blur, cells
FACTOR = (0.75, 1.25)  # of brightness and of contrast
LOW = (0.5, 1.0)  # fraction of the cells that a low resolution keeps along an axis
GAMMA = (0.7, 1.5)
PROBABILITIES = {
    "noise": 0.1,
    "blur": 0.2,
    "brightness": 0.15,
    "contrast": 0.15,
    "low": 0.25,
    "inverted gamma": 0.1,
    "gamma": 0.3,
    "mirror": 0.5,
}
PER_CHANNEL = {"blur": 0.5, "low": 0.5}  # probability of each channel of a chosen sample
LINEAR = ("", "linear", "bilinear", "trilinear")  # torch's names, by the number of axes
TAPS = 3  # the blur's reach in cells: 3 sigma


@dataclass(frozen=True)
class Augment:
    """Augment (image, label) at random; samples that draw no change stay the same bit for bit.

    Args:
        flip_axes: axes of the samples that are mirrored half of the time; of a series 0 is time, 1 to 3 are space.
        spacing: mm per cell and axis of space, so that rotations are true; None: the same for all. An axis more than
            three times coarser than the finest is left out: only the planes of the others are rotated, zoomed and
            lowered in resolution.
        shift: most whole cells by which every sample is shifted along every axis of space.
        turn: probability of a rotation, and that of a zoom.
        intensities: whether values change as well; False for masks.
    """

    flip_axes: tuple[int, ...] = ()
    spacing: tuple[float, ...] | None = None
    shift: int = 0
    turn: float = 0.2
    intensities: bool = True

    def __post_init__(self) -> None:
        if self.spacing is not None and not all(0 < mm < float("inf") for mm in self.spacing):
            raise DataError(f"spacing={self.spacing}: expected mm above 0")
        if self.shift < 0 or not 0 <= self.turn <= 1:
            raise DataError(f"shift={self.shift}, turn={self.turn}: expected 0 or more cells and a probability")

    @torch.no_grad()
    def __call__(self, image: Tensor, label: Tensor | None, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """Augment image (batch, channels, *space), floating point, and label (batch, 1, *space), integers below 2**24,
        or None; generator on the CPU. Returns new tensors, image as float32. With four axes the first is time.

        Space from outside is filled by reflection. Images are interpolated linearly, labels take the nearest cell.
        DataError where shapes and arguments do not fit.
        """
        self._check(image, label)
        image = image.float().clone(memory_format=torch.contiguous_format)
        if label is not None:
            label = label.clone(memory_format=torch.contiguous_format)
        self._move(image, label, generator)
        if self.intensities:
            change_intensities(image, self._fine(_space(image)), generator)
        for axis in self.flip_axes:
            chosen = torch.rand(len(image), generator=generator) < PROBABILITIES["mirror"]
            for x in (image, label):
                if x is not None:
                    change(x, chosen, lambda rows, axis=axis: rows.flip(axis + 2))
        return image, label

    def _check(self, image: Tensor, label: Tensor | None) -> None:
        axes = image.ndim - 2
        if axes not in (2, 3, 4) or not image.is_floating_point() or not image.numel():
            expected = "floats (batch, channels, *space) with 2 or 3 axes of space, or time and 3"
            raise DataError(f"image: expected {expected}, got {tuple(image.shape)} {image.dtype}")
        expected_shape = (len(image), 1, *image.shape[2:])
        if label is not None and (label.shape != expected_shape or label.is_floating_point()):
            raise DataError(f"label: expected integers {expected_shape}, got {tuple(label.shape)} {label.dtype}")
        if any(not 0 <= axis < axes for axis in self.flip_axes):
            raise DataError(f"flip_axes={self.flip_axes}: axes are 0 to {axes - 1}")
        if self.spacing is not None and len(self.spacing) != (space := _space(image)):
            raise DataError(f"spacing={self.spacing}: expected {space} numbers, one for each axis")

    def _fine(self, axes: int) -> list[int]:
        spacing = self.spacing or (1.0,) * axes
        return [axis for axis in range(axes) if spacing[axis] <= COARSE * min(spacing)]

    def _move(self, image: Tensor, label: Tensor | None, generator: torch.Generator) -> None:
        """Rotate, zoom and shift, in place, by one resampling."""
        batch, axes = len(image), _space(image)
        fine = self._fine(axes)
        planes = list(combinations(fine, 2))
        turned, zoomed = (torch.rand(2, batch, generator=generator) < self.turn).unbind()
        angles = (torch.rand(batch, len(planes), generator=generator) * 2 - 1) * ANGLE
        zooms = around_one(torch.rand(batch, generator=generator), *ZOOM)
        steps = torch.randint(-self.shift, self.shift + 1, (batch, axes), generator=generator)
        chosen = (turned & bool(planes)) | zoomed | (steps != 0).any(1)
        matrix = rotations(angles * turned[:, None], planes, axes)
        matrix[:, :, fine] *= torch.where(zoomed, zooms, 1.0)[:, None, None]
        mm = torch.tensor(self.spacing or (1.0,) * axes, dtype=torch.float64)
        cells = torch.cat([matrix * mm / mm[:, None], -steps[:, :, None].double()], 2)
        picked = chosen.nonzero()[:, 0]
        if len(picked):
            grid = sampling_grid(cells[picked], image.shape[-axes:], image.device)
            for x, mode in ((image, "bilinear"), (label, "nearest")):
                if x is not None:  # frames as channels
                    channels = x.view(batch, -1, *x.shape[-axes:])
                    change(channels, chosen, lambda rows, mode=mode: sample(rows, grid, mode))


def _space(x: Tensor) -> int:
    """Return the number of axes of space of (batch, channels, *space), or with time before them."""
    return min(3, x.ndim - 2)


def put(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting for it, which takes pinned memory."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def change(rows: Tensor, chosen: Tensor, function: Callable[..., Tensor], *strengths: Tensor) -> None:
    """Set rows[chosen] = function(rows[chosen], *(s[chosen] for s in strengths)). `chosen`, bool (rows,), and
    `strengths`, (rows,) each, are on the CPU; `function` gets them as (chosen, 1, ...)."""
    picked = chosen.nonzero()[:, 0]
    if not len(picked):
        return
    at, ones = put(picked, rows.device), (1,) * (rows.ndim - 1)
    columns = [put(s[picked].view(-1, *ones), rows.device) for s in strengths]
    rows.index_copy_(0, at, function(rows.index_select(0, at), *columns))


def around_one(uniform: Tensor, low: float, high: float) -> Tensor:
    """Map uniform numbers in 0..1: one half of them to low..1 and the other to 1..high."""
    below, above = low + 2 * uniform * (1 - low), 1 + (2 * uniform - 1) * (high - 1)
    return torch.where(uniform < 0.5, below, above)


def rotations(angles: Tensor, planes: Sequence[tuple[int, int]], axes: int) -> Tensor:
    """Rotate plane after plane by angles (n, planes) in degrees: (n, axes, axes) float64."""
    eye = torch.eye(axes, dtype=torch.float64).repeat(len(angles), 1, 1)
    result = eye.clone()
    for (i, j), angle in zip(planes, angles.double().deg2rad().unbind(1), strict=True):
        turn = eye.clone()
        turn[:, i, i] = turn[:, j, j] = angle.cos()
        turn[:, i, j], turn[:, j, i] = -angle.sin(), angle.sin()
        result = turn @ result
    return result


def sampling_grid(matrix: Tensor, space: Sequence[int], device: torch.device) -> Tensor:
    """Return the grid for `grid_sample(align_corners=False)`: (n, *space, axes), last axis first, in halves of the
    volume from its centre. matrix: (n, axes, axes + 1), from cells relative to the centre of the output to cells
    relative to the centre of the input.
    """
    halves = torch.tensor(space, dtype=torch.float64) / 2
    scaled = put((matrix / halves[:, None]).float(), device)
    ones = (1,) * len(space)
    coordinates = []
    for row in scaled.unbind(1):
        total = row[:, -1].view(-1, *ones)
        for axis, size in enumerate(space):
            line = torch.arange(size, device=device) - (size - 1) / 2
            shape = [size if n == axis else 1 for n in range(len(space))]
            total = total + row[:, axis].view(-1, *ones) * line.view(shape)
        coordinates.append(total)
    return torch.stack(coordinates[::-1], -1)


def sample(x: Tensor, grid: Tensor, mode: str) -> Tensor:
    return F.grid_sample(x.float(), grid, mode, "reflection", align_corners=False).to(x.dtype)


def change_intensities(image: Tensor, fine: Sequence[int], generator: torch.Generator) -> None:
    """Apply noise, blur, brightness, contrast, low resolution and gamma in place, in this order."""
    batch, channels = image.shape[:2]
    rows = image.view(batch * channels, *image.shape[2:])

    def drawn(name: str) -> Tensor:
        """Draw the rows (channels of samples) to change: bool (rows,)."""
        sample = torch.rand(batch, 1, generator=generator) < PROBABILITIES[name]
        channel = torch.rand(batch, channels, generator=generator) < PER_CHANNEL.get(name, 1.0)
        return (sample & channel).flatten()

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(len(rows), generator=generator)

    def gammas() -> Tensor:
        return around_one(uniform(0, 1), *GAMMA)

    # values are drawn on the device, from a seed drawn here
    seed = int(torch.randint(2**62, (), generator=generator))
    change(rows, drawn("noise"), lambda x, v: x + noise_like(x, seed) * v.sqrt(), uniform(0, NOISE))
    change(rows, drawn("blur"), blur, *(uniform(*SIGMA) for _ in range(_space(image))))
    change(rows, drawn("brightness"), torch.mul, uniform(*FACTOR))
    change(rows, drawn("contrast"), contrast, uniform(*FACTOR))
    lowered, fractions = drawn("low"), uniform(*LOW).tolist()
    for row in lowered.nonzero()[:, 0].tolist():
        rows[row] = low_resolution(rows[row], fractions[row], fine)
    change(rows, drawn("inverted gamma"), lambda x, g: -gamma(-x, g), gammas())
    change(rows, drawn("gamma"), gamma, gammas())


def noise_like(x: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(x.device).manual_seed(seed)
    return torch.randn(x.shape, generator=generator, device=x.device)


def blur(x: Tensor, *sigmas: Tensor) -> Tensor:
    """Apply a Gaussian along each of the last axes of x (n, *space), with its sigmas (n, 1, ...) in cells; values at
    the border are repeated beyond it."""
    for axis, sigma in enumerate(sigmas, x.ndim - len(sigmas)):
        size = x.shape[axis]
        reach = torch.arange(-TAPS, TAPS + 1, device=x.device)
        weights = (-0.5 * (reach / sigma.view(-1, 1)).square()).softmax(1)
        place = torch.arange(-TAPS, size + TAPS, device=x.device).clamp(0, size - 1)
        padded, x = x.index_select(axis, place), torch.zeros_like(x)
        for tap, weight in enumerate(weights.unbind(1)):
            x.addcmul_(padded.narrow(axis, tap, size), weight.view_as(sigma))
    return x


def contrast(x: Tensor, factor: Tensor) -> Tensor:
    """Scale each x[i] about its mean, clamped to its range."""
    space = tuple(range(1, x.ndim))
    mean, low, high = x.mean(space, True), x.amin(space, True), x.amax(space, True)
    return ((x - mean) * factor + mean).clamp(low, high)


def low_resolution(x: Tensor, fraction: float, axes: Sequence[int]) -> Tensor:
    """Resample x (*space), or with time before it, to a fraction of its cells along `axes` (nearest), and back
    (linear)."""
    space = x.shape[-3:]
    small = [max(1, round(n * fraction)) if i in axes else n for i, n in enumerate(space)]
    down = F.interpolate(x.reshape(1, -1, *space), small, mode="nearest-exact")
    up = F.interpolate(down, space, mode=LINEAR[len(space)], align_corners=False)
    return up.view(x.shape)


def gamma(x: Tensor, exponent: Tensor) -> Tensor:
    """Raise each x[i], mapped to 0..1, to its exponent, and restore its mean and standard deviation; a constant x[i]
    stays as it is."""
    space = tuple(range(1, x.ndim))
    low, mean = x.amin(space, True), x.mean(space, True)
    extent = x.amax(space, True) - low
    powered = ((x - low) / extent).pow(exponent)
    deviation, became = (a.std(space, correction=0, keepdim=True) for a in (x, powered))
    result = (powered - powered.mean(space, True)) * (deviation / became) + mean
    return torch.where(extent > 0, result, x)
