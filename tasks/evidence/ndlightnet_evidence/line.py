"""Images as lines of pixels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ndlightnet import NDLightNet


class Line(NDLightNet):
    """An NDLightNet of one axis that reads images (batch, channels, h, w) row after row. arguments: of NDLightNet."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(1, **arguments)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x.flatten(2))
