"""Times of attention that is causal along the first axis, and of packs of different shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ndlightnet.layout import Packed, Ragged
from ndlightnet.models import NDLightNet
from ndlightnet.nn.mixers import LightNetAttention
from ndlightnet.ops import Position, axis_causal_attention, global_attention
from ndlightnet_evidence.bench import peers
from ndlightnet_evidence.bench.attention import compare, make_lrpe, ours
from ndlightnet_evidence.bench.rows import PASSES, Bench, Case, Contender
from ndlightnet_evidence.bench.step import memory, training
from ndlightnet_evidence.bench.timing import Call

WINDOW = 16
Shapes = Sequence[tuple[int, ...]]
# 8 to 64 cells a side, few and large, many and small
LARGE: Shapes = (
    (8, 8, 8),
    (12, 16, 10),
    (24, 20, 28),
    (32, 32, 32),
    (40, 36, 44),
    (48, 48, 48),
    (56, 50, 60),
    (64, 64, 64),
)
SMALL: Shapes = tuple((8 + i % 8, 8 + i // 8, 8) for i in range(64))


def frames(bench: Bench, grid: tuple[int, ...] = (64, 32, 32), heads: int = 12, dim: int = 64) -> None:
    """Time a video of 64 frames. The floor is that of attention over all tokens."""
    name = " x ".join(map(str, grid))
    case = partial(Case, batch=1, length=math.prod(grid), heads=heads, dim=dim)
    cosine = make_lrpe(bench, "cosine", grid, heads, dim)

    def axis_causal(
        q: Tensor, k: Tensor, v: Tensor, position: Position | None = None, window: int | None = None
    ) -> Tensor:
        return axis_causal_attention(q, k, v, grid[0], position=position, window=window, impl=bench.impl)[0]

    rows: dict[str, dict[str, Any]] = {
        "": {},
        ", cosine": {"position": cosine},
        f", window {WINDOW}": {"window": WINDOW},
    }
    for direction in PASSES:
        for more, options in rows.items():
            run = Contender("ours", partial(axis_causal, **options))
            everything = ours(bench)._replace(who="global")
            rivals = [] if more else [everything, _flex(_same_frame(grid), case("").length)]
            compare(bench, case(f"axis-causal {name}{more}"), direction, [run, *rivals])


def packs(bench: Bench, large: Shapes = LARGE, small: Shapes = SMALL, heads: int = 12, dim: int = 64) -> None:
    """Time packs of samples of different shapes, beside one batch of as many tokens in samples of
    one length; then the forward and backward pass of a small network on them."""
    for name, shapes in (("large", large), ("small", small)):
        layout = Ragged(shapes)
        each = layout.length // len(layout)
        assert each * len(layout) == layout.length
        case = Case(f"{len(layout)} {name} volumes", 1, layout.length, heads, dim)
        cosine = make_lrpe(bench, "cosine", shapes[0], heads, dim)._replace(layout=layout)
        for direction in PASSES:
            for more, lrpe in (("", None), (", cosine", cosine)):
                contenders = [Contender("ours", partial(_packed, bench, layout, lrpe))]
                if lrpe is None:
                    contenders.append(Contender("dense", partial(_dense, bench, each)))
                    if name == "small":
                        contenders.append(_flex(_same_sample(bench, layout), layout.length))
                compare(bench, case._replace(row=case.row + more), direction, contenders)
    pack_step(bench, large, heads * dim // 2)


def _packed(bench: Bench, layout: Ragged, lrpe: Position | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return global_attention(q, k, v, position=lrpe, layout=layout, impl=bench.impl)


def _dense(bench: Bench, each: int, *qkv: Tensor) -> Tensor:
    out: Tensor = ours(bench).run(*(x.view(-1, each, *x.shape[2:]) for x in qkv))
    return out.view(qkv[0].shape)


def _same_frame(grid: tuple[int, ...]) -> Callable[..., Any]:
    tokens = math.prod(grid[1:])
    return lambda b, h, q, kv: q // tokens >= kv // tokens


def _same_sample(bench: Bench, layout: Ragged) -> Callable[..., Any]:
    owner = layout.sample_of_token(bench.device)
    return lambda b, h, q, kv: owner[q] == owner[kv]


def _flex(mask: Callable[..., Any], length: int) -> Contender:
    """Return compiled softmax attention with a block mask."""
    blocks: list[Any] = []

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if not blocks:
            torch.compiler.reset()
            make: Any = torch.compile(create_block_mask)
            blocks.append(make(mask, None, None, length, length, device=str(q.device)))
            blocks.append(torch.compile(flex_attention, dynamic=False))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = blocks[1](q, k, v, block_mask=blocks[0]).transpose(1, 2)
        return out

    return Contender("flex", peers.absent("no CUDA device") if not torch.cuda.is_available() else run)


def pack_step(bench: Bench, shapes: Shapes, dim: int) -> None:
    """Time forward and backward of a network with one cell a token, packed against dense."""
    layout = Ragged(shapes)
    side = round((layout.length / len(layout)) ** (1 / 3))
    mixer = partial(LightNetAttention, impl=bench.impl)
    for who in ("ours", "dense"):
        tokens = layout.length if who == "ours" else len(layout) * side**3

        def prepare(who: str = who, tokens: int = tokens) -> list[Call]:
            network = NDLightNet(3, 1, 10, patch_size=1, embed_dim=dim, depth=2, mixer=mixer)
            network = network.to(bench.device)
            x: Any = torch.randn(len(layout), 1, side, side, side, device=bench.device)
            if who == "ours":
                x = Packed(torch.randn(layout.length, 1, device=bench.device), layout)
            _, backward = training(network, x)
            memory(bench, f"packs: {who}", backward, tokens)
            return [backward]

        case = Case("network, forward and backward", 1, tokens, dim // 64, 64)
        if ms := bench.measure(case, "fwd+bwd", who, prepare):
            bench.facts[f"packs: {who}, us a token, forward and backward"] = 1e3 * ms / tokens
