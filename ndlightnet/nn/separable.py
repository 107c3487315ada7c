"""Separable layers of a U-Net on any number of axes: every convolution is a depthwise one over the
grid and linear maps over channels.

Torch has no convolution for more than three axes. Features are (batch, *grid, channels) throughout,
so nothing is transposed between local mixing, linear maps and LightNet blocks. No layer sees more
of the first axis than local mixing reads, so a causal network is one with causal local mixing.
"""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor, nn

from ndlightnet.layout import Grid, per_axis, uncut_patches
from ndlightnet.nn.block import GLU
from ndlightnet.nn.depthwise import LocalMixing
from ndlightnet.nn.embedding import Patchify
from ndlightnet.nn.initial import Initialized
from ndlightnet.nn.layers import GridLayer, Layers
from ndlightnet.ops.recurrence.chunks import exact


class TokenNorm(nn.LayerNorm):
    """LayerNorm over the channels of each token, which sees no other token, in the dtype of x."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        # Autocast would return float32, with twice the memory; the sums are float32 anyway.
        with exact(x):
            weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
            return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class LocalBlock(GridLayer):
    """Residual block of a separable convolution: x + mlp(local(norm x)), the gated MLP over channels."""

    def __init__(self, dims: int, dim: int, causal: bool = False) -> None:
        super().__init__()
        self.norm = TokenNorm(dim)
        self.local = LocalMixing(dims, dim)
        self.mlp = GLU(dim)
        self.causal = causal

    def forward(self, x: Tensor, layout: Grid | None = None) -> Tensor:
        """Map (batch, *grid, dim) to the same shape."""
        return x + self.recomputed(self._change, x, layout)

    def _change(self, x: Tensor, layout: Grid | None) -> Tensor:
        grid = layout or Grid.of(x)
        tokens = self.local(grid.flatten(self.norm(x)), grid, causal=self.causal)
        return grid.unflatten(self.mlp(tokens))


class PatchDown(Patchify):
    """Map each block of cells to one cell by a linear map: (batch, *space, dim) -> (batch, *grid, outputs), a strided
    convolution whose kernel is its stride. Sizes that the stride does not divide are padded with zeros at the end."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(-1, 1))


class PatchUp(Initialized):
    """Map each cell to a block of cells by a linear map: (batch, *grid, dim) -> (batch, *space,
    outputs), with `stride` times as many cells along each axis."""

    def __init__(self, dims: int, dim: int, stride: int | tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.stride = per_axis("stride", stride, dims)
        self.proj = nn.Linear(dim, math.prod(self.stride) * outputs)

    def forward(self, x: Tensor) -> Tensor:
        return uncut_patches(self.proj(x), self.stride)


class Separable:
    """The layers of a U-Net from separable blocks and linear maps of patches."""

    channel_axis = -1

    def __init__(self, dims: int, causal: bool) -> None:
        self.dims, self.block = dims, partial(LocalBlock, dims, causal=causal)

    def level(
        self, inputs: int, width: int, step: tuple[int, ...] | None, count: int
    ) -> tuple[nn.Module, list[nn.Module]]:
        """Return the downsampling to a level of the encoder, and its blocks. step None: the first
        level, whose input (batch, channels, *space) is a linear map of each cell's channels."""
        down = PatchDown(self.dims, inputs, step, width) if step else Patchify(self.dims, inputs, 1, width)
        return down, [self.block(width) for _ in range(count)]

    def up(self, low: int, high: int, step: tuple[int, ...]) -> nn.Module:
        return PatchUp(self.dims, low, step, high)

    def decoder(self, inputs: int, width: int) -> nn.Module:
        return Layers(nn.Linear(inputs, width), self.block(width))

    def head(self, width: int, outputs: int) -> nn.Module:
        return nn.Sequential(TokenNorm(width), nn.Linear(width, outputs))
