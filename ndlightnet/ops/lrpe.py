"""MD-LRPE: linearised relative position encoding on a grid of any number of axes.

A channel's angle is coordinate x frequency. The frequency slots are split into one group per axis,
so a score depends on the offset vector between two tokens only (LightNet, Eq. 12 and 14, real
part).

Both kinds share one memory layout: a key p enters as [p cos, p sin], a query reads with [a, b]:
  cosine:  a = x cos,  b = x sin            sum_j x_j p_j cos(offset * theta_j); slots = dim
  rotary:  a = R x,    b = -J a             the pairs (j, j + dim // 2) rotate;   slots = dim // 2
with R the rotation at the query's place and J the quarter turn of each pair.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ndlightnet.grid import Grid

Kind = Literal["cosine", "rotary"]


class Lrpe(NamedTuple):
    """Where the tokens of a sequence lie and how fast each slot turns.

    theta: (heads or 1, slots) radians per step. shape: the grid's shape. prefix: so many tokens in
    front of the grid have no position (angle 0). start: coordinate of the first cell, one per axis;
    a tensor (batch,) where it is another one in every sample.
    """

    theta: Tensor
    shape: tuple[int, ...]
    kind: Kind = "cosine"
    prefix: int = 0
    start: tuple[int | Tensor, ...] | None = None


def slots_of(dim: int, kind: Kind) -> int:
    """Number of angles for `dim` channels."""
    if kind not in ("cosine", "rotary"):
        raise ValueError(f"kind={kind!r}: expected 'cosine' or 'rotary'")
    return dim if kind == "cosine" else dim // 2


def groups(slots: int, axes: int) -> list[int]:
    """Slots per axis: consecutive groups that differ by one at most, none empty."""
    if axes > slots:
        raise ValueError(f"{axes} axes need at least as many angle slots, but there are {slots}")
    return [slots // axes + (a < slots % axes) for a in range(axes)]


def frequencies(
    slots: int, axes: int, base: float = 10000.0, device: torch.device | str | None = None
) -> Tensor:
    """The usual bank base^(-2j/width), the same for every axis: (slots,) float32."""
    width = -(-slots // axes)
    exponents = torch.arange(width, dtype=torch.float32, device=device) * (-2 / width)
    bank = torch.exp(exponents * math.log(base))
    return torch.cat([bank[:g] for g in groups(slots, axes)])


def tables(lrpe: Lrpe, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of every token's angles: two of (prefix + grid length, heads or 1, dim), with an
    axis (batch,) in front where samples start at places of their own.

    Angles are float64 products (a float32 one is off by 6e-8 of itself: 1e-2 radians at 2e5 steps).
    """
    grid, theta = Grid(lrpe.shape), lrpe.theta
    start = lrpe.start or (0,) * grid.ndim
    slots = slots_of(dim, lrpe.kind)
    if theta.ndim != 2 or theta.shape[-1] != slots:
        raise ValueError(
            f"theta of shape {tuple(theta.shape)}: expected (heads or 1, {slots}) "
            f"for kind={lrpe.kind!r} and head dim {dim}"
        )
    # MPS has no float64; there the angles are as exact as float32 allows.
    exact = torch.float32 if theta.device.type == "mps" else torch.float64
    own = [s for s in start if isinstance(s, Tensor) and s.ndim]
    parts = []
    for axis, part in enumerate(theta.to(exact).split(groups(slots, grid.ndim), dim=-1)):
        place = torch.arange(grid.shape[axis], device=theta.device)
        first = start[axis]
        if isinstance(first, Tensor):
            first = first.to(theta.device).reshape(1, -1) if own else first.to(theta.device)
        place = (place[:, None] if own else place) + first  # (n, batch or 1) or (n,)
        parts.append(place.to(exact)[..., None, None] * part)

    def over_grid(values: list[Tensor]) -> Tensor:
        seen = [grid.spread(value.to(dtype), axis) for axis, value in enumerate(values)]
        if own:
            rows = own[0].shape[0]
            seen = [x.expand(*grid.shape, rows, *x.shape[-2:]).movedim(-3, 0) for x in seen]
        lead = seen[0].shape[: 1 if own else 0]
        return torch.cat(seen, dim=-1).reshape(*lead, grid.length, theta.shape[0], slots)

    cos, sin = over_grid([p.cos() for p in parts]), over_grid([p.sin() for p in parts])
    if lrpe.kind == "rotary":
        still = cos[..., : dim % 2]  # the odd channel out does not turn
        cos = torch.cat([cos, cos, torch.ones_like(still)], dim=-1)
        sin = torch.cat([sin, sin, torch.zeros_like(still)], dim=-1)
    if lrpe.prefix:
        front = cos.new_ones(*cos.shape[:-3], lrpe.prefix, *cos.shape[-2:])
        cos, sin = torch.cat([front, cos], dim=-3), torch.cat([0 * front, sin], dim=-3)
    return cos, sin


def key_features(lrpe: Lrpe, dim: int, dtype: torch.dtype) -> Tensor:
    """Factors on an exponentiated key: as `tables`, (..., 2 * dim)."""
    return torch.cat(tables(lrpe, dim, dtype), dim=-1)


def query_features(x: Tensor, lrpe: Lrpe) -> Tensor:
    """`(batch, length, heads, dim)` -> `(batch, length, heads, 2 * dim)`: what reads the memory."""
    cos, sin = tables(lrpe, x.shape[-1], x.dtype)
    if lrpe.kind == "cosine":
        return torch.cat([x * cos, x * sin], dim=-1)
    a = rotate(x, cos, sin)
    return torch.cat([a, -quarter_turn(a)], dim=-1)


def quarter_turn(x: Tensor) -> Tensor:
    """(x1, x2) -> (-x2, x1) for the pairs (j, j + dim // 2); an odd last channel goes to 0."""
    half = x.shape[-1] // 2
    first, second, odd = x.split([half, half, x.shape[-1] % 2], dim=-1)
    return torch.cat([-second, first, torch.zeros_like(odd)], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position encoding: every pair of channels turned by its angle. Keeps the shape."""
    return x * cos + quarter_turn(x) * sin
