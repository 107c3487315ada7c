"""No mixing at all: what a network does without its mixer, which every claim must stand beside."""

from __future__ import annotations

import torch
from torch import Tensor

from ndlightnet.layout import Grid, Layout
from ndlightnet.nn.mixers.base import StreamingMixer


class Identity(StreamingMixer):
    """Returns its tokens. No parameters; `dim` is accepted as by every mixer."""

    ragged = True

    def __init__(self, dim: int) -> None:
        super().__init__()

    def mix(self, x: Tensor, layout: Layout, mask: Tensor | None, causal: bool) -> Tensor:
        return x

    def init_state(
        self, batch: int, device: torch.device | str | None = None, space: tuple[int, ...] = ()
    ) -> tuple[()]:
        return ()

    def step(self, x: Tensor, grid: Grid, state: tuple[()]) -> tuple[Tensor, tuple[()]]:
        return x, state
