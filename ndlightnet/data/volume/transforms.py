"""Preparation of a `Volume` for a network: reoriented, resampled and scaled.

A prepared volume lies along RAS axes (x to the right, y to the front, z to the head), whatever index order its file
has, so that left and right need not be guessed. Axes are only flipped and permuted; nothing is interpolated unless a
spacing is given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from monai.transforms.spatial.array import Spacing
from monai.transforms.transform import MapTransform
from torch import Tensor

from ndlightnet.data.errors import DataError
from ndlightnet.data.volume.volume import Volume, in_space, upright

SAMPLE = 1_000_000  # voxels that percentiles are taken of
MOST_VOXELS = 2**31  # a larger resampled volume is refused: the spacing must be a mistake


@dataclass(frozen=True)
class Intensity:
    """Scaling of a channel to numbers of order one: (clipped to low..high - mean) / deviation, in the file's units (CT:
    Hounsfield units). Without numbers each volume is clipped to its percentiles 0.5 and 99.5 and scaled to mean 0 and
    standard deviation 1, for scanners without units (MRI). Raises DataError if only some numbers are given, and for an
    empty range."""

    low: float | None = None
    high: float | None = None
    mean: float | None = None
    deviation: float | None = None

    def __post_init__(self) -> None:
        present = [value is not None for value in (self.low, self.high, self.mean, self.deviation)]
        if any(present) != all(present):
            raise DataError(f"{self}: expected all four numbers or none")
        if all(present) and not (self.low < self.high and self.deviation > 0):  # type: ignore[operator]
            raise DataError(f"{self}: expected low < high and deviation > 0")

    def scale_(self, x: Tensor) -> None:
        """Scale x (*space) float32 in place: a volume is not held twice."""
        if self.mean is not None:
            x.clamp_(self.low, self.high).sub_(self.mean).div_(self.deviation)  # type: ignore[arg-type]
            return
        some = x
        if x.numel() > SAMPLE:  # every nth voxel may lie in few planes, and x need not be dense
            rng = torch.Generator().manual_seed(0)
            some = x[tuple(torch.randint(n, (SAMPLE,), generator=rng) for n in x.shape)]
        low, high = torch.quantile(some.flatten(), torch.tensor([0.005, 0.995])).tolist()
        # in one pass and in double; x.mean(dtype=float64) would make a copy of twice the size
        deviation, mean = torch.std_mean(x.clamp_(low, high), correction=0)
        x.sub_(mean).div_(deviation.clamp_min(1e-8))


class Prepare:
    """Convert a `Volume` to {"name", "image", "label" (if it has one)} along RAS axes, at `spacing` (mm along x, y, z;
    None: the file's), with the `channels` by number (None: all), each scaled by its Intensity. The `Volume` itself is
    not changed.

    image: MetaTensor (channels, x, y, z) float32. label: MetaTensor (1, x, y, z) uint8 or int16. A series over time has
    its frames before x, all treated alike.

    plane: expect pictures, volumes of one slice.

    Raises DataError for an invalid spacing, for one at which a volume is far too large, and for a volume where a
    picture is expected."""

    def __init__(
        self,
        intensities: Sequence[Intensity],
        spacing: Sequence[float] | None = None,
        channels: Sequence[int] | None = None,
        plane: bool = False,
    ) -> None:
        self.plane = plane
        if spacing is not None and (len(spacing) != 3 or not all(0 < s < np.inf for s in spacing)):
            raise DataError(f"data.spacing: {list(spacing)}, expected three edges above 0 (mm)")
        self.intensities, self.spacing = list(intensities), spacing
        self.channels = list(range(len(self.intensities)) if channels is None else channels)

    def __call__(self, volume: Volume) -> dict[str, Any]:
        if len(volume.image) != len(self.intensities):
            raise ValueError(f"{len(volume.image)} channels for {len(self.intensities)} intensities")
        name = volume.case.name
        if self.plane and volume.image.shape[-1] != 1:
            slices = f"has {volume.image.shape[-1]} slices"
            raise DataError(f"{volume.case.images[0]}: {slices}, expected a picture for data.patch of 2 sizes")
        # indexing by a list makes a copy, which is scaled in place
        image = self._resampled(upright(volume.image[self.channels]), "bilinear", name)
        _scale_(image, self.intensities, self.channels)
        if volume.label is None:
            return {"name": name, "image": image}
        label = self._resampled(upright(volume.label), "nearest", name)
        kind = torch.uint8 if label.max() < 256 else torch.int16
        return {"name": name, "image": image, "label": label.to(kind)}

    def _resampled(self, volume: Any, mode: str, name: str) -> Any:
        if self.spacing is None:
            return volume
        edges = [e * n for e, n in zip(volume.pixdim.tolist(), volume.shape[-3:], strict=True)]
        shape = [max(1, round(e / s)) for e, s in zip(edges, self.spacing, strict=True)]
        if int(np.prod([*volume.shape[1:-3], *shape], dtype=np.float64)) > MOST_VOXELS:
            fine = f"data.spacing: {list(self.spacing)} mm, at which {name} would have the shape {shape}"
            raise DataError(f"{fine}: expected one of at most {MOST_VOXELS} voxels")
        return in_space(Spacing(tuple(self.spacing), mode=mode), volume)


class ScaleChannelsd(MapTransform):
    """The last step of Prepare as a MONAI dictionary transform: take the `channels` by number (None: all) of an image
    (channels, *space) and scale each by its Intensity."""

    def __init__(self, keys: Any, intensities: Sequence[Intensity], channels: Sequence[int] | None = None) -> None:
        super().__init__(keys)
        self.intensities = list(intensities)
        self.channels = list(range(len(self.intensities)) if channels is None else channels)

    def __call__(self, data: Mapping[Any, Any]) -> dict[Any, Any]:
        scaled = dict(data)
        for key in self.key_iterator(scaled):
            if len(scaled[key]) != len(self.intensities):
                raise ValueError(f"{key}: {len(scaled[key])} channels, expected {len(self.intensities)}")
            scaled[key] = scaled[key][self.channels]  # a copy
            _scale_(scaled[key], self.intensities, self.channels)
        return scaled


def _scale_(image: Any, intensities: Sequence[Intensity], channels: Sequence[int]) -> None:
    for channel, number in zip(image.as_tensor(), channels, strict=True):
        intensities[number].scale_(channel)
