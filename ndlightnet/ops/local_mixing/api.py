"""Local mixing of tokens with their neighbours, for samples of one grid and for packs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ndlightnet.layout import Grid, Layout
from ndlightnet.ops.dispatch import Impl, resolve
from ndlightnet.ops.dtypes import accumulator, check_floats
from ndlightnet.ops.empty import empty_result
from ndlightnet.ops.local_mixing import _triton, reference, shifts, sides
from ndlightnet.ops.local_mixing.offsets import Offsets
from ndlightnet.parallel import add_planes


def local_mixing(
    x: Tensor,
    weight: Tensor,
    offsets: Sequence[Sequence[int]],
    *,
    layout: Layout | None = None,
    mask: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Return u_t = sum over i of weight_i * x_(t - offsets_i): a depthwise convolution.

    x: tokens (batch, *grid, dim) on a grid of any number of axes; with a layout (batch, length,
    dim), where the batch of a Ragged is 1 and no tap leaves its sample; taps reach into the slabs beside
    one. What lies outside the grid counts as 0. weight: (taps, dim). offsets: for
    each tap one int per axis; see `star` and `dense`. If no offset is below 0 along the first axis, a token reads no
    later frame. mask: bool (batch, *grid), or (batch, length) with a layout, False where x counts as 0.

    Returns a tensor like x. Sums are float32 or wider; the gradient of weight as well.
    """
    check_floats(x=x, weight=weight)
    grid = Grid.of(x) if layout is None else layout
    taps = check_taps(x, weight, offsets, mask, grid, layout is not None)
    if layout is None:
        mask = grid.flatten_mask(mask)
        flat = local_mixing(grid.flatten(x), weight, taps, layout=grid, mask=mask, impl=impl)
        return grid.unflatten(flat)
    if not grid.joint:

        def alone(grid: Layout, x: Tensor, mask: Tensor | None) -> Tensor:
            return local_mixing(x, weight, taps, layout=grid, mask=mask, impl=impl)

        return grid.map_samples(alone, x, mask)
    if grid.axis is not None:
        return begin_local_mixing(x, weight, taps, layout=grid, mask=mask, impl=impl)()
    chosen = choose(x, weight, grid, impl)
    if x.numel() == 0:
        return empty_result(x, weight)
    if chosen == "triton":
        where = _triton.where(grid, taps, x.device)
        out: Tensor = _triton.mix(x, weight.to(accumulator(x)), mask, *where)
        return out
    if mask is not None:  # even NaN in the padding cannot leak
        x = x.masked_fill(~mask[..., None], 0)
    if chosen == "reference":

        def mix(grid: Grid, x: Tensor) -> Tensor:
            return reference.local_mixing(x, weight, taps, grid)

        return grid.map_samples(mix, x)
    return shifts.mixed(x, weight, taps, grid)


def choose(x: Tensor, weight: Tensor, layout: Layout, impl: Impl) -> str:
    """Return the implementation that mixes tokens (batch, length, dim)."""
    cells = x.reshape(x.shape[0], *[1] * (layout.ndim - 1), layout.length, x.shape[-1])
    return resolve("local_mixing", impl, cells, None, weight)


def begin_local_mixing(
    x: Tensor,
    weight: Tensor,
    offsets: Sequence[Sequence[int]],
    *,
    layout: Layout,
    mask: Tensor | None = None,
    impl: Impl = "auto",
) -> Callable[[], Tensor]:
    """Return, when called, `local_mixing`, where a slab already sends what its neighbours read."""
    if layout.axis is None:
        out = local_mixing(x, weight, offsets, layout=layout, mask=mask, impl=impl)
        return lambda: out
    if mask is not None:
        x = x.masked_fill(~mask[..., None], 0)
    x, add_sides = begin_sides(x, weight, tuple(tuple(o) for o in offsets), layout, impl)
    slab = Grid(layout.shapes[0])
    return lambda: add_sides(local_mixing(x, weight, offsets, layout=slab, impl=impl))


