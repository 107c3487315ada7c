"""The Triton form of LightNet attention, for rows that share a grid and for samples end to end:
operators with fakes and explicit backwards. The kernels are imported when they are called, not
before. The last arguments of each operator are a FlatPosition: see ndlightnet_kernels.position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ndlightnet.layout import Ragged, as_layout
from ndlightnet.ops._operator import Gradient, Operator
from ndlightnet.ops.limits import axes_reason
from ndlightnet.ops.position import Position, columns, offset_of, shape_of, slab_offset
from ndlightnet_kernels.position import FIELDS, NO_POSITION, SCHEMA, FlatPosition, grid_position

KERNELS = ("torch", "triton", "reference")
MOST_CHANNELS = 256  # of a head, which a program holds on chip


# ----------------------------------------------------------------------------------- positions
def of_grid(position: Position | None) -> FlatPosition:
    """Return the FlatPosition of the tokens of rows that share one grid."""
    if position is None:
        return NO_POSITION
    offset, shape, start, near = None, shape_of(position), offset_of(position), slab_offset(position)
    device = position.theta.device
    if near is not None:
        # as for the whole in one piece: kernels then have nothing to do for each slot
        offset = torch.zeros(1, len(shape), dtype=torch.int32, device=device)
        for axis, first in enumerate(near):
            if first:
                offset[:, axis].fill_(first)
    elif start is not None:
        cells = columns(start, device)
        same = position.origin is start  # Dynamo does not compare a tuple that it has just made
        cells += cells if same else columns(position.origin or (0,) * len(shape), device)
        offset = torch.stack(torch.broadcast_tensors(*cells), 1)
    return grid_position(position.theta, offset, position.kind, position.prefix, shape)


def of_frames(position: Position | None, batch: int, frames: int) -> FlatPosition:
    """Return the FlatPosition for rows that are the frames of a grid, with the same dtypes for frames
    of any size, so that kernels are not compiled again for each size."""
    if position is None:
        return NO_POSITION
    axes, device = len(shape_of(position)), position.theta.device
    frame = torch.arange(frames, device=device)[:, None]
    if position.origin is None:  # small: the offset counts earlier frames of the same grid
        first = (offset_of(position) or (0,))[0]
        offset = torch.nn.functional.pad(frame + first, (0, axes - 1)).int()
    else:
        first_frame = of_grid(position).offset
        assert first_frame is not None
        offset = first_frame[:, None] + torch.nn.functional.pad(frame, (0, 2 * axes - 1))
    offset = offset.expand(batch, frames, -1).reshape(batch * frames, -1).contiguous()
    return grid_position(position.theta, offset, position.kind, 0, (1, *shape_of(position)[1:]))


def of_samples(
    position: Position | None, layout: Ragged, k: Tensor, vdim: int, offset: Tensor | None = None
) -> FlatPosition:
    """Return the FlatPosition of samples end to end; offset (samples, axes) int32."""
    from ndlightnet_kernels import plans

    kind = "none" if position is None else position.kind

    def make() -> tuple[Any, ...]:
        span = plans.tokens_per_split(layout.lengths, k, vdim, kind)
        splits, first = plans.split_table(layout.lengths, span)
        tables = (torch.tensor(x, dtype=torch.int32) for x in (splits, first, layout.shapes))
        return (*(x.to(k.device, non_blocking=True) for x in tables), span)

    key = ("splits", k.device, k.dtype, k.shape[1:], vdim, kind)
    splits, first, shapes, span = layout.table(key, make)
    theta, offset = (None, None) if position is None else (position.theta, offset)
    return FlatPosition(theta, offset, splits, first, shapes, kind, (0, span, 0, 0))


def of_layout(position: Position | None, pack: Ragged | None, k: Tensor, vdim: int) -> FlatPosition:
    """Return the FlatPosition of samples end to end, or without a pack of rows that share one grid."""
    return of_grid(position) if pack is None else of_samples(position, pack, k, vdim)


# ---------------------------------------------------------------- what the operators share
def _state(k: Tensor, vdim: int, fields: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return unset States (max, sum, memory) of all samples. fields: of a FlatPosition."""
    position, (batch, _, heads, dim) = FlatPosition(*fields), k.shape
    batch = position.samples(batch)
    total = k.new_empty(batch, heads, dim, dtype=torch.float32)
    memory = k.new_empty(batch, heads, position.halves * dim, vdim, dtype=torch.float32)
    return total, torch.empty_like(total), memory


def _theta_gradient(dtheta: Tensor, theta: Tensor | None, needed: bool) -> Tensor | None:
    """Return the gradient of theta (heads or 1, slots) from that of each head."""
    return dtheta.sum_to_size(theta.shape).to(theta.dtype) if needed and theta is not None else None


def _head_limits(x: Tensor, v: Tensor | None = None, *_: Any, position: Position | None = None) -> str:
    most = max(y.shape[-1] for y in (x, v) if y is not None)
    wide = f"{most} channels a head: expected {MOST_CHANNELS} or fewer" if most > MOST_CHANNELS else ""
    if position is not None and not as_layout(position.layout).ordered:
        return "points at real coordinates: expected a grid"
    return axes_reason(len(position.shape) if position else 1) or wide


