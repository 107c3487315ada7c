"""Local mixing as a module: learnt weights of a depthwise convolution."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ndlightnet.layout import Grid, Layout
from ndlightnet.layout.abstract import check_integers
from ndlightnet.nn.initial import Device, Initialized, Space
from ndlightnet.ops.dispatch import Impl
from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.local_mixing import begin_local_mixing, dense, local_mixing_step, star


class LocalMixing(Initialized):
    """Depthwise convolution of tokens (batch, length, dim) on a grid of `dims` axes.

    radius: how far a tap reads along an axis. dense: taps in the whole box around a token,
    (2 radius + 1)^dims of them, rather than along the axes only, 2 radius dims + 1. The causal form
    has as many taps: along the first axis they read 0 to 2 radius frames back.
    Parameters: taps * dim.
    """

    def __init__(self, dims: int, dim: int, radius: int = 1, dense: bool = False, impl: Impl = "auto") -> None:
        super().__init__()
        check_integers(1, dims=dims, radius=radius)
        self.dims, self.radius, self.dense, self.impl = dims, radius, dense, impl
        self.weight = nn.Parameter(torch.empty(len(self.offsets(False)), dim))
        self.reset_own()

    @torch.no_grad()
    def reset_own(self) -> None:
        self.weight.uniform_(-1, 1).mul_(len(self.weight) ** -0.5)

    def offsets(self, causal: bool) -> tuple[tuple[int, ...], ...]:
        """Return the offsets of the taps, in the order of the rows of `weight`."""
        return (dense if self.dense else star)(self.dims, self.radius, causal)

    def forward(self, x: Tensor, layout: Layout, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """Mix tokens (batch, length, dim). mask: (batch, length), False where x counts as 0."""
        return self.begin(x, layout, mask, causal)()

    def begin(
        self, x: Tensor, layout: Layout, mask: Tensor | None = None, causal: bool = False
    ) -> Callable[[], Tensor]:
        """Return, when called, the result: a slab of a grid sends its edges before that."""
        return begin_local_mixing(x, *self.taps(layout, causal), layout=layout, mask=mask, impl=self.impl)

    def init_state(self, batch: int, device: Device = None, space: Space = ()) -> Tensor:
        """Return the state before the first frame. space: shape of a frame."""
        shape = (batch, 2 * self.radius, Grid(space).length, self.weight.shape[1])
        return torch.zeros(shape, dtype=accumulator(self.weight), device=device)

    def step(self, x: Tensor, grid: Grid, state: Tensor) -> tuple[Tensor, Tensor]:
        """Mix the next frames in the causal form. Return them and the next state."""
        return local_mixing_step(x, *self.taps(grid, True), state, layout=grid, impl=self.impl)

    def taps(self, layout: Layout, causal: bool) -> tuple[Tensor, tuple[tuple[int, ...], ...]]:
        """Return the weight and the offsets of the taps, for tokens of a layout."""
        if layout.ndim != self.dims:
            raise ValueError(f"tokens on {layout.ndim} axes, local mixing with dims={self.dims}: expected as many")
        return self.weight, self.offsets(causal)
