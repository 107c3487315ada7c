"""Times of attention over whole sequences and grids, causal along their first axis, and on packs of different shapes.
q, k, v (batch, length, heads, dim); bf16, on a CPU float32."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ndlightnet.layout import Ragged
from ndlightnet.ops import Position, axis_causal_attention, causal_attention, frequencies, global_attention
from ndlightnet.ops.position import Kind, slots_of
from ndlightnet_evidence.bench import rival_kernels
from ndlightnet_evidence.bench.rows import PASSES, Bench, Case, Contender

Shape = tuple[int, int]  # batch, length
Grids = Sequence[tuple[int, ...]]
SHAPES: tuple[Shape, ...] = ((4, 16384), (1, 262144))
KINDS: tuple[Kind, ...] = ("rotary", "cosine")
# tensors of q's size that must pass through memory: q, k, v, o; and q, k, v, dO, dq, dk, dv
TENSORS = {"fwd": 4, "fwd+bwd": 11}
LONGEST_SOFTMAX = 65536
LENGTHS = [2**n for n in range(12, 21)]
WINDOW = 16
# 8 to 64 cells a side, few and large, many and small
LARGE: Grids = [
    (8, 8, 8),
    (12, 16, 10),
    (24, 20, 28),
    (32, 32, 32),
    (40, 36, 44),
    (48, 48, 48),
    (56, 50, 60),
    (64,) * 3,
]
SMALL: Grids = [(8 + i % 8, 8 + i // 8, 8) for i in range(64)]
FLA_LINEAR = Contender("fla linear", rival_kernels.fla_linear)
FLA_LIGHTNET = Contender("fla lightnet", rival_kernels.fla_lightnet)
TWO_SCANS = Contender("fla two scans", rival_kernels.fla_two_scans)


def compare(
    bench: Bench, case: Case, direction: str, contenders: Sequence[Contender], theta: Tensor | None = None
) -> dict[str, float | None]:
    """Time a row. theta: learnt angles, a fourth input of the contenders."""
    dtype = torch.float32 if bench.device.type == "cpu" else torch.bfloat16
    shape = (case.batch, case.length, case.heads, case.dim)

    def inputs() -> tuple[Tensor, ...]:
        tensors = [torch.randn(shape, device=bench.device, dtype=dtype) for _ in range(3)]
        tensors += [] if theta is None else [theta.clone()]
        return tuple(x.requires_grad_() for x in tensors)

    return bench.compare(case, direction, contenders, inputs, TENSORS[direction] * case.numel() * dtype.itemsize)


def ours(bench: Bench, position: Position | None = None) -> Contender:
    def run(q: Tensor, k: Tensor, v: Tensor, theta: Tensor | None = None) -> Tensor:
        at = position if position is None or theta is None else position._replace(theta=theta)
        return global_attention(q, k, v, position=at, impl=bench.impl)

    return Contender("ours", run)


def compiled(run: Callable[..., Any]) -> Contender:
    return Contender("compile", rival_kernels.compiled(run))


def cube(length: int) -> tuple[int, int, int]:
    """Return the three axes of a grid of 2^n tokens: 16384 -> (16, 32, 32)."""
    side = 1 << -(-(length.bit_length() - 1) // 3)
    return length // side**2, side, side


def make_position(bench: Bench, kind: Kind, shape: tuple[int, ...], heads: int, dim: int) -> Position:
    bank = frequencies(slots_of(dim, kind), len(shape), device=bench.device)
    return Position(bank.expand(heads, -1).contiguous(), shape, kind)


def attention(bench: Bench, shapes: Sequence[Shape] = SHAPES, heads: int = 12, dim: int = 64) -> None:
    """Time the main table; ndlightnet also without a CUDA graph, as its host allows."""
    causal = Contender("ours", lambda q, k, v: causal_attention(q, k, v, impl=bench.impl)[0])
    for (batch, length), direction in product(bench.some(shapes), PASSES):
        case, run = partial(Case, batch=batch, length=length, heads=heads, dim=dim), ours(bench)
        peers = [compiled(rival_kernels.reference), _sdpa(bench, length), TWO_SCANS]
        compare(bench, case("global"), direction, [run, run._replace(graph=False), *peers])
        for kind in KINDS:
            position = make_position(bench, kind, cube(length), heads, dim)
            run, plain = ours(bench, position), compiled(partial(rival_kernels.reference, position=position))
            compare(bench, case(f"global, {kind}"), direction, [run, plain])
            if direction == "fwd+bwd":
                compare(bench, case(f"global, {kind}, learnt angles"), direction, [run], position.theta)
        contenders = [causal, causal._replace(graph=False), FLA_LIGHTNET, FLA_LINEAR]
        compare(bench, case("causal"), direction, contenders)


def _sdpa(bench: Bench, length: int) -> Contender:
    if length > LONGEST_SOFTMAX:
        return Contender("sdpa", rival_kernels.absent(f"quadratic: left out above {LONGEST_SOFTMAX} tokens"))
    backends = rival_kernels.backends(bench.device.type == "cuda")
    return Contender("sdpa", {name: within(rival_kernels.softmax) for name, within in backends.items()})


def figure(bench: Bench, lengths: Sequence[int] = LENGTHS, heads: int = 12, dim: int = 64) -> None:
    """Measure the paper's Fig. 1: time over length at batch 1, one scan against two."""
    for direction in PASSES:
        quadratic = _sdpa(bench, 0)
        for length in lengths[::4] if bench.quick else lengths:
            case = Case("global", 1, length, heads, dim)
            times = compare(bench, case, direction, [ours(bench), TWO_SCANS, quadratic])
            if (times["sdpa"] or 0) > 1000:
                quadratic = Contender("sdpa", rival_kernels.absent("over a second at a shorter length"))


