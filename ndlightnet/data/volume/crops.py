"""Training crops of volumes that follow from a seed and a number alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ndlightnet.data.errors import DataError
from ndlightnet.data.sampling import order


class Crops(Dataset[tuple[Tensor, Tensor, int]]):
    """Dataset of training crops. Case and position of crop number n (and its augmentation, by the caller) follow from
    the seed and from n, so that a resumed training gets the same crops as an uninterrupted one, with any number of
    workers.

    Every case comes up once before any comes up again. The last crops of a batch, the fraction `foreground`, are
    centred on a voxel of a class drawn evenly among those of the case; the others lie anywhere. (A fraction that rounds
    to no crop per batch gives one in every 1 / `foreground`.)

    Args:
        cases: prepared dictionaries with "image" (channels, *space), "label" (1, *space) and "places", flat indices of
            voxels of each class but the background; none smaller than `patch`.
        patch: shape of a crop. batch_size: crops in a batch.
        foreground: fraction of the crops that are sure to contain a label, if their case has any.

    Raises DataError for a fraction outside 0..1.
    """

    def __init__(self, cases: Any, patch: Sequence[int], batch_size: int, foreground: float, seed: int) -> None:
        self.cases, self.patch, self.seed = cases, np.array(patch), seed
        if not 0 <= foreground <= 1:
            raise DataError(f"data.foreground: {foreground}, expected a fraction from 0 to 1")
        self.period, forced = batch_size, round(foreground * batch_size)
        if not forced and foreground:
            self.period, forced = round(1 / foreground), 1
        self.free = self.period - forced

    def __len__(self) -> int:
        return len(self.cases)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, int]:
        """Return (image float32 (channels, *patch), label int16 (1, *patch), number)."""
        rounds, place = divmod(number, len(self.cases))
        case = self.cases[int(order(self.seed, rounds, len(self.cases))[place])]
        rng = np.random.default_rng((self.seed, 1, number))
        image, label = case["image"], case["label"]
        space = np.array(image.shape[1:])
        start = rng.integers(0, space - self.patch + 1)
        if number % self.period >= self.free:
            voxels = [v for v in case["places"] if len(v)]
            if voxels:
                of_class = voxels[rng.integers(len(voxels))]
                centre = np.unravel_index(int(of_class[rng.integers(len(of_class))]), space)
                start = np.clip(np.array(centre) - self.patch // 2, 0, space - self.patch)
        at = (slice(None), *(slice(a, a + n) for a, n in zip(start, self.patch, strict=True)))
        # one dtype for all cases: workers stack crops in memory of the first one's dtype
        return _plain(image)[at].clone(), _plain(label)[at].to(torch.int16, copy=True), number


def _plain(x: Tensor) -> Tensor:
    return x.as_subclass(Tensor)  # type: ignore[arg-type]
