"""Base class of labelled data of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
from torch import Tensor

from ndlightnet.data.errors import DataError
from ndlightnet.data.sampling import linspace_indices


class LabelledData(L.LightningDataModule):
    """Base class of data with names of classes, which a checkpoint holds.

    Data that a network can be trained to generate have `space`, the sizes of a sample, and
    `channels` after `setup`, and `to_pixels` and `from_pixels`.
    """

    classes: tuple[str, ...] = ()

    def to_pixels(self, x: Tensor) -> Tensor:
        """Undo the normalisation: (batch, channels, *space) -> uint8 of this shape, clipped."""
        raise NotImplementedError

    def from_pixels(self, pixels: Tensor) -> Tensor:
        """Normalise pixels (batch, channels, *space) uint8, as those of a batch."""
        raise NotImplementedError

    def plain_train_dataloader(self) -> Any:
        """Return the training samples, each once, without augmentation if the data can do that."""
        return self.train_dataloader()

    def sample_name(self, number: int) -> str:
        """Return the file of a test sample, or its number."""
        return str(number)

    def names(self) -> dict[str, list[Any]]:
        """Return what a checkpoint holds, so that `predict` does not need the training data."""
        return {"classes": list(self.classes)}

    def set_names(self, names: dict[str, list[Any]]) -> None:
        self.classes = tuple(names["classes"])


def held_out(fraction: float, count: int) -> set[int]:
    """Return which of `count` training samples choose the best checkpoint, evenly spaced."""
    out = round(fraction * count)
    return {round(i * count / out) for i in range(out)}


def limited(data: Any, labels: Sequence[int]) -> list[int]:
    """Return the numbers of the samples to train with, of those with these labels:
    `data.train_limit` of them, evenly spaced; default: all."""
    total = len(labels)
    limit = total if data.train_limit is None else data.train_limit
    if not 0 < limit <= total:
        raise DataError(
            f"{data.root}: train_limit={data.train_limit}, validation={data.validation}: {limit} "
            f"samples to train with, expected 1 or more of {total}"
        )
    chosen = linspace_indices(limit, total)
    if {labels[number] for number in chosen} != {*labels}:
        raise DataError(f"{data.root}: train_limit={limit}, no sample of a class is left to train with")
    return chosen
