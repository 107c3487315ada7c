"""MD-LRPE: linearised relative position encoding on a grid of any number of axes.

A channel's angle is coordinate x frequency. The frequency slots are split into one group per axis, so a score depends
only on the offset vector between two tokens (LightNet, Eq. 12 and 14, real part).

Both kinds share one memory layout: a key p enters as [p cos, p sin], a query reads with [a, b]:
  cosine:  a = x cos,  b = x sin            sum_j x_j p_j cos(offset * theta_j); slots = dim
  rotary:  a = R x,    b = -J a             the pairs (j, j + dim // 2) rotate;   slots = dim // 2
with R the rotation by the query's angles and J that of each pair by 90 degrees.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ndlightnet.layout import Grid, Layout, as_layout
from ndlightnet.ops._operator import Gradient, Operator, again_by, kernel
from ndlightnet.ops.dispatch import Impl, resolve
from ndlightnet.ops.dtypes import finest
from ndlightnet.ops.lightnet.state import State, tile
from ndlightnet.ops.plain import plain

Kind = Literal["cosine", "rotary"]


class Position(NamedTuple):
    """Positions of the tokens of a sequence, and the angle per step of each slot.

    theta: (heads or 1, slots) radians per step. layout: the grid of tokens, or its shape. prefix:
    number of tokens in front of the grid, which have no position (angle 0). offset: coordinate of
    the first cell, one per axis, if not the layout's: an int, a scalar tensor, or a tensor (batch,)
    with one for every sample. origin: like offset; for operators, see `relative`.
    """

    theta: Tensor
    layout: tuple[int, ...] | Layout
    kind: Kind = "cosine"
    prefix: int = 0
    offset: tuple[int | Tensor, ...] | None = None
    origin: tuple[int | Tensor, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self)


def shape_of(position: Position) -> tuple[int, ...]:
    """Return the shape of the grid; for samples end to end, that of the first one."""
    return as_layout(position.layout).shapes[0]


def offset_of(position: Position) -> tuple[int | Tensor, ...] | None:
    """Return the coordinates of the first cell; None: 0."""
    return as_layout(position.layout).offset if position.offset is None else position.offset


def slab_offset(position: Position) -> tuple[int, ...] | None:
    """Return where in the whole grid the slab begins that is the layout; None: another layout, or
    coordinates that are tensors, those of a stream."""
    return as_layout(position.layout).start if position.offset is None else None


def slots_of(dim: int, kind: Kind) -> int:
    """Return the number of angles for `dim` channels."""
    if kind not in ("cosine", "rotary"):
        raise ValueError(f"kind={kind!r}: expected 'cosine' or 'rotary'")
    return dim if kind == "cosine" else dim // 2


def groups(slots: int, axes: int) -> list[int]:
    """Return the slots per axis: consecutive groups that differ by one at most, none empty."""
    if axes > slots:
        raise ValueError(f"{axes} axes need at least as many angle slots, but there are {slots}")
    return [slots // axes + (a < slots % axes) for a in range(axes)]


def frequencies(slots: int, axes: int, base: float = 10000.0, device: torch.device | str | None = None) -> Tensor:
    """Return the frequencies base^(-2j/width), the same for every axis: (slots,) float32."""
    width = -(-slots // axes)
    exponents = torch.arange(width, dtype=torch.float32, device=device) * (-2 / width)
    bank = torch.exp(exponents * math.log(base))
    return torch.cat([bank[:g] for g in groups(slots, axes)])


def tables(position: Position, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin of all tokens' angles, each (prefix + grid length, heads or 1, dim), with
    an axis (batch,) in front where samples have different offsets."""
    cos, sin = key_features(position, dim, dtype).chunk(2, -1)
    return cos, sin


