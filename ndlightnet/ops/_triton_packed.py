"""The doors to ndlightnet_kernels for samples of different shapes, end to end: operators with
schemas, fakes and backwards. The kernels are imported when they are called, not before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ndlightnet.ops._once import once
from ndlightnet.ops._triton import _fit, _slots


def _place(theta: Tensor | None, start: Tensor | None, kind: str, items: Tensor, first: Tensor,
           shapes: Tensor, span: int) -> Any:  # fmt: skip
    from ndlightnet_kernels.tiles import Pack, Place

    return Place(kind, theta, start, pack=Pack(items, first, shapes, span))


@torch.library.custom_op("ndlightnet::triton_packed_summarize", mutates_args=())
def triton_packed_summarize(
    k: Tensor, v: Tensor, keep: Tensor | None, theta: Tensor | None, start: Tensor | None,
    kind: str, items: Tensor, first: Tensor, shapes: Tensor, span: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """States (max, sum, memory) of the samples of one sequence (1, length, heads, dim)."""
    from ndlightnet_kernels import attention

    place = _place(theta, start, kind, items, first, shapes, span)
    return attention.summarize(k, v, keep, place)


@triton_packed_summarize.register_fake
def _(
    k: Tensor, v: Tensor, keep: Tensor | None, theta: Tensor | None, start: Tensor | None,
    kind: str, items: Tensor, first: Tensor, shapes: Tensor, span: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (_, _, heads, dim), rows = k.shape, shapes.shape[0]
    total = k.new_empty(rows, heads, dim, dtype=torch.float32)
    tall = dim if kind == "none" else 2 * dim
    memory = k.new_empty(rows, heads, tall, v.shape[-1], dtype=torch.float32)
    return total, torch.empty_like(total), memory


@torch.library.custom_op("ndlightnet::triton_packed_summarize_backward", mutates_args=())
def triton_packed_summarize_backward(
    k: Tensor, v: Tensor, keep: Tensor | None, top: Tensor, dtotal: Tensor, dmemory: Tensor,
    theta: Tensor | None, start: Tensor | None, kind: str, items: Tensor, first: Tensor,
    shapes: Tensor, span: int, learn: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from ndlightnet_kernels import attention_backward

    place = _place(theta, start, kind, items, first, shapes, span)
    return attention_backward.summarize_backward(k, v, keep, top, dtotal, dmemory, place, learn)


@triton_packed_summarize_backward.register_fake
def _(
    k: Tensor, v: Tensor, keep: Tensor | None, top: Tensor, dtotal: Tensor, dmemory: Tensor,
    theta: Tensor | None, start: Tensor | None, kind: str, items: Tensor, first: Tensor,
    shapes: Tensor, span: int, learn: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dtheta = k.new_empty(k.shape[2], _slots(theta, learn), dtype=torch.float32)
    return k.new_empty(k.shape), v.new_empty(v.shape), dtheta


def _summarize_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    k, v, keep, theta, start, ctx.kind, *tables, ctx.span = inputs
    ctx.save_for_backward(k, v, keep, output[0], theta, start, *tables)
    ctx.mark_non_differentiable(output[0])


@once
def _summarize_grads(ctx: Any, _: Tensor, dtotal: Tensor, dmemory: Tensor) -> Any:
    k, v, keep, top, theta, start, *tables = ctx.saved_tensors
    learn = theta is not None and ctx.needs_input_grad[3]
    dk, dv, dtheta = triton_packed_summarize_backward(
        k, v, keep, top, dtotal, dmemory, theta, start, ctx.kind, *tables, ctx.span, learn
    )
    return dk, dv, None, _fit(dtheta, theta) if learn else None, *[None] * 6


triton_packed_summarize.register_autograd(_summarize_grads, setup_context=_summarize_save)


@torch.library.custom_op("ndlightnet::triton_packed_read", mutates_args=())
def triton_packed_read(
    q: Tensor, total: Tensor, memory: Tensor, theta: Tensor | None, start: Tensor | None,
    kind: str, items: Tensor, first: Tensor, shapes: Tensor, span: int,
) -> Tensor:  # fmt: skip
    """Queries (1, length, heads, dim) on the States of their samples."""
    from ndlightnet_kernels import attention

    place = _place(theta, start, kind, items, first, shapes, span)
    return attention.read(q, total, memory, place)


@triton_packed_read.register_fake
def _(
    q: Tensor, total: Tensor, memory: Tensor, theta: Tensor | None, start: Tensor | None,
    kind: str, items: Tensor, first: Tensor, shapes: Tensor, span: int,
) -> Tensor:  # fmt: skip
    return q.new_empty(*q.shape[:3], memory.shape[-1])


@torch.library.custom_op("ndlightnet::triton_packed_read_backward", mutates_args=())
def triton_packed_read_backward(
    q: Tensor, total: Tensor, memory: Tensor, dout: Tensor, theta: Tensor | None,
    start: Tensor | None, kind: str, items: Tensor, first: Tensor, shapes: Tensor, span: int,
    learn: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from ndlightnet_kernels import attention_backward

    place = _place(theta, start, kind, items, first, shapes, span)
    return attention_backward.read_backward(q, total, memory, dout, place, learn)


@triton_packed_read_backward.register_fake
def _(
    q: Tensor, total: Tensor, memory: Tensor, dout: Tensor, theta: Tensor | None,
    start: Tensor | None, kind: str, items: Tensor, first: Tensor, shapes: Tensor, span: int,
    learn: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dtheta = q.new_empty(q.shape[2], _slots(theta, learn), dtype=torch.float32)
    dtotal, dmemory = total.new_empty(total.shape), memory.new_empty(memory.shape)
    return q.new_empty(q.shape), dtotal, dmemory, dtheta


def _read_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.kind, items, first, shapes, ctx.span = inputs
    ctx.save_for_backward(*tensors, items, first, shapes)


@once
def _read_grads(ctx: Any, dout: Tensor) -> Any:
    q, total, memory, theta, start, *tables = ctx.saved_tensors
    learn = theta is not None and ctx.needs_input_grad[3]
    dq, dtotal, dmemory, dtheta = triton_packed_read_backward(
        q, total, memory, dout, theta, start, ctx.kind, *tables, ctx.span, learn
    )
    return dq, dtotal, dmemory, _fit(dtheta, theta) if learn else None, *[None] * 6


triton_packed_read.register_autograd(_read_grads, setup_context=_read_save)


@torch.library.custom_op("ndlightnet::triton_packed_scan", mutates_args=())
def triton_packed_scan(
    x: Tensor, coef: Tensor, log_decay: Tensor, rcoef: Tensor | None, rlog_decay: Tensor | None,
    mask: Tensor | None, residual: bool, axes: Sequence[int], most: Sequence[int],
    tables: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    """Lines in groups: along `axes`, none longer than `most`; see ndlightnet.layout.Lines."""
    from ndlightnet_kernels import axis_scan

    groups = list(zip(axes, most, tables, strict=True))
    return axis_scan.forward(x, coef, log_decay, rcoef, rlog_decay, mask, residual, groups)


@triton_packed_scan.register_fake
def _(
    x: Tensor, coef: Tensor, log_decay: Tensor, rcoef: Tensor | None, rlog_decay: Tensor | None,
    mask: Tensor | None, residual: bool, axes: Sequence[int], most: Sequence[int],
    tables: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape)


@torch.library.custom_op("ndlightnet::triton_packed_scan_backward", mutates_args=())
def triton_packed_scan_backward(
    dy: Tensor, x: Tensor, coef: Tensor, log_decay: Tensor, rcoef: Tensor | None,
    rlog_decay: Tensor | None, mask: Tensor | None, residual: bool, axes: Sequence[int],
    most: Sequence[int], tables: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients; those of the way back are empty where there is none."""
    from ndlightnet_kernels import axis_scan

    groups = list(zip(axes, most, tables, strict=True))
    grads = axis_scan.backward(dy, x, coef, log_decay, rcoef, rlog_decay, mask, residual, groups)
    dx, dcoef, dlog, drcoef, drlog = grads
    back = (coef.new_empty(0) if g is None else g for g in (drcoef, drlog))
    return dx, dcoef, dlog, *back  # type: ignore[return-value]


