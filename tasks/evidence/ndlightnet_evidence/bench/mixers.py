"""Times of the family of mixers: their operators beside flash-linear-attention's, and whole layers
over length and over grids."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, normalize

from ndlightnet.nn import mixers as catalogue
from ndlightnet.ops import gated_delta_rule, gated_linear_attention
from ndlightnet.ops.recurrence import wkv
from ndlightnet_evidence.bench import peers
from ndlightnet_evidence.bench.rows import PASSES, Bench, Case, Contender
from ndlightnet_evidence.bench.step import peak
from ndlightnet_evidence.bench.timing import CALLS, Call, backward_call
from ndlightnet_evidence.catalogue import factory, family

RULES = (
    ("linear attention", "gated", 0),
    ("TNL", "gated", 1),
    ("GLA, HGRN2", "gated", 64),
    ("DeltaNet", "delta", 0),
    ("gated DeltaNet", "delta", 1),
    ("KDA", "delta", 64),
    ("RWKV-4", "wkv", 0),
)


def operators(
    bench: Bench, shapes: Sequence[tuple[int, int]] = ((4, 16384), (16, 2048)), heads: int = 12, dim: int = 64
) -> None:
    """Time gated linear attention, the delta rules and RWKV-4: the torch form, the same compiled,
    and flash-linear-attention. Floor: inputs read and outputs written once."""
    for batch, length in shapes[:1] if bench.quick else shapes:
        for (row, rule, decays), direction in product(RULES, PASSES):
            case = Case(row, batch, length, heads, dim)
            rows = min(decays, dim)
            inputs = partial(_inputs, bench, case, rule, rows)
            ours = partial(_operator, rule, "torch")
            contenders = [
                Contender("ours", ours),
                Contender("ours", ours, graph=False),
                Contender("fla", partial(_operator, rule, "fla")),
                Contender("compile", peers.compiled(ours)),
            ]
            moved = (3, 8) if rule == "wkv" else (4, 11)  # number of tensors; wkv has no q
            numbers = moved[direction != "fwd"] * case.numel() * inputs()[0].itemsize
            numbers += 4 * sum(x.numel() for x in inputs()[3:]) * (1 if direction == "fwd" else 3)
            bench.compare(case, direction, contenders, inputs, numbers)


def _inputs(bench: Bench, case: Case, rule: str, rows: int) -> tuple[Tensor, ...]:
    shape = (case.batch, case.length, case.heads, case.dim)
    draw = partial(torch.randn, device=bench.device)
    dtype = torch.float32 if bench.device.type == "cpu" else torch.bfloat16
    if rule == "wkv":  # k, v, decay, bonus
        k, v = (draw(*shape[:2], case.heads * case.dim).to(dtype) for _ in range(2))
        return tuple(x.detach().requires_grad_() for x in (k, v, *draw(2, case.heads * case.dim)))
    xs = [draw(shape), normalize(draw(shape), dim=-1), draw(shape)]
    xs = [x.to(dtype) for x in xs]
    xs += [torch.sigmoid(draw(shape[:3]))] if rule == "delta" else []
    xs += [logsigmoid(draw(*shape[:3], rows)) / 16] if rows else []
    return tuple(x.requires_grad_() for x in xs)


def _operator(rule: str, impl: Any, *inputs: Tensor) -> Tensor:
    if rule == "wkv":
        return (peers.fla_rwkv4 if impl == "fla" else wkv.means)(*inputs)
    run: Any = gated_linear_attention if rule == "gated" else gated_delta_rule
    out: Tensor = run(*inputs, impl=impl)[0]
    return out


def mixers(
    bench: Bench,
    lengths: Sequence[int] = (1024, 4096, 16384, 65536),
    grids: Sequence[tuple[int, ...]] = ((64, 64), (16, 32, 32)),
    batch: int = 1,
    dim: int = 768,
) -> None:
    """Time layers with their projections, causal over `lengths` and global over `grids`, forward
    and with the backward pass; bfloat16 autocast on CUDA."""
    shapes = [*(((n,), True) for n in lengths), *((grid, False) for grid in grids)]
    if bench.device.type == "cpu":
        shapes, dim = [s for s in shapes if math.prod(s[0]) <= 4096], min(dim, 128)
    for grid, causal in shapes[:1] if bench.quick else shapes:
        for row in catalogue.__all__ if causal else family():
            mixer: Any = factory(row)(dim).to(bench.device)
            x = torch.randn(batch, *grid, dim, device=bench.device, requires_grad=True)
            name = f"{row}, {'causal' if causal else ' x '.join(map(str, grid))}"
            case = Case(name, batch, math.prod(grid), 1, dim)
            inputs = (x, *(p for p in mixer.parameters() if p.requires_grad))
            layer = partial(_layer, mixer, causal)
            for direction, make in CALLS.items():
                bench.measure(case, direction, "ours", partial(_calls, make, layer, inputs))
            bench.facts[f"{name}, {case.length} tokens: parameters"] = sum(p.numel() for p in mixer.parameters())
            if used := peak(backward_call(layer, inputs), bench.device):
                bench.facts[f"{name}, {case.length} tokens: peak MB"] = used / 1e6
        bench.save(bench)


def _layer(mixer: nn.Module, causal: bool, x: Tensor, *_: Tensor) -> Tensor:
    kind = x.device.type
    # the cache of cast weights must not outlive the capture of a graph
    with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda", cache_enabled=False):
        out: Tensor = mixer(x, causal=causal)
    return out.to(x.dtype)


def _calls(make: Callable[..., Call], *arguments: Any) -> list[Call]:
    return [make(*arguments)]