def key_features(position: Position, dim: int, dtype: torch.dtype) -> Tensor:
    """Return the factors on an exponentiated key: cos and sin of all tokens' angles side by side, (prefix + grid
    length, heads or 1, 2 * dim), with an axis (batch,) in front where samples have different offsets.

    Angles are float64 products (float32 has a relative error of 6e-8: 1e-2 radians at 2e5 steps).
    """
    layout, theta = as_layout(position.layout), position.theta
    grid, offset = Grid((layout.length,) if layout.packed else layout.shapes[0]), offset_of(position)
    slots = slots_of(dim, position.kind)
    if theta.ndim != 2 or theta.shape[-1] != slots:
        raise ValueError(
            f"theta of shape {tuple(theta.shape)}: expected (heads or 1, {slots}) "
            f"for kind={position.kind!r} and head dim {dim}"
        )
    where = layout.token_coordinates(theta.device)
    rowwise = [s for s in (*(offset or ()), *(position.origin or ())) if isinstance(s, Tensor) and s.ndim]
    if where is not None and where.ndim == 3:
        rowwise, where = [where], where.movedim(0, 1)  # (length, batch, axes)

    def row(first: int | Tensor) -> int | Tensor:
        if not isinstance(first, Tensor):
            return first
        return first.to(theta.device).reshape(1, -1) if rowwise else first.to(theta.device)

    angles, front = [], []
    split = theta.to(finest(theta.device)).split(groups(slots, layout.ndim), dim=-1)
    kind = split[0].dtype if offset is None else torch.int64  # far coordinates are ints until they are differences
    for axis, group in enumerate(split):
        origin = row(position.origin[axis]) if position.origin else None
        if where is not None:
            coordinate = where[..., axis]
        else:
            coordinate = torch.arange(grid.shape[axis], dtype=kind, device=theta.device)
            coordinate = coordinate[:, None] if rowwise else coordinate
        if offset is not None:
            coordinate = coordinate + row(offset[axis])  # (n, batch or 1) or (n,)
        angles.append(_angles(coordinate, origin, group))
        if position.prefix:
            front.append(_angles(coordinate.new_zeros(1, *coordinate.shape[1:]), origin, group))

    def factors(grid: Grid, angles: list[Tensor]) -> Tensor:
        def spread(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
            values = [function(x).to(dtype) for x in angles]
            values = values if where is not None else [grid.spread(x, axis) for axis, x in enumerate(values)]
            if rowwise:
                rows = rowwise[0].shape[0]
                values = [x.expand(*grid.shape, rows, *x.shape[-2:]).movedim(-3, 0) for x in values]
            return values

        cos, sin = spread(torch.cos), spread(torch.sin)
        if position.kind == "rotary":
            still = cos[0][..., : dim % 2]  # an odd last channel is not rotated
            cos, sin = [*cos, *cos, torch.ones_like(still)], [*sin, *sin, torch.zeros_like(still)]
        table = torch.cat([*cos, *sin], dim=-1)
        return table.reshape(*table.shape[: 1 if rowwise else 0], grid.length, theta.shape[0], 2 * dim)

    table = factors(grid, angles)
    if position.prefix == 0:
        return table
    still = factors(Grid((1,) * grid.ndim), front)
    return torch.cat([still.expand(*still.shape[:-3], position.prefix, *still.shape[-2:]), table], dim=-3)


def _angles(coordinate: Tensor, origin: int | Tensor | None, theta: Tensor) -> Tensor:
    """Return coordinate * theta in its dtype; in the gradient coordinates count from `origin`."""
    if origin is None:
        return coordinate.to(theta.dtype)[..., None, None] * theta
    fixed = theta.detach()
    count = (coordinate - origin).to(theta.dtype)[..., None, None]
    return coordinate.to(theta.dtype)[..., None, None] * fixed + count * (theta - fixed)


def relative(position: Position | None) -> Position | None:
    """Set the origin to the offset, for an operator that rotates queries and keys alike.

    The gradient of theta is the sum over queries and keys of coordinate x angle gradient. All angle gradients add up to
    those of the angles in the States before and after (0 without States), a sum that float32 does not give to the
    digits that a large coordinate needs. So here coordinates count from the origin, and `offset_gradient` adds origin x
    those of the States. Coordinates of a slab are no larger than those of the whole, and stay.
    """
    offset = None if position is None else offset_of(position)
    if position is None or offset is None or plain():  # _OffsetGradient is not plain
        return position
    if slab_offset(position) is not None:
        return position
    return position._replace(offset=offset, origin=offset)


def offset_gradient(state: State, position: Position | None, sign: int) -> State:
    """Return a State (batch, ..., heads, ·) that enters (sign -1) or leaves (1) an operator with
    `relative` angles; its value stays, theta gets the origin's part of its gradient."""
    if position is None or not position.origin:
        return state
    if not (torch.is_grad_enabled() and position.theta.requires_grad):
        return state
    origin = torch.stack(torch.broadcast_tensors(*columns(position.origin, position.theta.device)), 1)
    memory = _OffsetGradient.apply(state.memory, position.theta, origin, sign)  # type: ignore[no-untyped-call]
    return state._replace(memory=memory)


class _OffsetGradient(torch.autograd.Function):
    """Identity on the memory; theta gets sign x origin x the gradient of the memory's angles."""

    @staticmethod
    def forward(ctx: Any, memory: Tensor, theta: Tensor, origin: Tensor, sign: int) -> Tensor:
        out = memory.view_as(memory)
        ctx.save_for_backward(out, theta, origin)  # out: its gradient has theta's part, too
        ctx.sign = sign
        return out

    @staticmethod
    def backward(ctx: Any, dmemory: Tensor) -> tuple[Tensor | None, ...]:
        memory, theta, origin = ctx.saved_tensors
        exact, slots = finest(theta.device), theta.shape[-1]
        cos, sin = memory.to(exact).chunk(2, -2)
        dcos, dsin = dmemory.to(exact).chunk(2, -2)
        grad_angle = (cos * dsin - sin * dcos).sum(-1)
        if grad_angle.shape[-1] != slots:  # pairs; an odd last channel has no angle
            grad_angle = grad_angle[..., :slots] + grad_angle[..., slots : 2 * slots]
        shares = zip(origin.unbind(1), groups(slots, origin.shape[1]), strict=True)
        far = torch.cat([x[:, None].expand(-1, n) for x, n in shares], 1).to(exact)
        far = far.reshape(len(far), *[1] * (grad_angle.ndim - 2), slots)
        dtheta = ctx.sign * (far * grad_angle).flatten(0, -3).sum(0).sum_to_size(theta.shape)
        if torch.is_grad_enabled():  # for a second derivative
            dmemory = _OffsetGradient.apply(dmemory, theta, origin, -ctx.sign)  # type: ignore[no-untyped-call]
        return dmemory, dtheta.to(theta.dtype), None, None


def columns(coordinates: tuple[int | Tensor, ...], device: torch.device) -> list[Tensor]:
    """Return (1 or batch,) int64 per axis, without a host copy, so a CUDA graph can capture it."""
    return [
        s.to(device, torch.int64).reshape(-1)
        if isinstance(s, Tensor)
        else torch.full((1,), s, dtype=torch.int64, device=device)
        for s in coordinates
    ]


def query_features(x: Tensor, position: Position, factors: Tensor | None = None) -> Tensor:
    """Return features that read the memory: `(batch, length, heads, dim)` -> `(..., 2 * dim)`. factors: `key_features`
    of the same tokens, if they are known."""
    factors = key_features(position, x.shape[-1], x.dtype) if factors is None else factors.to(x.dtype)
    if position.kind == "cosine":
        return tile(x, factors.shape[-1], -1) * factors
    cos, sin = factors.chunk(2, -1)
    a = _rotate_by_torch(x, cos, sin)
    return torch.cat([a, -quarter_turn(a)], dim=-1)


def quarter_turn(x: Tensor) -> Tensor:
    """Map (x1, x2) to (-x2, x1) in the pairs (j, j + dim // 2), an odd last channel to 0."""
    half = x.shape[-1] // 2
    first, second, odd = x.split([half, half, x.shape[-1] % 2], dim=-1)
    return torch.cat([-second, first, torch.zeros_like(odd)], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, impl: Impl = "auto") -> Tensor:
    """Rotate every pair of channels by its angle (rotary position encoding); same shape.

    x: (batch, length, heads, dim). cos, sin: (length, heads or 1, dim), as from `tables`; with Triton an axis (batch,)
    in front is refused.
    """
    if resolve("rotate", impl, x, cos, sin) == "triton" and not plain():
        out: Tensor = _rotate(x, cos, sin)
        return out
    return _rotate_by_torch(x, cos, sin)


def _rotate_by_torch(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + quarter_turn(x) * sin


def _limits(x: Tensor, cos: Tensor, sin: Tensor | None = None, **_: Any) -> str:
    if x.shape[-1] % 2:
        return f"heads of {x.shape[-1]} channels: expected an even number"
    if x.ndim != 4 or cos.ndim != 3 or cos.shape not in (x.shape[1:], (x.shape[1], 1, x.shape[3])):
        return f"a table {tuple(cos.shape)} for x {tuple(x.shape)}: expected (length, heads or 1, dim)"
    if sin is not None and (sin.shape != cos.shape or sin.dtype != cos.dtype):
        return f"sin {tuple(sin.shape)} {sin.dtype}: expected {tuple(cos.shape)} {cos.dtype}, as cos"
    return ""


_rotate = Operator(
    "rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor out",
    kernel("rotate", "rotate"),
    lambda x, *_: x.new_empty(x.shape),
    Gradient(
        "rotate_backward(Tensor dout, Tensor x, Tensor cos, Tensor sin, bool needs_cos, bool needs_sin) "
        "-> (Tensor dx, Tensor dcos, Tensor dsin)",
        kernel("rotate", "rotate_backward"),
        again=again_by(_rotate_by_torch, "x", "cos", "sin"),
    ),
    implementations=("torch", "triton"),
    limits=_limits,
)
