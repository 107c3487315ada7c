"""The Triton form of LightNet attention, for rows that share a grid and for samples end to end:
operators with fakes and explicit backwards. The kernels are imported when they are called, not
before. The last arguments of each operator are a Position: see ndlightnet_kernels.position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ndlightnet.layout import Ragged
from ndlightnet.ops._operator import Operator
from ndlightnet.ops.position import Position, columns, offset_of, shape_of, slab_offset
from ndlightnet_kernels import position as flat
from ndlightnet_kernels.position import FIELDS, SCHEMA

Flat = flat.Position
NOWHERE = Flat()


# ----------------------------------------------------------------------------------- positions
def of_grid(position: Position | None) -> Flat:
    """Return the Position of the tokens of rows that share one grid."""
    if position is None:
        return NOWHERE
    offset, shape, start = None, shape_of(position), offset_of(position)
    device = position.theta.device
    near = slab_offset(position)
    if near is not None:
        # as for the whole in one piece: kernels then have nothing to do for each slot
        offset = torch.zeros(1, len(shape), dtype=torch.int32, device=device)
        for axis, first in enumerate(near):
            if first:
                offset[:, axis].fill_(first)
    elif start is not None:
        parts = columns(start, device)
        same = position.origin is start
        parts += parts if same else columns(position.origin or (0,) * len(shape), device)
        offset = torch.stack(torch.broadcast_tensors(*parts), 1)
    return flat.grid(position.theta, offset, position.kind, position.prefix, shape)


def of_frames(position: Position | None, batch: int, frames: int) -> Flat:
    """Return the Position for rows that are the frames of a grid, with the same dtypes for frames
    of any size, so that kernels are not compiled again for each size."""
    if position is None:
        return NOWHERE
    axes, device = len(shape_of(position)), position.theta.device
    frame = torch.arange(frames, device=device)[:, None]
    if position.origin is None:  # small: the offset counts earlier frames of the same grid
        first = (offset_of(position) or (0,))[0]
        offset = torch.nn.functional.pad(frame + first, (0, axes - 1)).int()
    else:
        whole = of_grid(position).offset
        assert whole is not None
        offset = whole[:, None] + torch.nn.functional.pad(frame, (0, 2 * axes - 1))
    offset = offset.expand(batch, frames, -1).reshape(batch * frames, -1).contiguous()
    return flat.grid(position.theta, offset, position.kind, 0, (1, *shape_of(position)[1:]))


def of_samples(position: Position | None, layout: Ragged, k: Tensor, vdim: int, offset: Tensor | None = None) -> Flat:
    """Return the Position of samples end to end; offset (samples, axes) int32."""
    from ndlightnet_kernels import plans

    kind = "none" if position is None else position.kind

    def make() -> tuple[Any, ...]:
        span = plans.tokens_per_split(layout.lengths, k, vdim, kind)
        splits, first = plans.split_table(layout.lengths, span)
        tables = (torch.tensor(x, dtype=torch.int32) for x in (splits, first, layout.shapes))
        return (*(x.to(k.device, non_blocking=True) for x in tables), span)

    key = ("parts", k.device, k.dtype, k.shape[1:], vdim, kind)
    *tables, span = layout.table(key, make)
    theta = None if position is None else position.theta
    splits, first, shapes = tables
    sizes = (0, span, 0, 0)
    return Flat(theta, None if theta is None else offset, splits, first, shapes, kind, sizes)


# ---------------------------------------------------------------- shared parts of the operators
def _state(k: Tensor, vdim: int, inputs: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return unset States (max, sum, memory) of all samples. inputs: an operator's last ones."""
    where, (batch, _, heads, dim) = Flat(*inputs[-FIELDS:]), k.shape
    batch = where.samples(batch)
    total = k.new_empty(batch, heads, dim, dtype=torch.float32)
    memory = k.new_empty(batch, heads, where.halves * dim, vdim, dtype=torch.float32)
    return total, torch.empty_like(total), memory


def _like(*xs: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in xs)


def _dtheta(x: Tensor, inputs: Sequence[Any]) -> Tensor:
    """Return an unset gradient of each head's angles, without slots if not needed. inputs:
    an operator's last ones, `learn` and then the Position."""
    learn, theta = inputs[-FIELDS - 1], inputs[-FIELDS]
    slots = theta.shape[1] if learn and theta is not None else 0
    return x.new_empty(x.shape[2], slots, dtype=torch.float32)


def _fit(dtheta: Tensor, theta: Tensor | None, learn: bool) -> tuple[Tensor | None, ...]:
    """Return the gradients of a Position: theta's (heads or 1, slots) from that of each head."""
    fitted = None
    if learn and theta is not None:
        fitted = dtheta.sum_to_size(theta.shape).to(theta.dtype)
    return fitted, *[None] * (FIELDS - 1)


def _save(ctx: Any, position: Sequence[Any], *tensors: Tensor | None) -> None:
    """Save tensors and then a Position for the backward."""
    *apart, ctx.kind, ctx.sizes = position
    ctx.save_for_backward(*tensors, *apart)


def _saved(ctx: Any) -> tuple[list[Any], Flat, bool]:
    """Return the saved tensors, the Position, and whether the angles need a gradient."""
    *tensors, theta, offset, splits, first, shapes = ctx.saved_tensors
    where = Flat(theta, offset, splits, first, shapes, ctx.kind, ctx.sizes)
    return tensors, where, theta is not None and ctx.needs_input_grad[-FIELDS]


