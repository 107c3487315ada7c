"""No mixing: the baseline of a network without its mixer, to which every claim is compared."""

from __future__ import annotations

from torch import Tensor

from ndlightnet.layout import Grid, Layout
from ndlightnet.nn.initial import Device, Space
from ndlightnet.nn.mixers.base import StreamingMixer


class Identity(StreamingMixer):
    """Return the tokens unchanged. No parameters; `dim` is accepted as by every mixer."""

    ragged, mergeable = True, True

    order_free = True

    def __init__(self, dim: int) -> None:
        super().__init__()

    def mix(self, x: Tensor, layout: Layout, mask: Tensor | None, causal: bool) -> Tensor:
        return x

    def init_state(self, batch: int, device: Device = None, space: Space = ()) -> tuple[()]:
        return ()

    def step(self, x: Tensor, grid: Grid, state: tuple[()]) -> tuple[Tensor, tuple[()]]:
        return x, state