@triton_packed_scan_backward.register_fake
def _(
    dy: Tensor, x: Tensor, coef: Tensor, log_decay: Tensor, rcoef: Tensor | None,
    rlog_decay: Tensor | None, mask: Tensor | None, residual: bool, axes: Sequence[int],
    most: Sequence[int], tables: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dcoef, dlog = coef.new_empty(coef.shape), log_decay.new_empty(log_decay.shape)
    back = [x.new_empty(x.shape if rcoef is not None else 0) for x in (coef, log_decay)]
    return x.new_empty(x.shape), dcoef, dlog, back[0], back[1]


def _scan_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.residual, ctx.axes, ctx.most, tables = inputs
    ctx.save_for_backward(*tensors, *tables)


@once
def _scan_grads(ctx: Any, dy: Tensor) -> Any:
    saved = ctx.saved_tensors
    dx, dcoef, dlog, drcoef, drlog = triton_packed_scan_backward(
        dy, *saved[:6], ctx.residual, ctx.axes, ctx.most, list(saved[6:])
    )
    back = (None, None) if saved[3] is None else (drcoef, drlog)
    return dx, dcoef, dlog, *back, None, None, None, None, [None] * len(saved[6:])


triton_packed_scan.register_autograd(_scan_grads, setup_context=_scan_save)