# -------------------------------------------------------------------------------------- global
def _global(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *position: Any) -> Any:
    """Return the output and, for the backward, the State (max, sum, memory)."""
    from ndlightnet_kernels import attention

    where = Flat(*position)
    top, total, memory = attention.summarize(k, v, mask, where)
    return attention.read(q, total, memory, where), top, total, memory


def _global_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    return q.new_empty(*q.shape[:3], v.shape[-1]), *_state(k, v.shape[-1], rest)


def _global_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    top: Tensor,
    total: Tensor,
    memory: Tensor,
    dout: Tensor,
    learn: bool,
    *position: Any,
) -> Any:
    from ndlightnet_kernels import attention_backward as kernels

    where = Flat(*position)
    dq, dtotal, dmemory, by_q = kernels.read_backward(q, total, memory, dout, where, learn)
    dk, dv, by_k = kernels.summarize_backward(k, v, mask, top, dtotal, dmemory, where, learn)
    return dq, dk, dv, by_q + by_k if learn else by_k


def _global_backward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    return *_like(q, k, v), _dtheta(q, rest)


def _global_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, inputs[4:], *inputs[:4], *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # else zeros are written as gradients of the State


def _global_grads(ctx: Any, dout: Tensor, *_: Tensor) -> Any:
    tensors, where, learn = _saved(ctx)
    dq, dk, dv, dtheta = global_backward(*tensors, dout, learn, *where)
    return dq, dk, dv, None, *_fit(dtheta, where.theta, learn)


global_backward = Operator(
    "global_attention_backward(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor top, "
    f"Tensor total, Tensor memory, Tensor dout, bool learn, {SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _global_backward,
    _global_backward_fake,
)
global_attention = Operator(
    f"global_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
    _global,
    _global_fake,
    _global_save,
    _global_grads,
)


# ----------------------------------------------------------------------------- State and queries
def _summarize(k: Tensor, v: Tensor, mask: Tensor | None, *position: Any) -> Any:
    from ndlightnet_kernels import attention

    return attention.summarize(k, v, mask, Flat(*position))


def _summarize_fake(k: Tensor, v: Tensor, *rest: Any) -> Any:
    return _state(k, v.shape[-1], rest)


def _summarize_backward(
    k: Tensor, v: Tensor, mask: Tensor | None, top: Tensor, dtotal: Tensor, dmemory: Tensor, learn: bool, *position: Any
) -> Any:
    from ndlightnet_kernels import attention_backward as kernels

    where = Flat(*position)
    return kernels.summarize_backward(k, v, mask, top, dtotal, dmemory, where, learn)


def _summarize_backward_fake(k: Tensor, v: Tensor, *rest: Any) -> Any:
    return *_like(k, v), _dtheta(k, rest)


def _summarize_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, inputs[3:], *inputs[:3], output[0])
    ctx.mark_non_differentiable(output[0])


def _summarize_grads(ctx: Any, _: Tensor, dtotal: Tensor, dmemory: Tensor) -> Any:
    tensors, where, learn = _saved(ctx)
    dk, dv, dtheta = summarize_backward(*tensors, dtotal, dmemory, learn, *where)
    return dk, dv, None, *_fit(dtheta, where.theta, learn)


summarize_backward = Operator(
    "summarize_backward(Tensor k, Tensor v, Tensor? mask, Tensor top, Tensor dtotal, "
    f"Tensor dmemory, bool learn, {SCHEMA}) -> (Tensor, Tensor, Tensor)",
    _summarize_backward,
    _summarize_backward_fake,
)
summarize = Operator(
    f"summarize(Tensor k, Tensor v, Tensor? mask, {SCHEMA}) -> (Tensor, Tensor, Tensor)",
    _summarize,
    _summarize_fake,
    _summarize_save,
    _summarize_grads,
)


def _read(q: Tensor, total: Tensor, memory: Tensor, *position: Any) -> Tensor:
    from ndlightnet_kernels import attention

    return attention.read(q, total, memory, Flat(*position))


def _read_fake(q: Tensor, total: Tensor, memory: Tensor, *position: Any) -> Tensor:
    return q.new_empty(*q.shape[:3], memory.shape[-1])


def _read_backward(q: Tensor, total: Tensor, memory: Tensor, dout: Tensor, learn: bool, *position: Any) -> Any:
    from ndlightnet_kernels import attention_backward as kernels

    return kernels.read_backward(q, total, memory, dout, Flat(*position), learn)


def _read_backward_fake(q: Tensor, total: Tensor, memory: Tensor, *rest: Any) -> Any:
    return *_like(q, total, memory), _dtheta(q, rest)


def _read_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _save(ctx, inputs[3:], *inputs[:3])


def _read_grads(ctx: Any, dout: Tensor) -> Any:
    tensors, where, learn = _saved(ctx)
    dq, dtotal, dmemory, dtheta = read_backward(*tensors, dout, learn, *where)
    return dq, dtotal, dmemory, *_fit(dtheta, where.theta, learn)


read_backward = Operator(
    "read_backward(Tensor q, Tensor total, Tensor memory, Tensor dout, bool learn, "
    f"{SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
    _read_backward,
    _read_backward_fake,
)
read = Operator(
    f"read(Tensor q, Tensor total, Tensor memory, {SCHEMA}) -> Tensor", _read, _read_fake, _read_save, _read_grads
)
