"""Times of MD-TPE: the recurrence along three axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ndlightnet.ops import axis_scan
from ndlightnet_evidence.bench import peers
from ndlightnet_evidence.bench.rows import PASSES, Bench, Case, Contender
from ndlightnet_evidence.bench.timing import matmul_rate

# tensors of x's size that must pass through memory: x, y; and x, dy, dx
TENSORS = {"fwd": 2, "fwd+bwd": 5}
# multiply-adds a token, channel, axis and state: the state and its sum; with a backward pass the
# state again, its adjoint, and the gradients of x, coefficients and decays
RECURRENCE = {"fwd": 2, "fwd+bwd": 8}
# or, in the Toeplitz form, matrix products a line, whatever the number of states: y; dx, dT
TOEPLITZ = {"fwd": 1, "fwd+bwd": 3}


def tpe(
    bench: Bench, grid: tuple[int, ...] = (32, 64, 64), dim: int = 384, states: Sequence[int] = (16, 64, 128)
) -> None:
    """Time MD-TPE in bf16 at batch 1. Both ways with half the states each, as in the layer.

    Two bounds from the arithmetic stand beside the floor: of the recurrence, in float32, and of the
    Toeplitz form, on the matrix units.
    """
    vector = matmul_rate(torch.float32, bench.device, bench.laps)
    matrix = matmul_rate(torch.bfloat16, bench.device, bench.laps)
    for n in states[:1] if bench.quick else states:
        for ways in (1, 2):
            row = f"MD-TPE, {n} states, {'one way' if ways == 1 else 'both ways'}"
            case = Case(row, 1, math.prod(grid), 1, dim)
            for direction in PASSES:
                _row(bench, case, direction, grid, n // ways, ways, peer=n == states[0])
                sums = RECURRENCE[direction] * case.numel() * len(grid) * n
                bench.bound(
                    case, direction, "recurrence bound", 2 * sums / vector, f"{vector / 1e12:.0f} TFLOP/s in float32"
                )
                sums = TOEPLITZ[direction] * case.numel() * sum(grid)
                bench.bound(
                    case, direction, "Toeplitz bound", 2 * sums / matrix, f"{matrix / 1e12:.0f} TFLOP/s in bf16"
                )


def _row(bench: Bench, case: Case, direction: str, grid: tuple[int, ...], states: int, ways: int, peer: bool) -> None:
    axes, dim, device = len(grid), case.dim, bench.device

    def inputs() -> tuple[Tensor, ...]:
        x = torch.randn(1, *grid, dim, device=device, dtype=torch.bfloat16)
        reach = torch.logspace(0, 8, states, base=2, device=device)
        weights = []
        for _ in range(ways):
            weights.append(torch.randn(axes, dim, states, device=device) / states)
            weights.append((-1 / reach).repeat(axes, 1))
        return tuple(t.requires_grad_() for t in (x, *weights))

    def ours(x: Tensor, coef: Tensor, log_decay: Tensor, *back: Tensor) -> Tensor:
        reverse = (back[0], back[1]) if back else None
        return axis_scan(x, coef, log_decay, reverse, impl=bench.impl)

    def one_way(x: Tensor, coef: Tensor, log_decay: Tensor) -> Tensor:
        return axis_scan(x, coef, log_decay, impl="torch")

    contenders = [Contender("ours", ours)]
    if peer and ways == 1:  # compiling takes long
        contenders.append(Contender("compile", peers.compiled(one_way)))
    bench.compare(case, direction, contenders, inputs, TENSORS[direction] * case.numel() * 2)
