"""Base class of labelled data of any kind."""

from __future__ import annotations

from typing import Any

import lightning as L


class LabelledData(L.LightningDataModule):
    """Base class of data with names of classes, which a checkpoint holds."""

    classes: tuple[str, ...] = ()

    def names(self) -> dict[str, list[Any]]:
        """Return what a checkpoint holds, so that `predict` does not need the training data."""
        return {"classes": list(self.classes)}

    def set_names(self, names: dict[str, list[Any]]) -> None:
        self.classes = tuple(names["classes"])


def held_out(fraction: float, count: int) -> set[int]:
    """Return which of `count` training samples choose the best checkpoint, evenly spaced."""
    out = round(fraction * count)
    return {round(i * count / out) for i in range(out)}
