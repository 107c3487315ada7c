"""Attention and MD-TPE on samples of different shapes, end to end in one sequence: no padding, and
no sample sees another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ndlightnet.layout import Ragged
from ndlightnet.ops import _registry, _triton_packed
from ndlightnet.ops._registry import Impl
from ndlightnet.ops.attention import global_attention
from ndlightnet.ops.axis_scan import both_ways
from ndlightnet.ops.frames import axis_causal_attention, check_past, faded, heavy, running
from ndlightnet.ops.lrpe import Lrpe
from ndlightnet.ops.recurrence.chunks import exact
from ndlightnet.ops.state import State

Shape = tuple[int, ...]


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Ragged,
    *,
    mask: Tensor | None = None,
    lrpe: Lrpe | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """`global_attention` of every sample by itself. q, k (length, heads, dim), v (length, heads,
    value_dim), mask (length,) bool; lrpe: of a grid of any one shape, each sample has its own."""
    _check(q, k, v, layout, mask, lrpe)
    chosen: Any = _registry.choose(impl, "global_attention", k[None], v[None], lrpe)
    if chosen == "triton":
        return _by_kernels(q, k, v, layout, mask, lrpe, None, lambda states: states)

    def alone(shape: Shape, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        return global_attention(q, k, v, **how)

    return _one_by_one(alone, q, k, v, layout, mask, lrpe, chosen)


def packed_axis_causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Ragged,
    *,
    mask: Tensor | None = None,
    lrpe: Lrpe | None = None,
    window: int | None = None,
    forget: float | Tensor = 0.0,
    impl: Impl = "auto",
) -> Tensor:
    """`axis_causal_attention` of every sample by itself; arguments as in `packed_attention`.

    By kernels, where frames are large enough for States of their own; one sample after the other
    elsewhere.
    """
    _check(q, k, v, layout, mask, lrpe)
    check_past(window, forget, k.shape[1])
    chosen: Any = _registry.choose(impl, "axis_causal_attention", k[None], v[None], lrpe)
    pairs = zip(layout.lengths, layout.shapes, strict=True)
    small = min((n // shape[0] for n, shape in pairs if n), default=0)
    if chosen == "triton" and not heavy(k, v, lrpe, small):
        frames, at, most = layout.frames(k.device)

        def merged(states: State) -> State:
            empty = (-torch.inf, 0.0, 0.0)
            wide = (
                x.new_full((len(layout) * most, *x.shape[1:]), fill).index_copy(0, at, x)
                for x, fill in zip(states, empty, strict=True)
            )
            padded = State(*(x.unflatten(0, (len(layout), most)) for x in wide))
            seen = running(faded(padded, forget), window, chosen)
            return State(*(x.flatten(0, 1).index_select(0, at) for x in seen))

        start = torch.nn.functional.pad((at % most)[:, None], (0, layout.ndim - 1)).int()
        return _by_kernels(q, k, v, frames, mask, lrpe, start, merged)

    def alone(shape: Shape, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        return axis_causal_attention(q, k, v, shape[0], window=window, forget=forget, **how)[0]

    return _one_by_one(alone, q, k, v, layout, mask, lrpe, chosen)


def _check(
    q: Tensor, k: Tensor, v: Tensor, layout: Ragged, mask: Tensor | None, lrpe: Lrpe | None
) -> None:
    if k.ndim != 3 or q.shape != k.shape or v.shape[:2] != k.shape[:2] or len(k) != layout.length:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: expected "
            f"(length, heads, ·) with length {layout.length}, that of the layout"
        )
    if mask is not None and (tuple(mask.shape) != (len(k),) or mask.dtype != torch.bool):
        raise ValueError(f"mask {tuple(mask.shape)} {mask.dtype}: expected bool {(len(k),)}")
    if lrpe is not None and (lrpe.prefix or lrpe.start is not None):
        raise ValueError(f"lrpe={lrpe}: expected no prefix and no start")


def _by_kernels(
    q: Tensor, k: Tensor, v: Tensor, layout: Ragged, mask: Tensor | None, lrpe: Lrpe | None,
    start: Tensor | None, between: Callable[[State], State],
) -> Tensor:  # fmt: skip
    """Summarise every sample, and read for each what `between` makes of their States."""
    theta, kind = (None, "none") if lrpe is None else (lrpe.theta, lrpe.kind)
    where = (theta, None if theta is None else start, kind, *_portions(layout, k, v, kind))
    keep = None if mask is None else mask[None]
    states = State(*_triton_packed.triton_packed_summarize(k[None], v[None], keep, *where))
    seen = between(states)
    out: Tensor = _triton_packed.triton_packed_read(q[None], seen.sum, seen.memory, *where)
    return out.squeeze(0)


def _one_by_one(
    alone: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, layout: Ragged,
    mask: Tensor | None, lrpe: Lrpe | None, impl: str,
) -> Tensor:  # fmt: skip
    outs = []
    for i, shape in enumerate(layout.shapes):
        if layout.lengths[i]:
            now = slice(layout.offsets[i], layout.offsets[i + 1])
            place = None if lrpe is None else lrpe._replace(shape=shape)
            keep = None if mask is None else mask[None, now]
            one = (x[None, now] for x in (q, k, v))
            outs.append(alone(shape, *one, mask=keep, lrpe=place, impl=impl)[0])
    return torch.cat(outs) if outs else q.new_empty(v.shape)


def _portions(
    layout: Ragged, k: Tensor, v: Tensor, kind: str
) -> tuple[Tensor, Tensor, Tensor, int]:
    """How the samples are cut into parts for the kernels: see ndlightnet_kernels.tiles.Pack."""
    from ndlightnet_kernels import plans

    def make() -> tuple[Tensor, Tensor, Tensor, int]:
        span = plans.portion(layout.lengths, k, v.shape[-1], kind)
        items, first = plans.items(layout.lengths, span)
        tables = (torch.tensor(x, dtype=torch.int32) for x in (items, first, layout.shapes))
        a, b, c = (x.to(k.device, non_blocking=True) for x in tables)
        return a, b, c, span

    key = ("portions", k.device, k.dtype, k.shape[1:], v.shape[-1], kind)
    made: tuple[Tensor, Tensor, Tensor, int] = layout.once(key, make)
    return made


def packed_axis_scan(
    x: Tensor,
    layout: Ragged,
    coef: Tensor,
    log_decay: Tensor,
    reverse: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    *,
    residual: bool = False,
    impl: Impl = "auto",
) -> Tensor:
    """`axis_scan` of every sample by itself: tokens (length, dim), mask (length,) bool."""
    if x.ndim != 2 or len(x) != layout.length or coef.shape[:2] != (layout.ndim, x.shape[1]):
        raise ValueError(
            f"x {tuple(x.shape)}, coef {tuple(coef.shape)}: expected {layout.length} tokens and "
            f"{layout.ndim} axes, those of the layout"
        )
    if x.numel() == 0:
        return x
    groups = layout.lines(x.device)
    longest = max(group.most for group in groups)
    chosen = _registry.choose(impl, "axis_scan", x[None, :longest])
    if chosen == "triton":
        way_back = (None, None) if reverse is None else tuple(w.float() for w in reverse)
        axes, most, tables = zip(*groups, strict=True)
        out: Tensor = _triton_packed.triton_packed_scan(
            x, coef.float(), log_decay.float(), *way_back, mask, residual, axes, most, tables
        )
        return out
    seen = x if mask is None else x.masked_fill(~mask[:, None], 0)
    # a row more, for what lies beyond the ends of lines
    with exact(x):
        source = torch.cat([seen, seen.new_zeros(1, x.shape[1])])
        total = x if residual else torch.zeros_like(x)
        for axis, longest, table in groups:
            first, step, count = table.long()[:, :, None].unbind(1)
            r = torch.arange(longest, device=x.device)
            at = torch.where(r < count, first + r * step, len(x))
            lines = source.index_select(0, at.flatten()).unflatten(0, at.shape)
            y = both_ways(lines, axis, coef, log_decay, reverse)
            y = torch.zeros_like(source).index_copy(0, at.flatten(), y.flatten(0, 1))
            total = total + y[:-1]
        return total