def begin_sides(
    x: Tensor, weight: Tensor, offsets: Offsets, layout: Layout, impl: Impl, channels: slice = slice(None)
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Send what the neighbours of a slab read of some channels of its tokens x (batch, length, dim).

    Return x, for one operator (see `Layout.halo`), and a function that adds, in its place, to the local mixing of the
    slab alone what the neighbours' tokens give to it.
    """
    assert layout.axis is not None
    dim, grid = 1 + layout.axis, Grid(layout.shapes[0])
    along = [offset[layout.axis] for offset in offsets]
    before, after = max(0, *along), max(0, *(-n for n in along))
    products = (
        not torch.compiler.is_compiling()
        and sides.are_products(offsets, layout.axis)
        and choose(x[..., channels], weight, layout, impl) == "triton"
    )
    cells, received = layout.halo(grid.unflatten(x), dim, before, after, channels)

    def beside(planes: Tensor, size: int, first: bool) -> Tensor:
        """Return what planes beside the grid add to its first or last `size` planes: the sum over steps along the axis
        of what taps of so many steps make of the planes that they reach from there."""
        parts = []
        for steps, start, at, count in sides.spans(along, planes.shape[dim], size, first):
            read = planes.narrow(dim, start, count)
            taps, weights = _taps_within(offsets, weight, dim - 1, steps)
            strip = Grid(tuple(read.shape[1:-1]))
            y = strip.unflatten(local_mixing(strip.flatten(read), weights, taps, layout=strip, impl=impl))
            around = (at, size - at - count)
            parts.append(pad(y, [0, 0] * (y.ndim - 1 - dim) + [*around]) if any(around) else y)
        return sum(parts[1:], parts[0]) if parts else planes.narrow(dim, 0, 0)

    def add_sides(y: Tensor) -> Tensor:
        (first, last), shape = received(), (*cells.shape[:-1], y.shape[-1])
        if products:
            return sides.add_products(y, weight.to(accumulator(y)), (first, last), offsets, dim, shape)
        reach = [min(n, shape[dim]) for n in (before, after)]
        return add_planes(y, beside(first, reach[0], True), beside(last, reach[1], False), dim, shape)

    return grid.flatten(cells), add_sides


def _taps_within(offsets: Offsets, weight: Tensor, axis: int, steps: int) -> tuple[list[tuple[int, ...]], Tensor]:
    """Return the taps of so many steps along an axis as taps within a plane, and their weights."""
    chosen = [i for i, offset in enumerate(offsets) if offset[axis] == steps]
    taps = [(*offsets[i][:axis], 0, *offsets[i][axis + 1 :]) for i in chosen]
    starts, ends = [i for i in chosen if i - 1 not in chosen], [i + 1 for i in chosen if i + 1 not in chosen]
    rows = [weight[start:end] for start, end in zip(starts, ends, strict=True)]  # an index would be copied to the GPU
    return taps, rows[0] if len(rows) == 1 else torch.cat(rows)


def local_mixing_step(
    x: Tensor, weight: Tensor, offsets: Sequence[Sequence[int]], state: Tensor, *, layout: Grid, impl: Impl = "auto"
) -> tuple[Tensor, Tensor]:
    """Mix the next frames of a stream, and return them with the next state.

    x: (batch, length, dim), the next frames of `layout`. No offset may be below 0 along the first
    axis. state: (batch, frames, tokens of a frame, dim), the last frames of x before these ones, as
    many as the largest offset along the first axis; zeros before the first frame.
    """
    back = max(offset[0] for offset in offsets)
    tokens = layout.frame().length
    if min(offset[0] for offset in offsets) < 0:
        raise ValueError(f"offsets={offsets}: expected none below 0 along the first axis")
    if state.shape != (len(x), back, tokens, x.shape[-1]):
        raise ValueError(
            f"state {tuple(state.shape)}: expected {(len(x), back, tokens, x.shape[-1])}, the last {back} frames"
        )
    frames = torch.cat([state.to(x.dtype), x.unflatten(1, (layout.frame_count, tokens))], 1)
    longer = layout.longer(back)
    u = local_mixing(frames.flatten(1, 2), weight, offsets, layout=longer, impl=impl)
    return u[:, back * tokens :], frames[:, frames.shape[1] - back :].to(state.dtype)


def check_taps(
    x: Tensor, weight: Tensor, offsets: Sequence[Sequence[int]], mask: Tensor | None, grid: Layout, flat: bool
) -> tuple[tuple[int, ...], ...]:
    """Check the inputs of local mixing, and return the offsets as tuples. flat: tokens are (batch, length, dim)."""
    taps = tuple(tuple(offset) for offset in offsets)
    if not taps or any(len(o) != grid.ndim for o in taps) or len(set(taps)) < len(taps):
        raise ValueError(f"offsets={offsets}: expected one or more, each of {grid.ndim} ints, and none twice")
    if weight.shape != (len(taps), x.shape[-1]):
        raise ValueError(f"weight {tuple(weight.shape)}: expected (taps, dim) = {(len(taps), x.shape[-1])}")
    if flat:
        grid.check_flat(x)
    if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:-1]):
        raise ValueError(f"mask {tuple(mask.shape)} {mask.dtype}: expected bool {tuple(x.shape[:-1])}")
    return taps
