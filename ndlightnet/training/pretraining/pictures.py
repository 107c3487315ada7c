"""Sheets of reconstructions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ndlightnet.training.generation.pictures import save_sheet


def save_reconstructions(path: Path, x: Tensor, cells: Tensor, dropped: Tensor, data: Any) -> None:
    """Write a picture of samples x (n, channels, *space): what was left of them, what was predicted
    (`cells`, as x), the samples themselves. dropped: (n, *space) bool."""
    grey = torch.where(dropped[:, None], torch.zeros_like(x), x)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = (("left", grey), ("predicted", cells), ("sample", x))
    # of six channels of a clip the first three are the frames
    save_sheet(path, [(name, list(data.to_pixels(some)[:, :3])) for name, some in rows])
