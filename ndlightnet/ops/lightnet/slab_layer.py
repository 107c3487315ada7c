"""A layer of global LightNet attention on a slab, which exchanges its State and its edges with others between kernels.

Each step reads its pieces of the joint projection and passes the projection on, so that in the backward one tensor,
the gradient of the projection, goes from step to step, and each writes its pieces: as gradients of their own they
would be added and copied together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ndlightnet.layout import Grid, Layout
from ndlightnet.ops import norm_gate as gates
from ndlightnet.ops._once_differentiable import once_differentiable
from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.lightnet import _triton
from ndlightnet.ops.lightnet.state import State
from ndlightnet.ops.local_mixing import _triton as local
from ndlightnet.ops.local_mixing import api
from ndlightnet.ops.local_mixing.offsets import Offsets
from ndlightnet.ops.position import Position, offset_gradient, relative
from ndlightnet_kernels.position import FlatPosition

Pieces = Callable[[Tensor], tuple[Tensor, ...]]


def slab_layer(
    x: Tensor,
    pieces: Pieces,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    up: Tensor,
    proj: Tensor,
    taps: Tensor | None,
    offsets: Offsets,
    layout: Layout,
    position: Position | None,
) -> Tensor:
    """Return `attention_layer` of a slab's tokens. pieces: returns views of queries, keys, values and gate of x."""
    channels = slice(2 * len(weight), 3 * len(weight))  # of the values
    if taps is not None:
        x, add_sides = api.begin_sides(x, taps, offsets, layout, "triton", channels)
    position = relative(position)
    where = _triton.of_grid(position)
    theta, where = where.theta, where._replace(theta=None)
    x, *state = _Summarize.apply(x, theta, pieces, where, taps is not None)  # type: ignore[no-untyped-call]
    merged = layout.merge(offset_gradient(State(*state), position, 1))
    near = None
    if taps is not None:  # while the States are under way
        at = local.where(Grid(layout.shapes[0]), offsets, x.device)
        x, near = _Mix.apply(x, taps.to(accumulator(x)), pieces, at)  # type: ignore[no-untyped-call]
        near = add_sides(near)
    _, total, memory = offset_gradient(merged(), position, -1)
    x, y = _Read.apply(x, total, memory, theta, pieces, where)  # type: ignore[no-untyped-call]
    out: Tensor = _Gate.apply(x, y.flatten(2), near, weight, bias, up, proj, pieces, eps)  # type: ignore[no-untyped-call]
    return out


class _Summarize(torch.autograd.Function):
    """Keys and values to their State. add: whether the gradient of the values is added to what is there."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, theta: Tensor | None, pieces: Pieces, where: FlatPosition, add: bool
    ) -> tuple[Tensor, ...]:
        _, k, v, _ = pieces(x)
        top, *state = _triton.summarize(k, v, None, *where._replace(theta=theta))
        ctx.save_for_backward(k, v, theta, top)
        ctx.pieces, ctx.where, ctx.add = pieces, where, add
        ctx.mark_non_differentiable(top)
        return x.view_as(x), top, *state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, _: Any, dtotal: Tensor, dmemory: Tensor) -> tuple[Tensor | None, ...]:
        from ndlightnet_kernels import attention_backward as kernels

        k, v, theta, top = ctx.saved_tensors
        (_, dk, dv, _), learn = ctx.pieces(dx), ctx.needs_input_grad[1]
        where = ctx.where._replace(theta=theta)
        *_, dtheta = kernels.summarize_backward(k, v, None, top, dtotal, dmemory, where, learn, dk, dv, ctx.add)
        return dx, _triton._theta_gradient(dtheta, theta, learn), None, None, None


class _Mix(torch.autograd.Function):
    """Values to their local mixing within the slab."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor, pieces: Pieces, at: local.Where) -> tuple[Tensor, Tensor]:
        v = pieces(x)[2].flatten(2)
        ctx.save_for_backward(v, taps)
        ctx.pieces, ctx.at = pieces, at
        return x.view_as(x), local.mix(v, taps, None, *at)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, dnear: Tensor) -> tuple[Tensor | None, ...]:
        v, taps = ctx.saved_tensors
        dv = ctx.pieces(dx)[2].flatten(2)
        return dx, local.backward(dnear, v, taps, None, *ctx.at, dx=dv)[1], None, None


class _Read(torch.autograd.Function):
    """Queries to what they read of the State of all slabs."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, total: Tensor, memory: Tensor, theta: Tensor | None, pieces: Pieces, where: FlatPosition
    ) -> tuple[Tensor, Tensor]:
        q = pieces(x)[0]
        ctx.save_for_backward(q, total, memory, theta)
        ctx.pieces, ctx.where = pieces, where
        return x.view_as(x), _triton.read(q, total, memory, *where._replace(theta=theta))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        from ndlightnet_kernels import attention_backward as kernels

        q, total, memory, theta = ctx.saved_tensors
        dq, learn, where = ctx.pieces(dx)[0], ctx.needs_input_grad[3], ctx.where._replace(theta=theta)
        _, dtotal, dmemory, dtheta = kernels.read_backward(q, total, memory, dy, where, learn, dq)
        return dx, dtotal, dmemory, _triton._theta_gradient(dtheta, theta, learn), None, None


class _Gate(torch.autograd.Function):
    """The last step, whose backward, the first, makes the gradient of the projection."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor,
        near: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        up: Tensor,
        proj: Tensor,
        pieces: Pieces,
        eps: float,
    ) -> Tensor:
        gate = pieces(x)[3]
        out, mean, rstd = gates.forward(y, gate, weight, bias, near, up, proj, eps)
        ctx.save_for_backward(y, gate, weight, bias, near, up, proj, mean, rstd)
        ctx.pieces, ctx.shape = pieces, x.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        # the other steps write the rest of it, which anomaly detection would search for NaN before
        dx = dout.new_zeros(ctx.shape) if torch.is_anomaly_enabled() else dout.new_empty(ctx.shape)
        inputs: Any = (*ctx.saved_tensors, ctx.needs_input_grad[6], ctx.pieces(dx)[3])
        dy, _, dweight, dbias, dnear, dup, dproj = gates.backward(dout, *inputs)
        return dx, dy, dnear, dweight, dbias, dup, dproj, None, None
