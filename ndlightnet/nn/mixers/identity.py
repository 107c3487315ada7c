"""No mixing at all: what a network does without its mixer, which every claim must stand beside."""

from __future__ import annotations

import torch
from torch import Tensor

from ndlightnet.layout import Ragged
from ndlightnet.nn.mixers.mixer import Mixer


class Identity(Mixer):
    """Returns its tokens. No parameters; `dim` is accepted as by every mixer."""

    def __init__(self, dim: int) -> None:
        super().__init__()

    def forward(
        self, x: Tensor, *, mask: Tensor | None = None, causal: bool = False,
        layout: Ragged | None = None,
    ) -> Tensor:  # fmt: skip
        return x

    def init_state(
        self, batch: int, device: torch.device | str | None = None, space: tuple[int, ...] = ()
    ) -> tuple[()]:
        return ()

    def advance(
        self, x: Tensor, state: tuple[()], position: int | Tensor
    ) -> tuple[Tensor, tuple[()]]:
        return x, state
