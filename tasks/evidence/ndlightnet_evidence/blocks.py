"""LightNet with a memory in blocks, on a grid of any number of axes: an experiment.

The grid is cut into blocks. A block's tokens read a mixture of the memories of all blocks, in which
a memory's weight is learnt for the offset between the blocks (after MHLA, arXiv 2601.07832, where
it is a matrix over the blocks of one fixed grid):

    o_t = (sum_b w(block of t - b) N_b / sum_b w(block of t - b) z_b)^T SiLU(q_t),
    w(d) = prod_a exp(L_a(d_a)),

with memories N_b and sums z_b of the blocks' States. A weight multiplies both, as adding
log w to the State's maximum does; with equal weights this is global attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet.layout import Grid, Layout
from ndlightnet.nn.mixers import LightNetAttention
from ndlightnet.ops import Position, State, read, summarize
from ndlightnet.ops.lightnet.state import decay, tile
from ndlightnet.ops.recurrence.chunks import exact


def to_blocks(x: Tensor, grid: Grid, sizes: Sequence[int]) -> Tensor:
    """Cut tokens (batch, length, ...) into blocks of these sizes: (batch * blocks, tokens of a
    block, ...). Zeros are added at the end of axes that they do not divide."""
    x = grid.unflatten(x)
    for axis, (length, size) in enumerate(zip(grid.shape, sizes, strict=True)):
        more = x.new_zeros(*x.shape[: axis + 1], -length % size, *x.shape[axis + 2 :])
        x = torch.cat([x, more], axis + 1).unflatten(axis + 1, (-1, size))
        x = x.movedim(axis + 2, 1 + grid.ndim + axis)  # behind all axes of blocks
    return x.flatten(0, grid.ndim).flatten(1, grid.ndim)


def from_blocks(x: Tensor, grid: Grid, sizes: Sequence[int]) -> Tensor:
    """Inverse of `to_blocks`, without what it added."""
    x = x.unflatten(1, tuple(sizes)).unflatten(0, (-1, *counts(grid, sizes)))
    for axis in reversed(range(grid.ndim)):
        x = x.movedim(1 + grid.ndim + axis, axis + 2).flatten(axis + 1, axis + 2)
        x = x.narrow(axis + 1, 0, grid.shape[axis])
    return grid.flatten(x)


def counts(grid: Grid, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the number of blocks along each axis."""
    return tuple(-(-length // size) for length, size in zip(grid.shape, sizes, strict=True))


def mixed(states: State, blocks: Sequence[int], logs: Tensor, causal: bool) -> State:
    """Merge the States of blocks (batch * blocks, heads, ·) with weights into one for each block.

    logs: (axes, heads, 2 reach + 1), L_a for offsets -reach to reach of a block to the one that it
    reads; larger offsets count as reach. causal: blocks later along the first axis are not read.
    """
    top, total, memory = (x.unflatten(0, (-1, *blocks)) for x in states)
    axes = tuple(range(1, 1 + len(blocks)))
    most = top.amax(axes, keepdim=True)
    scale = decay(top, most)
    rows = memory.shape[-2]
    parts = [scale * total, tile(scale, rows, -1)[..., None] * memory]
    for axis, count in enumerate(blocks):
        weight = weights(logs[axis], count, causal and axis == 0).to(total.dtype)
        parts = [along(weight, x, axis + 1, len(blocks) + 1) for x in parts]
    total, memory = (x.flatten(0, len(blocks)) for x in parts)
    return State(most.expand_as(top).flatten(0, len(blocks)), total, memory)


def weights(logs: Tensor, count: int, causal: bool) -> Tensor:
    """Return the weights (heads, count, count) with which blocks along an axis read each other."""
    reach = logs.shape[-1] // 2
    at = torch.arange(count, device=logs.device)
    offset = at[:, None] - at
    found = logs[:, offset.clamp(-reach, reach) + reach].exp()
    return torch.where(offset < 0, 0, found) if causal else found


def along(weight: Tensor, x: Tensor, axis: int, heads: int) -> Tensor:
    """Multiply x along an axis by weight (heads, count, count); `heads`: the axis of heads."""
    x = x.movedim((heads, axis), (0, 1))
    return (weight @ x.flatten(2)).view(x.shape).movedim((0, 1), (heads, axis))


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, grid: Grid, sizes: Sequence[int], logs: Tensor, *,
    mask: Tensor | None = None, lrpe: Position | None = None, causal: bool = False,
    impl: Any = "auto",
) -> Tensor:  # fmt: skip
    """Attend as the module says. q, k, v (batch, length, heads, dim); mask (batch, length).

    With causal=True a block is one step along the first axis.
    """
    if causal and sizes[0] != 1:
        raise ValueError(f"sizes={tuple(sizes)}: expected blocks of one step along the first axis")
    blocks, batch = counts(grid, sizes), len(q)
    if mask is None and any(n % s for n, s in zip(grid.shape, sizes, strict=True)):
        mask = torch.ones(batch, grid.length, dtype=torch.bool, device=q.device)
    q, k, v = (to_blocks(x, grid, sizes) for x in (q, k, v))
    mask = None if mask is None else to_blocks(mask, grid, sizes)
    if lrpe is not None:
        first = Grid(blocks).coordinates(q.device).repeat(batch, 1)  # of each block
        offset = tuple(first[:, axis] * size for axis, size in enumerate(sizes))
        lrpe = lrpe._replace(layout=Grid(tuple(sizes), offset))
    states = summarize(k, v, mask=mask, lrpe=lrpe, impl=impl)
    with exact(k):
        merged = mixed(states, blocks, logs, causal)
    return from_blocks(read(q, merged, lrpe=lrpe, impl=impl), grid, sizes)


class BlockAttention(LightNetAttention):
    """LightNetAttention whose memory is in blocks.

    block: tokens of a block along each axis; causal: 1 along the first one. reach: the largest
    offset between blocks with a weight of its own. Weights start as exp(-|offset|). dims: number of
    axes. others: as in LightNetAttention. There is no stream and no pack of samples.
    """

    ragged = False
    undecayed = ("logs",)

    def __init__(
        self, dim: int, heads: int | None = None, *, dims: int, block: int = 7, reach: int = 3,
        **others: Any,
    ) -> None:  # fmt: skip
        super().__init__(dim, heads, **others)
        self.block = block
        start = -torch.arange(-reach, reach + 1).abs().float()
        self.logs = nn.Parameter(start.repeat(dims, self.heads, 1))

    def mix(self, x: Tensor, layout: Layout, mask: Tensor | None, causal: bool) -> Tensor:
        if not isinstance(layout, Grid):
            raise ValueError("layout: expected samples of one shape")
        q, k, v, gate = self._project(x, x)
        sizes = [1 if causal and axis == 0 else min(self.block, length)
                 for axis, length in enumerate(layout.shape)]  # fmt: skip
        y = block_attention(
            q, k, v, layout, sizes, self.logs, mask=mask, causal=causal, impl=self.impl,
            lrpe=self.lrpe(layout) if self.lrpe else None,
        )  # fmt: skip
        return self._output(y, gate)
