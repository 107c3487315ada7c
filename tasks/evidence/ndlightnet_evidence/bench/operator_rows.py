"""Times of the operators beside attention: MD-TPE, local mixing, instance norm with SiLU, and decoding one token at a
time. Tokens in bf16, weights in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from ndlightnet.ops import State, attention_step, axis_scan, dense, instance_norm_silu, local_mixing, star
from ndlightnet_evidence.bench.attention_rows import compiled, make_position
from ndlightnet_evidence.bench.rows import PASSES, Bench, Case, Contender
from ndlightnet_evidence.bench.timing import CALLS, Absent, Call

# tensors of x's size that must pass through memory: x, y; and x, dy, dx
TENSORS = {"fwd": 2, "fwd+bwd": 5}
LOCAL = (
    ("star", 4, (16384,), 768),
    ("star", 32, (56, 56), 384),
    ("star", 1, (32, 32, 32), 384),
    ("star", 1, (16, 16, 16, 16), 384),
    ("dense", 1, (32, 32, 32), 384),
)
NORM = (2, 32, 128, 128, 128)


def random(bench: Bench, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=bench.device, dtype=dtype)


def leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.requires_grad_() for x in tensors)


def _inputs(
    bench: Bench, tokens: tuple[int, ...], *weights: tuple[int, ...], residual: bool = False
) -> tuple[Tensor, ...]:
    """Draw tokens, weights, and perhaps a residual like the tokens."""
    more = [random(bench, *tokens)] if residual else []
    return leaves(random(bench, *tokens), *(random(bench, *w, dtype=torch.float32) for w in weights), *more)


def tpe(
    bench: Bench, grid: tuple[int, ...] = (32, 64, 64), dim: int = 384, states: Sequence[int] = (16, 64, 128)
) -> None:
    """Time MD-TPE at batch 1. Both ways with half the states each, as in the layer."""
    for n, ways, direction in product(bench.some(states), (1, 2), PASSES):
        row = f"MD-TPE, {n} states, {'one way' if ways == 1 else 'both ways'}"
        case = Case(row, 1, math.prod(grid), 1, dim)
        contenders = [Contender("ours", partial(_scan, bench.impl))]
        if n == states[0] and ways == 1:  # compiling takes long
            contenders.append(compiled(partial(_scan, "torch")))
        inputs = partial(scan_inputs, bench, grid, dim, n // ways, ways)
        bench.compare(case, direction, contenders, inputs, TENSORS[direction] * case.numel() * 2)


def _scan(impl: Any, x: Tensor, coef: Tensor, log_decay: Tensor, *reverse: Any) -> Tensor:
    return axis_scan(x, coef, log_decay, reverse or None, impl=impl)


def scan_inputs(bench: Bench, grid: tuple[int, ...], dim: int, states: int, ways: int) -> tuple[Tensor, ...]:
    reach = torch.logspace(0, 8, states, base=2, device=bench.device)
    weights = []
    for _ in range(ways):
        weights.append(random(bench, len(grid), dim, states, dtype=torch.float32) / states)
        weights.append((-1 / reach).repeat(len(grid), 1))
    return leaves(random(bench, 1, *grid, dim), *weights)


def local(bench: Bench, shapes: Sequence[tuple[str, int, tuple[int, ...], int]] = LOCAL) -> None:
    """Time a depthwise convolution of radius 1. torch's convolution has all taps of the box, also
    where ours has those of the star, and the layout that it prefers."""
    for (form, batch, grid, dim), direction in product(shapes, PASSES):
        case = Case(f"{form}, {len(grid)} axes", batch, math.prod(grid), 1, dim)
        offsets = (star if form == "star" else dense)(len(grid), 1)
        floor = TENSORS[direction] * case.numel() * 2
        inputs = partial(_inputs, bench, (batch, *grid, dim), (len(offsets), dim))
        run = partial(local_mixing, offsets=offsets, impl=bench.impl)
        bench.compare(case, direction, [Contender("ours", run)], inputs, floor)
        prepare = partial(_convolution, bench, direction, (batch, dim, *grid))
        bench.measure(case, direction, "torch convolution", prepare, 1e3 * floor / bench.rate())


def _convolution(bench: Bench, direction: str, shape: tuple[int, ...]) -> list[Call]:
    axes, dim = len(shape) - 2, shape[1]
    run = getattr(torch.nn.functional, f"conv{axes}d", None)
    if run is None:
        raise Absent(f"torch has no convolution for {axes} axes")
    inputs = leaves(random(bench, *shape), random(bench, dim, 1, *[3] * axes))
    return [CALLS[direction](partial(run, padding=1, groups=dim), inputs)]


def norm(bench: Bench, shape: tuple[int, ...] = NORM) -> None:
    """Time instance norm and SiLU, as NDLightUNet's convolutions have it, without and with a residual."""
    # tensors of x's size: x, out; dout, x, dx. A residual r adds r; r, dr.
    tensors = {"fwd": (2, 3), "fwd+bwd": (5, 8)}
    for residual, direction in product((False, True), PASSES):
        row = "norm, residual, SiLU" if residual else "norm, SiLU"
        case = Case(row, shape[0], math.prod(shape[2:]), 1, shape[1])
        inputs = partial(_inputs, bench, shape, *[shape[1:2]] * 2, residual=residual)
        run = partial(instance_norm_silu, impl=bench.impl)
        floor = tensors[direction][residual] * case.numel() * 2
        bench.compare(case, direction, [Contender("ours", run), Contender("torch", _torch_norm)], inputs, floor)


def _torch_norm(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
    y = torch.group_norm(x, x.shape[1], weight.to(x.dtype), bias.to(x.dtype))
    return silu(y if residual is None else y + residual)


def decode(bench: Bench, batch: int = 64, heads: int = 12, dim: int = 64) -> None:
    """Time a step of a batch of sequences. Floor: the State read and written, and the token."""
    for name, rows in (("step", dim), ("step, cosine", 2 * dim)):
        case = Case(name, batch, 1, heads, dim)
        position = make_position(bench, "cosine", (1,), heads, dim) if rows > dim else None
        ours = Contender("ours", partial(_step, position=position, impl=bench.impl))
        tokens, state = 4 * case.numel() * 2, batch * heads * dim * (2 + rows) * 4
        inputs = partial(_step_inputs, bench, batch, heads, rows, dim)
        bench.compare(case, "fwd", [ours, ours._replace(graph=False)], inputs, tokens + 2 * state)


def _step(q: Tensor, k: Tensor, v: Tensor, *state: Tensor, **options: Any) -> Any:
    return attention_step(q, k, v, State(*state), **options)


def _step_inputs(bench: Bench, batch: int, heads: int, rows: int, dim: int) -> tuple[Tensor, ...]:
    top = random(bench, batch, heads, dim, dtype=torch.float32)
    memory = random(bench, batch, heads, rows, dim, dtype=torch.float32)
    return *random(bench, 3, batch, heads, dim), top, 1 + top.abs(), memory