def _limits(x: Tensor, v: Tensor | None = None, *_: Any, position: Position | None = None) -> str:
    odd = position is not None and position.kind == "rotary" and x.shape[-1] % 2
    pairs = f"kind='rotary' and {x.shape[-1]} channels: expected an even number" if odd else ""
    return _head_limits(x, v, position=position) or pairs


def _products(q: Sequence[int], v: Sequence[int], kind: str) -> int:
    """Return the FLOPs of queries or keys (..., heads, dim) times values: 2 n d e, of n tokens of all
    samples and heads, and d and e channels (2 d with MD-LRPE, whose memory has two halves)."""
    return 2 * math.prod(q) * (1 if kind == "none" else 2) * v[-1]


def _attention_flops(q: Sequence[int], v: Sequence[int], kind: str, **_: Any) -> int:
    """A token's keys and values join a memory, and it reads one; what chunks of the causal form cost
    on top in a kernel is not counted."""
    return 2 * _products(q, v, kind)


# -------------------------------------------------------------------------------------- global
def _global(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *fields: Any) -> Any:
    """Return the output and, for the backward, the State (max, sum, memory)."""
    from ndlightnet_kernels import attention

    position = FlatPosition(*fields)
    top, total, memory = attention.summarize(k, v, mask, position)
    return attention.read(q, total, memory, position), top, total, memory


def _global_fake(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *fields: Any) -> Any:
    return q.new_empty(*q.shape[:3], v.shape[-1]), *_state(k, v.shape[-1], fields)


def _global_backward(*inputs: Any) -> Any:
    from ndlightnet_kernels import attention_backward as kernels

    q, k, v, mask, top, total, memory, dout, learn = inputs[:-FIELDS]
    position = FlatPosition(*inputs[-FIELDS:])
    dq, dtotal, dmemory, by_q = kernels.read_backward(q, total, memory, dout, position, learn)
    dk, dv, by_k = kernels.summarize_backward(k, v, mask, top, dtotal, dmemory, position, learn)
    return dq, dk, dv, _theta_gradient(by_q + by_k if learn else by_k, position.theta, learn)


global_attention = Operator(
    f"global_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, {SCHEMA}) "
    "-> (Tensor out, Tensor top, Tensor total, Tensor memory)",
    _global,
    _global_fake,
    Gradient(
        "global_attention_backward(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor top, Tensor total, "
        f"Tensor memory, Tensor dout, bool needs_theta, {SCHEMA}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dtheta)",
        _global_backward,
    ),
    flops=_attention_flops,
    implementations=KERNELS,
    limits=_limits,
)


# ----------------------------------------------------------------------------- State and queries
def _summarize(k: Tensor, v: Tensor, mask: Tensor | None, *fields: Any) -> Any:
    from ndlightnet_kernels import attention

    return attention.summarize(k, v, mask, FlatPosition(*fields))


def _summarize_backward(*inputs: Any) -> Any:
    from ndlightnet_kernels import attention_backward as kernels

    k, v, mask, top, dtotal, dmemory, learn = inputs[:-FIELDS]
    position = FlatPosition(*inputs[-FIELDS:])
    dk, dv, dtheta = kernels.summarize_backward(k, v, mask, top, dtotal, dmemory, position, learn)
    return dk, dv, _theta_gradient(dtheta, position.theta, learn)


summarize = Operator(
    f"summarize(Tensor k, Tensor v, Tensor? mask, {SCHEMA}) -> (Tensor top, Tensor total, Tensor memory)",
    _summarize,
    lambda k, v, mask, *fields: _state(k, v.shape[-1], fields),
    Gradient(
        "summarize_backward(Tensor k, Tensor v, Tensor? mask, Tensor top, Tensor dtotal, Tensor dmemory, "
        f"bool needs_theta, {SCHEMA}) -> (Tensor dk, Tensor dv, Tensor dtheta)",
        _summarize_backward,
    ),
    flops=lambda k, v, kind, **_: _products(k, v, kind),
    implementations=KERNELS,
    limits=_limits,
)


def _read(q: Tensor, total: Tensor, memory: Tensor, *fields: Any) -> Tensor:
    from ndlightnet_kernels import attention

    return attention.read(q, total, memory, FlatPosition(*fields))


def _read_backward(*inputs: Any) -> Any:
    from ndlightnet_kernels import attention_backward as kernels

    q, total, memory, dout, learn = inputs[:-FIELDS]
    position = FlatPosition(*inputs[-FIELDS:])
    dq, dtotal, dmemory, dtheta = kernels.read_backward(q, total, memory, dout, position, learn)
    return dq, dtotal, dmemory, _theta_gradient(dtheta, position.theta, learn)


read = Operator(
    f"read(Tensor q, Tensor total, Tensor memory, {SCHEMA}) -> Tensor out",
    _read,
    lambda q, total, memory, *_: q.new_empty(*q.shape[:3], memory.shape[-1]),
    Gradient(
        f"read_backward(Tensor q, Tensor total, Tensor memory, Tensor dout, bool needs_theta, {SCHEMA}) "
        "-> (Tensor dq, Tensor dtotal, Tensor dmemory, Tensor dtheta)",
        _read_backward,
    ),
    flops=lambda q, memory, kind, **_: _products(q, memory, kind),
    implementations=KERNELS,
    limits=_limits,
)
