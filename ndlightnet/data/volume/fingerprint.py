"""Statistics of a folder of labelled volumes: sizes, voxel edges, intensities under the labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import nibabel
import numpy as np
from numpy.typing import NDArray

from ndlightnet.data.threads import in_threads
from ndlightnet.data.volume.file_grid import Case
from ndlightnet.data.volume.volume import Volume

SAMPLE = 10_000  # labelled voxels per case whose values are stored


@dataclass(frozen=True)
class Fingerprint:
    """Statistics of all cases; axes are x to the right, y to the front, z to the head.

    shapes: (cases, 3) voxels. spacings: (cases, 3) mm. values: (channels, samples) of labelled voxels, at most SAMPLE
    of each case. voxels: (classes,) voxels of each class in all cases.
    """

    shapes: NDArray[np.int64]
    spacings: NDArray[np.float64]
    values: NDArray[np.float32]
    voxels: NDArray[np.int64]


def fingerprint(cases: Sequence[Case], classes: int, channels: int | None = None) -> Fingerprint:
    """Read every case once and return the statistics. Raises DataError as `Volume.read` does."""

    def measure(case: Case) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float32], NDArray[np.int64]]:
        volume = Volume.read(case, classes, channels)
        image, label = volume.image, volume.label.numpy()[0]
        axes = nibabel.io_orientation(image.affine.numpy())[:, 0].astype(int)
        order = np.argsort(axes)
        places = np.flatnonzero(label)
        rng = np.random.default_rng(0)
        some = rng.choice(places, min(SAMPLE, len(places)), replace=False)
        return (
            np.array(label.shape[-3:])[order],
            image.pixdim.numpy()[order],
            image.numpy().reshape(len(image), -1)[:, np.sort(some)],
            np.bincount(label.ravel(), minlength=classes),
        )

    measured = in_threads(measure, cases, "measuring volumes")
    shapes, spacings, values, voxels = zip(*measured, strict=True)
    return Fingerprint(np.stack(shapes), np.stack(spacings), np.concatenate(values, 1), np.sum(voxels, 0))
