"""Times of operators over sizes, each row at one number of tokens while the size of a part varies: a cliff is a step
between neighbours. On a CPU smaller, in float32, on one core."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ndlightnet import NDLightNet, Ragged, mixers, ops
from ndlightnet.nn.slabs import Conv3d
from ndlightnet_evidence.bench import attention_rows, operator_rows
from ndlightnet_evidence.bench.rows import PASSES, Bench, Case, Contender

TOKENS = 131072
LINES = sorted({*(2**n for n in range(4, 18)), 129, 1000, 4097})
LENGTHS = (16, 32, 64, 65, 128, 129, 256, 1024, 4096)
SHORT = (1, 2, 3, 4, 8, 15, 16, 17, 32, 64, 65, 128)
HALF, SINGLE = torch.bfloat16, torch.float32


class Point(NamedTuple):
    """A size of a row. inputs: makes tensors. tensors: of the first one's size that must pass through memory, by pass.
    units: tokens, or tokens times taps, that the time is divided by."""

    row: str
    size: int
    run: Callable[..., Any]
    inputs: Callable[[], tuple[Tensor, ...]]
    tensors: dict[str, int]
    units: int


def sweep(bench: Bench) -> None:
    threads, on_card = torch.get_num_threads(), bench.device.type == "cuda"
    torch.set_num_threads(threads if on_card else 1)
    try:
        for row in (lines, attention, frames, local, recurrences, streams, sides):
            for direction in PASSES:
                for p in [p for p in row(bench, on_card) if direction in p.tensors]:
                    x = p.inputs()[0]
                    case = Case(p.row, 1, p.units, 1, x.shape[-1], p.size)
                    floor = p.tensors[direction] * x.nbytes
                    bench.compare(case, direction, [Contender("ours", p.run)], p.inputs, floor)
    finally:
        torch.set_num_threads(threads)


def _draw(bench: Bench, *shapes: tuple[int, ...], dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    dtype = dtype or (HALF if bench.device.type == "cuda" else SINGLE)
    return operator_rows.leaves(*(operator_rows.random(bench, *shape, dtype=dtype) for shape in shapes))


def _qkv(bench: Bench, batch: int, length: int) -> Callable[[], tuple[Tensor, ...]]:
    heads = 12 if bench.device.type == "cuda" else 2
    return partial(_draw, bench, *[(batch, length, heads, 64)] * 3)


def lines(bench: Bench, on_card: bool) -> Iterator[Point]:
    """MD-TPE both ways, over the length of a line."""
    dim, states = (384, 64) if on_card else (8, 8)

    def run(x: Tensor, coef: Tensor, log_decay: Tensor, *reverse: Any, products: torch.dtype) -> Tensor:
        return ops.axis_scan(x, coef, log_decay, reverse, products=products, impl=bench.impl)

    def inputs(n: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        _, *weights = operator_rows.scan_inputs(bench, (1,), dim, states, 2)
        return *_draw(bench, (TOKENS // n, n, dim), dtype=dtype), *weights

    rows = {"bf16": (HALF, HALF), "fp32": (SINGLE, SINGLE), "fp32, products in bf16": (SINGLE, HALF)}
    for name, (dtype, products) in rows.items() if on_card else [("fp32", rows["fp32"])]:
        for n in bench.some(LINES):
            call, make = partial(run, products=products), partial(inputs, n, dtype)
            yield Point(f"MD-TPE, {name}", n, call, make, operator_rows.TENSORS, TOKENS // n * n)


def attention(bench: Bench, on_card: bool) -> Iterator[Point]:
    """Samples of a length: a batch of them, causal, and end to end."""
    total = TOKENS if on_card else 4096
    lengths = [*LENGTHS, *[2**n for n in range(13, 18)] * on_card]

    def causal(*qkv: Tensor) -> Tensor:
        return ops.causal_attention(*qkv, impl=bench.impl)[0]

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.axis_causal_attention(q, k, v, q.shape[1], return_state=False, impl=bench.impl)[0]

    for row in ("global", "causal", "causal without a State", "pack"):
        for n in bench.some([1, 2, 4, 7, 8, *lengths] if row == "causal without a State" else lengths):
            count = total // n
            pack = Ragged([(n,)] * count) if row == "pack" else None
            whole = partial(ops.global_attention, layout=pack, impl=bench.impl)
            run: Any = {"causal": causal, "causal without a State": alone}.get(row, whole)
            inputs = _qkv(bench, 1, count * n) if pack else _qkv(bench, count, n)
            yield Point(f"{row}, length", n, run, inputs, attention_rows.TENSORS, count * n)


def frames(bench: Bench, on_card: bool) -> Iterator[Point]:
    """Windows over frames of one token, up to all frames; and frames of several tokens."""
    total = 16384 if on_card else 2048
    rows = [("window", n, 1, n) for n in bench.some([*SHORT, 1024, total - 1, total])]
    for row, size, each, window in rows + [("tokens a frame", n, n, None) for n in bench.some(SHORT)]:
        count = total // each

        def run(q: Tensor, k: Tensor, v: Tensor, count: int = count, window: int | None = window) -> Tensor:
            return ops.axis_causal_attention(q, k, v, count, window=window, return_state=False, impl=bench.impl)[0]

        yield Point(row, size, run, _qkv(bench, 1, count * each), attention_rows.TENSORS, count * each)


def local(bench: Bench, on_card: bool) -> Iterator[Point]:
    """Stars over their radius, a tap and token."""
    batch, dim = (32, 384) if on_card else (1, 64)

    def inputs(taps: int) -> tuple[Tensor, ...]:
        return *_draw(bench, (batch, 64, 64, dim)), *_draw(bench, (taps, dim), dtype=SINGLE)

    for radius in bench.some(range(1, 6)):
        taps = ops.star(2, radius)
        run, make = partial(ops.local_mixing, offsets=taps, impl=bench.impl), partial(inputs, len(taps))
        yield Point("local, radius", radius, run, make, operator_rows.TENSORS, batch * 64 * 64 * len(taps))


def recurrences(bench: Bench, on_card: bool) -> Iterator[Point]:
    """Mixers that read token by token, over the length of a sequence."""
    dim = 384 if on_card else 64
    for kind in (mixers.GLA, mixers.DeltaNet, mixers.Mamba, mixers.RWKV4):
        run = partial(kind(dim).to(bench.device, HALF if on_card else SINGLE), causal=True)
        for n in bench.some([512, 4096, 16384]):
            inputs = partial(_draw, bench, (1, n, dim))
            yield Point(f"{kind.__name__}, length", n, run, inputs, operator_rows.TENSORS, n)


def streams(bench: Bench, on_card: bool) -> Iterator[Point]:
    """Calls of a network of text, which read its weights at least."""
    net = NDLightNet(1, vocab_size=64, embed_dim=64, depth=3, causal=True).to(bench.device).eval()
    weights, state = torch.cat([p.detach().flatten() for p in net.parameters()]), net.init_state(1)
    for n in bench.some(SHORT):
        words = torch.zeros(1, n, dtype=torch.long, device=bench.device)
        run = partial(lambda words, weights: net.advance(words, state), words)
        yield Point("stream, tokens a call", n, run, lambda: (weights,), {"fwd": 1}, n)


def sides(bench: Bench, on_card: bool) -> Iterator[Point]:
    """3-D convolutions of one sample."""
    conv = Conv3d(16, 16, 3, padding=1, bias=False, device=bench.device, dtype=HALF if on_card else SINGLE)
    for n in bench.some([16, 24, 32, 35, 36, 48, *[64, 96, 128, 192, 256] * on_card]):
        inputs = partial(_draw, bench, (1, 16, n, n, n))
        yield Point("3-D convolution, side", n, conv, inputs, operator_rows.TENSORS, n**3)