def cpu(bench: Bench, lengths: Sequence[int] = (1024, 4096, 16384)) -> None:
    """Time impl="torch" against torch's attention on two cores."""
    threads, device = torch.get_num_threads(), bench.device
    contenders = [Contender("ours", partial(global_attention, impl="torch")), Contender("sdpa", rival_kernels.softmax)]
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    bench.device = torch.device("cpu")
    try:
        for length in bench.some(lengths):
            for direction in PASSES:
                compare(bench, Case("global", 1, length, 6, 64), direction, contenders)
    finally:
        torch.set_num_threads(threads)
        bench.device = device


def frames(bench: Bench, grid: tuple[int, ...] = (64, 32, 32), heads: int = 12, dim: int = 64) -> None:
    """Time a video of 64 frames. The floor is that of attention over all tokens."""
    case = Case(f"axis-causal {' x '.join(map(str, grid))}", 1, math.prod(grid), heads, dim)
    tokens = math.prod(grid[1:])
    cosine = {"position": make_position(bench, "cosine", grid, heads, dim)}
    rows: dict[str, dict[str, Any]] = {"": {}, ", cosine": cosine, f", window {WINDOW}": {"window": WINDOW}}

    def axis_causal(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return axis_causal_attention(q, k, v, grid[0], impl=bench.impl, **options)[0]

    for direction, (more, options) in product(PASSES, rows.items()):
        flex = rival_kernels.flex(lambda b, h, q, kv: q // tokens >= kv // tokens, case.length)
        rivals = [] if more else [Contender("flex", flex)]
        contenders = [Contender("ours", partial(axis_causal, **options)), *rivals]
        compare(bench, case._replace(row=case.row + more), direction, contenders)


def packs(bench: Bench, name: str, shapes: Grids, heads: int = 12, dim: int = 64) -> None:
    """Time a pack of samples of different shapes, beside one batch of as many tokens in samples of one length."""
    layout = Ragged(shapes)
    each = layout.length // len(layout)
    assert each * len(layout) == layout.length
    case = Case(f"{len(layout)} {name} volumes", 1, layout.length, heads, dim)
    cosine = make_position(bench, "cosine", shapes[0], heads, dim)._replace(layout=layout)
    sample = layout.sample_of_token(bench.device)
    packed = partial(global_attention, layout=layout, impl=bench.impl)

    def dense(*qkv: Tensor) -> Tensor:
        out: Tensor = ours(bench).run(*(x.view(-1, each, *x.shape[2:]) for x in qkv))
        return out.reshape(qkv[0].shape)  # a view where the kernels wrote it

    for direction in PASSES:
        flex = rival_kernels.flex(lambda b, h, q, kv: sample[q] == sample[kv], layout.length)
        rivals = [Contender("flex", flex)] if name == "small" else []
        compare(bench, case, direction, [Contender("ours", packed), Contender("dense", dense), *rivals])
        contender = Contender("ours", partial(packed, position=cosine))
        compare(bench, case._replace(row=f"{case.row}, cosine"), direction, [contender])
