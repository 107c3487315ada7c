"""Times of local mixing on one to four axes, beside torch's depthwise convolution."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ndlightnet.ops import dense, local_mixing, star
from ndlightnet_evidence.bench.rows import PASSES, Bench, Case, Contender
from ndlightnet_evidence.bench.timing import CALLS, Absent, Call

# tensors of x's size that must pass through memory: x, u; and x, du, dx
TENSORS = {"fwd": 2, "fwd+bwd": 5}
Shape = tuple[str, int, tuple[int, ...], int]
SHAPES: tuple[Shape, ...] = (
    ("star", 4, (16384,), 768),
    ("star", 32, (56, 56), 384),
    ("star", 1, (32, 32, 32), 384),
    ("star", 1, (16, 16, 16, 16), 384),
    ("dense", 1, (32, 32, 32), 384),
)


def local(bench: Bench, shapes: tuple[Shape, ...] = SHAPES) -> None:
    """Time a depthwise convolution of radius 1 in bf16, weights in float32. torch's convolution has
    all taps of the box, also where ours has those of the star, and the layout that it prefers."""
    for form, batch, grid, dim in shapes:
        case = Case(f"{form}, {len(grid)} axes", batch, math.prod(grid), 1, dim)
        for direction in PASSES:
            _row(bench, case, direction, star if form == "star" else dense, grid)


def _row(bench: Bench, case: Case, direction: str, form: Callable[..., Any], grid: tuple[int, ...]) -> None:
    axes, dim, device = len(grid), case.dim, bench.device
    offsets = form(axes, 1)

    def tokens() -> tuple[Tensor, ...]:
        x = torch.randn(case.batch, *grid, dim, device=device, dtype=torch.bfloat16)
        weight = torch.randn(len(offsets), dim, device=device)
        return x.requires_grad_(), weight.requires_grad_()

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return local_mixing(x, weight, offsets, impl=bench.impl)

    floor = TENSORS[direction] * case.numel() * 2
    bench.compare(case, direction, [Contender("ours", ours)], tokens, floor)

    def channels_first() -> tuple[Tensor, ...]:
        x = torch.randn(case.batch, dim, *grid, device=device, dtype=torch.bfloat16)
        kernel = torch.randn(dim, 1, *[3] * axes, device=device, dtype=torch.bfloat16)
        return x.requires_grad_(), kernel.requires_grad_()

    def convolution(x: Tensor, kernel: Tensor) -> Tensor:
        run = getattr(torch.nn.functional, f"conv{axes}d", None)
        if run is None:
            raise Absent(f"torch has no convolution for {axes} axes")
        out: Tensor = run(x, kernel, padding=1, groups=dim)
        return out

    def prepare() -> list[Call]:
        return [CALLS[direction](convolution, channels_first())]

    floor_ms = 1e3 * floor / bench.rate()
    bench.measure(case, direction, "torch convolution", prepare, floor_ms)
