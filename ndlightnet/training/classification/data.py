"""What labelled data share, whatever a sample is."""

from __future__ import annotations

from typing import Any

import lightning as L


class LabelledData(L.LightningDataModule):
    """Knows the names of its classes; a checkpoint keeps them."""

    classes: tuple[str, ...] = ()

    def names(self) -> dict[str, list[Any]]:
        """What a checkpoint keeps, so that predict does without the training data."""
        return {"classes": list(self.classes)}

    def set_names(self, names: dict[str, list[Any]]) -> None:
        self.classes = tuple(names["classes"])


def held_out(fraction: float, count: int) -> set[int]:
    """Those of `count` training samples that choose the best checkpoint, evenly spaced."""
    out = round(fraction * count)
    return {round(i * count / out) for i in range(out)}
