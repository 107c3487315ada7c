"""Blocks that depend on a condition, such as the time of a diffusion and a class: by adaptive norms, whose shifts,
scales and gates follow from it, or by tokens of it in front of the grid."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet.layout import Grid, Layout
from ndlightnet.nn.block import GLU, Block, mix
from ndlightnet.nn.initial import Initialized
from ndlightnet.nn.mixers import LightNetAttention
from ndlightnet.ops.recurrence.chunks import exact

PERIOD = 10_000  # the slowest sinusoid turns once in 2 pi times as many units of time

SINUSOIDS = 256


class TimeEmbedding(Initialized):
    """Map times (batch,) to (batch, dim): sinusoids, then two linear maps with SiLU between, all in
    float32 or wider unless the weights are in 16 bits, also under autocast.

    Parameters: 257 dim + (dim + 1) dim.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(SINUSOIDS, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t: Tensor) -> Tensor:
        weight: Tensor = self.mlp[0].weight  # type: ignore[assignment]
        with exact(t):
            t = t.to(torch.promote_types(weight.dtype, torch.float32))
            half = SINUSOIDS // 2
            powers = torch.arange(half, device=t.device, dtype=t.dtype) / half
            angles = t[:, None] * torch.exp(-math.log(PERIOD) * powers)
            waves = torch.cat([angles.cos(), angles.sin()], -1)
            out: Tensor = self.mlp(waves.to(weight.dtype))
        return out


class Modulation(Initialized):
    """Map a condition (batch, dim) to `count` tensors (batch, 1, dim): one linear map of SiLU of
    it, with zeros as initial weights, which `zero_weights` sets.

    Parameters: count dim (dim + 1).
    """

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.proj = nn.Linear(dim, count * dim)

    def zero_weights(self) -> None:
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, condition: Tensor) -> tuple[Tensor, ...]:
        return self.proj(nn.functional.silu(condition))[:, None].chunk(self.count, -1)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift


class AdaptiveBlock(Initialized):
    """Residual block whose norms follow a condition (adaLN-Zero): x + gate mixer(norm x), then x + gate mlp(norm x),
    where norm x is scaled and shifted. Initially the gates are 0, and the block changes nothing."""

    def __init__(self, dim: int, mixer: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.mixer = mixer(dim)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.mlp = GLU(dim)
        self.modulation = Modulation(dim, 6)

    def forward(self, x: Tensor, condition: Tensor, layout: Layout) -> Tensor:
        """Map tokens (batch, length, dim) to the same shape. condition: (batch, dim)."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition)
        y = modulate(self.norm1(x), shift1, scale1)
        x = x + gate1 * mix(self.mixer, y, None, False, layout)
        return x + gate2 * self.mlp(modulate(self.norm2(x), shift2, scale2))


class PrefixBlock(Block):
    """A Block of tokens of a grid behind those of a condition, which LightNet attention reads at position 0 and local
    mixing leaves out. Raises ValueError for another mixer."""

    mixer: Any

    def __init__(self, dim: int, mixer: Callable[[int], nn.Module]) -> None:
        super().__init__(dim, mixer)
        if not isinstance(self.mixer, LightNetAttention):
            raise ValueError(f"{type(self.mixer).__name__} with tokens of a condition: expected LightNetAttention")

    def forward(self, x: Tensor, condition: Tensor, layout: Grid) -> Tensor:  # type: ignore[override]
        """Map tokens (batch, condition tokens + length, dim) to the same shape. condition: not used, it is in x."""
        prefix = x.shape[1] - layout.length
        x = x + self.mixer.mix(self.norm1(x), layout, None, False, prefix=prefix)
        return x + self.mlp(self.norm2(x))
