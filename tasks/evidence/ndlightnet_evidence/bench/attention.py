"""Times of attention over whole sequences and grids. q, k, v (batch, length, heads, dim); bf16, on
a CPU float32."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ndlightnet.ops import Position, causal_attention, frequencies, global_attention
from ndlightnet.ops.position import Kind, slots_of
from ndlightnet_evidence.bench import peers
from ndlightnet_evidence.bench.rows import PASSES, Bench, Case, Contender

Shape = tuple[int, int]  # batch, length
MAIN: tuple[Shape, ...] = ((4, 16384), (1, 262144))
ALSO: tuple[Shape, ...] = ((16, 4096), (1, 65536))
DIMS = ((4, 16384, 6, 128), (4, 16384, 16, 32), (4, 16384, 16, 48), (64, 1024, 12, 64))
KINDS: tuple[Kind, ...] = ("rotary", "cosine")
# tensors of q's size that must pass through memory: q, k, v, o; and q, k, v, dO, dq, dk, dv
TENSORS = {"fwd": 4, "fwd+bwd": 11}
LONGEST_SOFTMAX = 65536
LENGTHS = [2**n for n in range(12, 21)]


def compare(
    bench: Bench, case: Case, direction: str, contenders: Sequence[Contender], theta: Tensor | None = None
) -> dict[str, float | None]:
    """Time a row. theta: learnt angles, a fourth input of the contenders."""
    dtype = torch.float32 if bench.device.type == "cpu" else torch.bfloat16
    shape = (case.batch, case.length, case.heads, case.dim)

    def inputs() -> tuple[Tensor, ...]:
        drawn = [torch.randn(shape, device=bench.device, dtype=dtype) for _ in range(3)]
        drawn += [] if theta is None else [theta.clone()]
        return tuple(x.requires_grad_() for x in drawn)

    floor_bytes = TENSORS[direction] * case.numel() * dtype.itemsize
    return bench.compare(case, direction, contenders, inputs, floor_bytes)


def ours(bench: Bench, lrpe: Position | None = None) -> Contender:
    def run(q: Tensor, k: Tensor, v: Tensor, theta: Tensor | None = None) -> Tensor:
        at = lrpe if lrpe is None or theta is None else lrpe._replace(theta=theta)
        return global_attention(q, k, v, position=at, impl=bench.impl)

    return Contender("ours", run)


def ours_causal(bench: Bench) -> Contender:
    return Contender("ours", lambda q, k, v: causal_attention(q, k, v, impl=bench.impl)[0])


def compiled(run: Callable[..., Any]) -> Contender:
    return Contender("compile", peers.compiled(run))


FLA_LINEAR = Contender("fla linear", peers.fla_linear)
FLA_LIGHTNET = Contender("fla lightnet", peers.fla_lightnet)
TWO_SCANS = Contender("fla two scans", peers.fla_two_scans)


def cube(length: int) -> tuple[int, int, int]:
    """Return the three axes of a grid of 2^n tokens: 16384 -> (16, 32, 32)."""
    side = 1 << -(-(length.bit_length() - 1) // 3)
    return length // side**2, side, side


def make_lrpe(bench: Bench, kind: Kind, shape: tuple[int, ...], heads: int, dim: int) -> Position:
    bank = frequencies(slots_of(dim, kind), len(shape), device=bench.device)
    return Position(bank.expand(heads, -1).contiguous(), shape, kind)


def attention(bench: Bench, shapes: Sequence[Shape] = MAIN + ALSO, heads: int = 12, dim: int = 64) -> None:
    """Time the main table. At the two main shapes also ndlightnet without a CUDA graph, and
    torch.compile, which takes seconds a row."""
    for batch, length in shapes[:1] if bench.quick else shapes:
        case = partial(Case, batch=batch, length=length, heads=heads, dim=dim)
        main = (batch, length) not in ALSO
        for direction in PASSES:
            rivals = [_sdpa(length), TWO_SCANS, FLA_LINEAR]
            if main:
                rivals = [ours(bench)._replace(graph=False), compiled(peers.reference), *rivals]
            compare(bench, case("global"), direction, [ours(bench), *rivals])

            for kind in KINDS:
                lrpe = make_lrpe(bench, kind, cube(length), heads, dim)
                rivals = [compiled(partial(peers.reference, position=lrpe))] if main else []
                name = f"global, {kind}"
                compare(bench, case(name), direction, [ours(bench, lrpe), *rivals])
                if direction == "fwd+bwd":
                    learnt = case(f"{name}, learnt angles")
                    compare(bench, learnt, direction, [ours(bench, lrpe)], lrpe.theta)

            rivals = [_sdpa(length, causal=True), FLA_LIGHTNET, FLA_LINEAR]
            if main:
                eager = ours_causal(bench)._replace(graph=False)
                rivals = [eager, compiled(peers.causal_chunks), *rivals]
            compare(bench, case("causal"), direction, [ours_causal(bench), *rivals])


def _sdpa(length: int, causal: bool = False) -> Contender:
    run: Callable[..., Any] = partial(peers.softmax, causal=causal)
    if length > LONGEST_SOFTMAX:
        run = peers.absent(f"quadratic: left out above {LONGEST_SOFTMAX} tokens")
    return Contender("sdpa", run)


def dims(bench: Bench, shapes: Sequence[tuple[int, int, int, int]] = DIMS) -> None:
    """Time other head dims, and many short sequences."""
    for batch, length, heads, dim in shapes[:1] if bench.quick else shapes:
        case = partial(Case, batch=batch, length=length, heads=heads, dim=dim)
        for direction in PASSES:
            rivals = [compiled(peers.reference), FLA_LINEAR]
            compare(bench, case("global"), direction, [ours(bench), *rivals])
            for kind in KINDS:
                lrpe = make_lrpe(bench, kind, cube(length), heads, dim)
                rival = compiled(partial(peers.reference, position=lrpe))
                compare(bench, case(f"global, {kind}"), direction, [ours(bench, lrpe), rival])
            compare(bench, case("causal"), direction, [ours_causal(bench), FLA_LINEAR])


def figure(bench: Bench, lengths: Sequence[int] = LENGTHS, heads: int = 12, dim: int = 64) -> None:
    """Measure the paper's Fig. 1: time over length at batch 1, one scan against two."""
    for direction in PASSES:
        quadratic = Contender("sdpa", peers.softmax)
        for length in lengths[::4] if bench.quick else lengths:
            case = Case("global", 1, length, heads, dim)
            times = compare(bench, case, direction, [ours(bench), TWO_SCANS, quadratic])
            if (times["sdpa"] or 0) > 1000:
                quadratic = Contender("sdpa", peers.absent("over a second at a shorter length"))


def cpu(bench: Bench, lengths: Sequence[int] = (1024, 4096, 16384)) -> None:
    """Time impl="torch" against torch's attention on two cores."""
    threads, device = torch.get_num_threads(), bench.device
    contenders = [Contender("ours", partial(global_attention, impl="torch")), Contender("sdpa", peers.softmax)]
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    bench.device = torch.device("cpu")
    try:
        for length in lengths[:1] if bench.quick else lengths:
            for direction in PASSES:
                compare(bench, Case("global", 1, length, 6, 64), direction, contenders)
    finally:
        torch.set_num_threads(threads)
        bench.device = device
