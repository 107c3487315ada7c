"""Times of instance norm with SiLU, as NDLightUNet's convolutions have it, beside torch."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import silu

from ndlightnet.ops import instance_norm_silu
from ndlightnet_evidence.bench.rows import PASSES, Bench, Case, Contender

# tensors of x's size that are read or written at least: x, out; dout, x, dx. A residual r adds r;
# r, dr.
TENSORS = {"fwd": (2, 3), "fwd+bwd": (5, 8)}
SHAPES = ((2, 32, (128, 128, 128)), (2, 64, (64, 64, 64)), (2, 256, (16, 16, 16)))


def norm(bench: Bench, shapes: tuple[tuple[int, int, tuple[int, ...]], ...] = SHAPES) -> None:
    """Time instance norm and SiLU in bf16, weights in float32, without and with a residual."""
    for batch, channels, space in shapes:
        for residual in (False, True):
            name = "norm, residual, SiLU" if residual else "norm, SiLU"
            case = Case(name, batch, math.prod(space), 1, channels)

            def tensors(
                shape: tuple[int, ...] = (batch, channels, *space), count: int = 1 + residual
            ) -> tuple[Tensor, ...]:
                half = partial(torch.randn, shape, device=bench.device, dtype=torch.bfloat16)
                affine = torch.randn(2, shape[1], device=bench.device).unbind()
                cells: list[Tensor] = [half() for _ in range(count)]
                return tuple(x.requires_grad_() for x in (cells[0], *affine, *cells[1:]))

            for direction in PASSES:
                floor = TENSORS[direction][residual] * case.numel() * 2
                rows = [Contender("ours", partial(instance_norm_silu, impl=bench.impl)), Contender("torch", _by_torch)]
                bench.compare(case, direction, rows, tensors, floor)


def _by_torch(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
    y = torch.group_norm(x, x.shape[1], weight.to(x.dtype), bias.to(x.dtype))
    return silu(y if residual is None else y + residual)
