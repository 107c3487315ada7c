"""shard_grid: networks that are called within it get slabs of their input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ndlightnet.layout import Grid, Ragged
from ndlightnet.layout.abstract import Shape, check_integers
from ndlightnet.parallel.exchange import Exchange, Processes
from ndlightnet.parallel.slab import Slab, SlabPack, carried_sizes, carry_sizes

SPACE = 16  # numbers of a message on shapes
_active: list[Shard] = []


class Shard:
    """Which slab of all grids this process has, and sums over the slabs.

    sizes: of all slabs along the axis; None: see `layout`.
    """

    def __init__(self, exchange: Exchange, axis: int, sizes: Sequence[int] | None = None) -> None:
        self.exchange, self.axis = exchange, axis
        self.rank, self.count = exchange.rank, exchange.count
        self.sizes = None if sizes is None else tuple(sizes)
        self.wholes: set[Shape] = set()  # that all processes have cut

    def layout(self, x: Tensor, shape: Sequence[int]) -> Slab:
        """Return the layout of a slab of this shape, of input x. A tensor that `slab` has cut
        carries the sizes of all slabs; of others, unless `sizes` names them, the processes exchange
        their shapes in every call: an own shape does not tell whether those of others changed."""
        shape = tuple(shape)
        if not 0 <= self.axis < len(shape):
            raise ValueError(f"shard_grid: axis={self.axis}, expected an axis of {len(shape)}, 0 to {len(shape) - 1}")
        sizes = carried_sizes(x, self.axis)
        if sizes is None:
            sizes = self.sizes
        if sizes is None:
            sizes = self._exchanged_sizes(x, (len(x), *shape))
        if len(sizes) != self.count or sizes[self.rank] != shape[self.axis]:
            raise ValueError(
                f"shard_grid: a slab of {shape} on process {self.rank} of {self.count}, expected "
                f"one of sizes={sizes} along axis {self.axis}"
            )
        return Slab(shape, axis=self.axis, sizes=sizes, exchange=self.exchange)

    def pack(self, x: Tensor, layout: Ragged) -> SlabPack:
        """Return the layout of a pack of slabs, of tokens x."""
        shapes = layout.shapes
        head = torch.tensor([self.axis, layout.ndim, len(shapes)], device=x.device)
        heads = self._rows(head, SPACE)
        if len({*heads}) > 1 or not 0 <= self.axis < layout.ndim:
            raise ValueError(
                f"shard_grid: packs of {[row[2] for row in heads]} samples of "
                f"{[row[1] for row in heads]} axes, along axes {[row[0] for row in heads]}: "
                "expected the same on all processes"
            )
        rows = self._rows(torch.tensor(shapes, device=x.device).flatten())
        grids = [[row[i : i + layout.ndim] for row in rows] for i in range(0, len(rows[0]), layout.ndim)]
        before, after = slice(None, self.axis), slice(self.axis + 1, None)
        if any(
            len({(grid[before], grid[after]) for grid in slabs}) > 1 or not all(grid[self.axis] for grid in slabs)
            for slabs in grids
        ):
            raise ValueError(
                f"shard_grid: slabs of samples {grids}: expected the same sizes on all "
                f"processes but for one above 0 along axis {self.axis}"
            )
        return SlabPack(
            Slab(shape, axis=self.axis, sizes=tuple(grid[self.axis] for grid in slabs), exchange=self.exchange)
            for shape, slabs in zip(shapes, grids, strict=True)
        )

    def _rows(self, row: Tensor, length: int | None = None) -> list[Shape]:
        """Return the int64 tensors (n,) of all processes; with a length they may differ in n, up to
        this length, and are padded with zeros."""
        if length is not None:
            row = torch.nn.functional.pad(row, (0, length - len(row)))
        return [tuple(row) for row in torch.stack(self.exchange.all_gather(row)()).tolist()]

    def _exchanged_sizes(self, x: Tensor, shape: Shape) -> Shape:
        """Return the sizes of all slabs; shape: (batch, *space) of this one."""
        rows = self._rows(torch.tensor([self.axis, *shape], device=x.device), SPACE)
        split = 2 + self.axis
        if len({row[:split] + row[split + 1 :] for row in rows}) > 1 or not all(row[split] for row in rows):
            shapes = "; ".join(str(row[1 : len(shape) + 1]) for row in rows)
            raise ValueError(
                f"shard_grid: slabs (batch, *space) of {shapes} along axes "
                f"{[row[0] for row in rows]}, expected the same but for a size above 0 along the "
                "axis that is split"
            )
        return tuple(row[split] for row in rows)

    def slab(self, x: Tensor, multiple: int = 1, first: int = 2) -> Tensor:
        """Return this process's slab of a tensor that all processes have: as even as multiples of
        `multiple` allow. first: the dimension of x that is axis 0 (2 after batch and channels). The
        slab carries the sizes of all slabs; tensors computed from it do not. All processes call
        this together: of a whole of new shape they compare the shapes, once."""
        dim = first + self.axis
        key = (*x.shape, dim, multiple)
        if key not in self.wholes:
            rows = self._rows(torch.tensor([len(x.shape), *key], device=x.device), SPACE)
            if len({*rows}) > 1:
                shapes = "; ".join(str(row[1 : 1 + row[0]]) for row in rows)
                raise ValueError(f"shard_grid: slabs of tensors of {shapes}, expected the same on all processes")
            self.wholes.add(key)
        sizes = split_sizes(x.shape[dim], self.count, multiple)
        slab = x.narrow(dim, sum(sizes[: self.rank]), sizes[self.rank])
        return carry_sizes(slab, self.axis, sizes)

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over the processes, with its gradient."""
        return self.exchange.total(x)


