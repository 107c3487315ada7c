"""Clouds of points: files of them, surfaces of masks, their normalisation, and a part of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import binary_erosion
from torch import Tensor

from ndlightnet.data.errors import DataError, atomic_write, readable

VOXELS = (".nii", ".nii.gz")
ENDINGS = (".npy", ".ply", ".xyz", *VOXELS)
LEAST = 8  # points of a cloud


def read_cloud(path: Path) -> Tensor:
    """Read the coordinates of points, (points, 3) float64, each place once: .ply, the vertices of a PLY file; .npy, an
    array of them, (points, 3 or more); .xyz, a line of numbers for each; and, for a mask as NIfTI, .nii or .nii.gz, or
    an array of whole numbers with three axes, the voxels other than 0 at its surface, those of a NIfTI in millimetres.
    DataError for other content, for fewer than LEAST points, and for coordinates that are not finite."""
    name = path.name.lower()
    with readable(path):
        array: Any
        if name.endswith(".ply"):
            from plyfile import PlyData

            vertex = PlyData.read(path)["vertex"]
            array = np.stack([vertex[axis] for axis in "xyz"], 1)
        elif name.endswith(VOXELS):
            image: Any = nibabel.load(path)
            mask = np.asarray(image.dataobj)
            mask = mask.reshape(mask.shape[:3]) if mask.ndim > 3 and mask.size == np.prod(mask.shape[:3]) else mask
            if mask.ndim != 3:
                raise DataError(f"{path}: has the shape {mask.shape}, expected a mask with three axes")
            if not np.isfinite(mask).all():
                raise DataError(f"{path}: has voxels that are not finite numbers")
            array = surface(mask != 0)
            array = nibabel.affines.apply_affine(image.affine, array)
        elif name.endswith(".npy"):
            array = np.load(path, allow_pickle=False)
            array = surface(array != 0) if array.ndim == 3 and array.dtype.kind in "biu" else array
        else:
            array = np.loadtxt(path, ndmin=2)
    if array.ndim != 2 or array.shape[1] < 3 or array.dtype.kind not in "fiu":
        raise DataError(f"{path}: has an array {array.shape} {array.dtype}, expected numbers (points, 3 or more)")
    points = array[:, :3].astype(np.float64)
    if not np.isfinite(points).all():
        raise DataError(f"{path}: has coordinates that are not finite numbers")
    points = points[np.sort(np.unique(points, axis=0, return_index=True)[1])]
    if len(points) < LEAST:
        raise DataError(f"{path}: has {len(points)} points at different places, expected {LEAST} or more")
    return torch.from_numpy(points)


def surface(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the voxels of a mask with a face to a voxel that is none, or to the edge, (voxels, axes)."""
    return np.argwhere(mask & ~binary_erosion(mask))


def write_cloud(path: Path, points: Tensor) -> None:
    """Write points (points, 3) as a binary PLY file."""
    from plyfile import PlyData, PlyElement

    vertex = np.array([*map(tuple, points.double().tolist())], [(axis, "f8") for axis in "xyz"])
    with atomic_write(path) as draft:
        PlyData([PlyElement.describe(vertex, "vertex")]).write(draft)


@dataclass(frozen=True)
class Placed:
    """A cloud about 0 within a radius of 1, and where it was: centre (3,), radius ()."""

    points: Tensor
    centre: Tensor
    radius: Tensor


def placed(points: Tensor, least: float = 1e-300) -> Placed:
    """Move the mean of points (points, 3) to 0, and scale the farthest one to a distance of 1, by no more than
    1 / `least`. Points are float64: of coordinates far from 0 float32 has too few digits."""
    points = points.double()
    centre = points.mean(0)
    radius = (points - centre).norm(dim=1).max().clamp(min=least)
    return Placed((points - centre) / radius, centre, radius)


def some_points(points: Tensor, count: int, rng: torch.Generator | None) -> Tensor:
    """Return `count` of the points at random, of fewer all of them and some again."""
    order = torch.randperm(len(points), generator=rng)
    if len(points) < count:
        order = torch.cat([order, torch.randint(len(points), (count - len(points),), generator=rng)])
    return points[order[:count]]


def half_space(points: Tensor, keep: float, rng: torch.Generator | None) -> Tensor:
    """Return the fraction `keep` of the points, LEAST or more, that lie to one side of a plane of random direction."""
    normal = torch.nn.functional.normalize(torch.randn(3, generator=rng), dim=0).to(points.dtype)
    return points[(points @ normal).argsort()[: max(LEAST, round(keep * len(points)))]]