def split_sizes(size: int, count: int, multiple: int = 1) -> Shape:
    """Return the sizes of `count` slabs of an axis, multiples of `multiple` but for the last."""
    units = -(-size // multiple)
    if units < count:
        raise ValueError(f"an axis of {size}: expected {count} multiples of {multiple} or more, one for each slab")
    ends = [min(size, multiple * (units * (i + 1) // count)) for i in range(count)]
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


@contextmanager
def activated(shard: Shard) -> Iterator[Shard]:
    _active.append(shard)
    try:
        yield shard
    finally:
        _active.pop()


@contextmanager
def shard_grid(group: Any, axis: int = 0, sizes: Sequence[int] | None = None) -> Iterator[Shard]:
    """Within it networks of this library get a slab of their input on each process of a group, and
    see the whole: outputs and gradients are those of one process with the whole input.

    Args:
        group: a torch.distributed process group, or one dimension of a DeviceMesh, `mesh["grid"]`;
            slabs lie in the order of its ranks.
        axis: the axis of the input that is split, 0 for the first one after the channels. Slabs may
            have different sizes, multiples of the patch size (of the product of the strides of a
            U-Net) but for the last. A pack holds a slab of each sample.
        sizes: of the slabs of all inputs along the axis, one for each process, where each process
            loads its own. A slab that the result's `slab` cuts needs none; for others, and packs,
            the processes exchange their shapes in every call, for which a GPU's work is waited for.

    What has a value for each cell or token is returned as a slab, all else as it is for the whole.
    The gradients of parameters are averaged over the processes (DDP, FSDP), so each process takes
    the loss of the whole, such as with `total`:

        with shard_grid(mesh["grid"], axis=0) as grid:
            errors = (model(slab) - target).square()
            loss = grid.total(errors.sum()) / grid.total(errors.new_tensor(errors.numel()))
        loss.backward()

    or the mean over its own slab, if all slabs have one size.
    """
    import torch.distributed as dist

    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ValueError(
                f"shard_grid: a mesh of {group.ndim} dimensions {group.mesh_dim_names}, expected "
                'one of them, such as mesh["grid"]'
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"shard_grid: a group of type {type(group).__name__}, expected a process group or one "
            "dimension of a DeviceMesh"
        )
    if sizes is not None:
        check_integers(1, **{f"sizes[{i}]": size for i, size in enumerate(sizes)})
        if len(sizes) != group.size():
            raise ValueError(f"sizes={sizes}: expected one for each of {group.size()} processes")
    with activated(Shard(Processes(group), axis, sizes)) as shard:
        yield shard


def refuse_shards(what: str) -> None:
    """Raise ValueError within `shard_grid`, where `what` would see a slab as if it were all."""
    if _active:
        raise ValueError(f"{what} within shard_grid: expected an NDLightNet, an NDLightUNet, or their layers")


def is_sharded() -> bool:
    """Return whether this is within `shard_grid`."""
    return bool(_active)


def layout_of(x: Tensor, first: int) -> Grid:
    """Return the layout of an input (..., *space) whose grid begins at dimension `first`: a Grid,
    or within `shard_grid` a Slab."""
    shape = tuple(x.shape[first:])
    return _active[-1].layout(x, shape) if _active else Grid(shape)


def layout_of_pack(x: Tensor, layout: Ragged) -> Ragged:
    """Return the layout of tokens x that lie end to end: within `shard_grid` a SlabPack; ValueError for points."""
    if not layout.ordered:
        refuse_shards("a pack of points")
    return _active[-1].pack(x, layout) if _active else layout


def layout_of_tokens(x: Tensor) -> Grid:
    """Return the layout of tokens (batch, *grid, dim)."""
    return _active[-1].layout(x, x.shape[1:-1]) if _active else Grid.of(x)
