"""Layouts: which grids the tokens of a batch lie on. The only room that knows of axes, frames,
samples and offsets.

Tokens are (batch, length, ...) beside a Layout: a Grid, where every row is a sample of one shape,
or a Ragged, where the batch is one row and samples of any shapes lie in it end to end (a pack).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

Shape = tuple[int, ...]


def per_axis(name: str, value: int | Sequence[int], ndim: int, least: int = 1) -> Shape:
    """Expand an argument given as `int` or one `int` per axis, and check it."""
    values = (value,) * ndim if isinstance(value, int) else tuple(value)
    if len(values) != ndim or any(not isinstance(v, int) or v < least for v in values):
        raise ValueError(f"{name}={value!r}: expected an int >= {least} or {ndim} of them")
    return values


def cut_patches(x: Tensor, patch: Sequence[int]) -> Tensor:
    """Cells `(batch, channels, *space)` -> a row a patch, `(batch, *grid, cells * channels)`.

    Sizes that the patch does not divide are padded with zeros at the end.
    """
    dims = len(patch)
    pad = []
    for size, step in zip(reversed(x.shape[2:]), reversed(patch), strict=True):
        pad += [0, -size % step]
    cut = " ".join(f"(n{a} p{a})" for a in range(dims))
    grid, cells = (" ".join(f"{c}{a}" for a in range(dims)) for c in "np")
    sizes = {f"p{a}": size for a, size in enumerate(patch)}
    x = torch.nn.functional.pad(x, pad)
    return rearrange(x, f"b c {cut} -> b {grid} ({cells} c)", **sizes)


class Layout(ABC):
    """What a Grid and a Ragged have in common. `length`: tokens of a row; `shapes`: the samples'
    grids, (one for all rows, or one after the other); `ndim`: their axes. The first axis is time,
    where a form is causal: a frame is a step of it."""

    ndim: int
    length: int
    shapes: tuple[Shape, ...]
    offset: tuple[int | Tensor, ...] | None = None

    @abstractmethod
    def flatten(self, x: Tensor) -> Tensor:
        """Tokens as users have them, Grid: (batch, *grid, ...), Ragged: (length, ...) -> (batch,
        length, ...), which a Ragged with batch 1 in front takes too."""

    @abstractmethod
    def unflatten(self, x: Tensor) -> Tensor:
        """Inverse of `flatten`."""

    @abstractmethod
    def coordinates(self, device: torch.device | str | None = None) -> Tensor:
        """Coordinates of every token in its sample, (length, ndim) int64, counted from 0."""

    @abstractmethod
    def samples(self, batch: int) -> int:
        """Number of samples of so many rows."""

    @abstractmethod
    def spread_samples(self, values: Tensor) -> Tensor:
        """A row for each sample (samples, ...) -> for its tokens, to be broadcast against (batch,
        length, ...)."""

    @abstractmethod
    def pool(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The mean over the (real) tokens of each sample: (batch, length, dim) -> (samples, dim).
        mask: (batch, length) bool, False = padding."""

    @abstractmethod
    def map_samples(self, function: Callable[..., Tensor], *xs: Tensor | None) -> Tensor:
        """function(grid, *xs) where all samples lie on one grid: at once for a Grid, sample by
        sample for a Ragged. xs and the result: (batch, length, ...), or None."""

    @abstractmethod
    def map_lines(self, function: Callable[[Tensor], Tensor], x: Tensor, axis: int) -> Tensor:
        """`function` of all lines of tokens along an axis, (lines, size, dim) -> same shape; short
        lines have zeros at their ends. x and the result: (batch, length, dim)."""

    def flatten_mask(self, mask: Tensor | None) -> Tensor | None:
        """A token mask, Grid: (batch, *grid), Ragged: (length,) bool -> (batch, length)."""
        if mask is None:
            return None
        flat = self._flat(mask, 0)
        if mask.dtype != torch.bool or flat is None:
            raise ValueError(f"mask {tuple(mask.shape)} {mask.dtype}: expected bool {self._form()}")
        return flat

    def tokens(self, x: Tensor) -> Tensor:
        """Tokens as users have them or (batch, length, dim) -> (batch, length, dim)."""
        flat = self._flat(x, 1)
        if flat is None:
            raise ValueError(
                f"tokens of shape {tuple(x.shape)}: expected {self._form('dim')} of {self}"
            )
        return flat

    @abstractmethod
    def _flat(self, x: Tensor, trailing: int) -> Tensor | None:
        """`flatten`, of what may be flat already and has so many axes behind the tokens; None where
        the shape is another one."""

    @abstractmethod
    def _form(self, *trailing: str) -> str:
        """For messages."""


@dataclass(frozen=True)
class Grid(Layout):
    """Shape of the token lattice, flattened row-major (the last axis runs fastest).

    offset: coordinates of the first token, one per axis, where the grid is a part of a larger one:
    an int, a scalar tensor, or a tensor (batch,) with one for every sample. It belongs to no
    comparison of grids.
    """

    shape: Shape
    offset: tuple[int | Tensor, ...] | None = field(default=None, compare=False)

    @staticmethod
    def of(tokens: Tensor) -> Grid:
        """The grid of tokens `(batch, *grid, dim)`."""
        if tokens.ndim < 3:
            raise ValueError(f"tokens of shape {tuple(tokens.shape)}: expected (batch, *grid, dim)")
        return Grid(tuple(tokens.shape[1:-1]))

    def after(self, frames: int | Tensor) -> Grid:
        """The same grid so many frames later: an int, a scalar tensor, or one for every sample."""
        return replace(self, offset=(frames, *[0] * (self.ndim - 1)))

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self.shape)

    @property
    def shapes(self) -> tuple[Shape, ...]:  # type: ignore[override]
        return (self.shape,)

    @property
    def length(self) -> int:  # type: ignore[override]
        n = 1
        for size in self.shape:
            n = n * size
        return n

    def flatten(self, x: Tensor) -> Tensor:
        """`(batch, *grid, ...)` -> `(batch, length, ...)`."""
        return x.reshape(x.shape[0], self.length, *x.shape[1 + self.ndim :])

    def unflatten(self, x: Tensor) -> Tensor:
        """`(batch, length, ...)` -> `(batch, *grid, ...)`."""
        return x.reshape(x.shape[0], *self.shape, *x.shape[2:])

    def _flat(self, x: Tensor, trailing: int) -> Tensor | None:
        middle = tuple(x.shape[1 : x.ndim - trailing])
        if middle == self.shape:
            return self.flatten(x)
        return x if middle == (self.length,) else None

    def _form(self, *trailing: str) -> str:
        return f"(batch, {', '.join(map(str, (*self.shape, *trailing)))})"

    def coordinates(self, device: torch.device | str | None = None) -> Tensor:
        axes = [
            self.spread(torch.arange(size, device=device), axis)
            for axis, size in enumerate(self.shape)
        ]
        return torch.stack(axes, dim=-1).reshape(self.length, self.ndim)

    def samples(self, batch: int) -> int:
        return batch

    def spread_samples(self, values: Tensor) -> Tensor:
        return values[:, None]

    def pool(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return x.mean(1)
        real = mask[..., None].to(x.dtype)
        return (x * real).sum(1) / real.sum(1).clamp(min=1)

    def map_samples(self, function: Callable[..., Tensor], *xs: Tensor | None) -> Tensor:
        return function(self, *xs)

    def map_lines(self, function: Callable[[Tensor], Tensor], x: Tensor, axis: int) -> Tensor:
        if x.numel() == 0:
            return x
        lines = function(self.lines(self.unflatten(x), axis))
        return self.flatten(self.unlines(lines, axis))

    def spread(self, values: Tensor, axis: int) -> Tensor:
        """Values along one axis, `(grid[axis], ...)`, as seen by every token: `(*grid, ...)`."""
        view = [1] * self.ndim
        view[axis] = self.shape[axis]
        return values.reshape(*view, *values.shape[1:]).expand(*self.shape, *values.shape[1:])

    def lines(self, x: Tensor, axis: int) -> Tensor:
        """`(batch, *grid, dim)` -> `(batch * other axes, grid[axis], dim)`: every line along
        `axis`."""
        return x.movedim(1 + axis, -2).reshape(-1, self.shape[axis], x.shape[-1])

    def unlines(self, lines: Tensor, axis: int) -> Tensor:
        """Inverse of `lines`."""
        rest = self.shape[:axis] + self.shape[axis + 1 :]
        x = lines.reshape(-1, *rest, self.shape[axis], lines.shape[-1])
        return x.movedim(-2, 1 + axis)

    def reorder(self, x: Tensor, axis: int, reverse: bool = False) -> Tensor:
        """`(batch, length, ...)` row by row -> ordered so that `axis` runs fastest and the others
        as they do row by row; reverse: from the end."""
        x = self.unflatten(x).movedim(1 + axis, self.ndim).flatten(1, self.ndim)
        return x.flip(1) if reverse else x

    def restore(self, x: Tensor, axis: int, reverse: bool = False) -> Tensor:
        """Inverse of `reorder`."""
        rest = self.shape[:axis] + self.shape[axis + 1 :]
        x = (x.flip(1) if reverse else x).unflatten(1, (*rest, self.shape[axis]))
        return self.flatten(x.movedim(self.ndim, 1 + axis))


class Lines(NamedTuple):
    """Lines along one axis, of samples of like lengths. table (lines, 3) int32: first token, step
    from token to token, length; `most`: a power of two that no length exceeds."""

    axis: int
    most: int
    table: Tensor


class Ragged(Layout):
    """The shapes of samples that lie end to end in one row: a pack.

    Users have its tokens as (length, ...); sample i has those from offsets[i] to offsets[i + 1],
    row-major. Tables on a device are made once and kept, since every layer needs the same ones.
    """

    def __init__(self, shapes: Iterable[Sequence[int]]) -> None:
        self.shapes = tuple(tuple(int(n) for n in shape) for shape in shapes)
        if not self.shapes or len({len(shape) for shape in self.shapes}) > 1:
            raise ValueError(
                f"shapes={self.shapes}: expected one or more, with the same number of axes"
            )
        self.ndim = len(self.shapes[0])
        self.lengths = tuple(Grid(shape).length for shape in self.shapes)
        self.offsets = (0, *accumulate(self.lengths))
        self.length = self.offsets[-1]
        self._made: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self.shapes)

    def __repr__(self) -> str:
        return f"Ragged({self.shapes})"

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """The result of `make`, kept for the next call with this key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def flatten(self, x: Tensor) -> Tensor:
        return x[None]

    def unflatten(self, x: Tensor) -> Tensor:
        return x[0]

    def _flat(self, x: Tensor, trailing: int) -> Tensor | None:
        lead = tuple(x.shape[: x.ndim - trailing])
        if lead == (self.length,):
            return self.flatten(x)
        return x if lead == (1, self.length) else None

    def _form(self, *trailing: str) -> str:
        return f"({', '.join([str(self.length), *trailing])}{'' if trailing else ','})"

    def coordinates(self, device: torch.device | str | None = None) -> Tensor:
        return torch.cat([Grid(shape).coordinates(device) for shape in self.shapes])

    def samples(self, batch: int) -> int:
        return len(self)

    def spread_samples(self, values: Tensor) -> Tensor:
        return values[self.owners(values.device)][None]

    def pool(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        wide = x[0].to(torch.promote_types(x.dtype, torch.float32))
        if mask is None:
            sizes = self.sizes(x.device)
        else:
            wide = wide * mask[0, :, None]
            sizes = self._sum(mask[0].to(torch.int64))
        return (self._sum(wide) / sizes.clamp(min=1)[:, None]).to(x.dtype)

    def _sum(self, x: Tensor) -> Tensor:
        """(length, ...) -> (samples, ...)."""
        return x.new_zeros(len(self), *x.shape[1:]).index_add(0, self.owners(x.device), x)

    def map_samples(self, function: Callable[..., Tensor], *xs: Tensor | None) -> Tensor:
        parts = [[None] * len(self) if x is None else x.split(self.lengths, 1) for x in xs]
        grids = map(Grid, self.shapes)
        return torch.cat([function(*part) for part in zip(grids, *parts, strict=True)], 1)

    def map_lines(self, function: Callable[[Tensor], Tensor], x: Tensor, axis: int) -> Tensor:
        # a row more, for what lies beyond the ends of lines
        source = torch.cat([x[0], x.new_zeros(1, *x.shape[2:])])
        total = torch.zeros_like(source)
        for group in self.lines(x.device):
            if group.axis == axis:
                first, step, size = group.table.long()[:, :, None].unbind(1)
                at = torch.arange(group.most, device=x.device)
                token = torch.where(at < size, first + at * step, self.length).flatten()
                lines = source.index_select(0, token).unflatten(0, (-1, group.most))
                total = total.index_copy(0, token, function(lines).flatten(0, 1))
        return total[None, :-1]

    def split(self, x: Tensor) -> list[Tensor]:
        """Tokens (length, ...) as samples (1, *shape, ...)."""
        return [
            x[a:b].reshape(1, *shape, *x.shape[1:])
            for (a, b), shape in zip(pairwise(self.offsets), self.shapes, strict=True)
        ]

    def owners(self, device: torch.device) -> Tensor:
        """The sample of every token, (length,) int64."""

        def make() -> Tensor:
            rows = torch.arange(len(self), device=device)
            return rows.repeat_interleave(self.sizes(device), output_size=self.length)

        made: Tensor = self.once(("owners", device), make)
        return made

    def sizes(self, device: torch.device) -> Tensor:
        """Tokens of every sample, (samples,) int64."""
        made: Tensor = self.once(
            ("sizes", device), lambda: torch.tensor(self.lengths, device=device)
        )
        return made

    def frames(self, device: torch.device) -> tuple[Ragged, Tensor, int]:
        """The frames of all samples (steps of the first axis) as samples of their own; where each
        lies in a padded table of frames, sample * most + frame; and `most`, the most of a sample.
        """

        def make() -> tuple[Ragged, Tensor, int]:
            most = max(shape[0] for shape in self.shapes)
            shapes = [(1, *shape[1:]) for shape in self.shapes for _ in range(shape[0])]
            at = [row * most + i for row, shape in enumerate(self.shapes) for i in range(shape[0])]
            return Ragged(shapes), torch.tensor(at, device=device), most

        made: tuple[Ragged, Tensor, int] = self.once(("frames", device), make)
        return made

    def lines(self, device: torch.device) -> list[Lines]:
        """The lines along every axis, in groups of like lengths (at least 16, twice that, ...)."""
        made: list[Lines] = self.once(("lines", device), lambda: self._lines(device))
        return made

    def _lines(self, device: torch.device) -> list[Lines]:
        groups = []
        for axis in range(self.ndim):
            sizes = [max(16, 1 << (shape[axis] - 1).bit_length()) for shape in self.shapes]
            for most in sorted({n for n, size in zip(sizes, self.lengths, strict=True) if size}):
                tables = []
                for row, shape in enumerate(self.shapes):
                    if sizes[row] == most and self.lengths[row]:
                        step = Grid(shape[axis + 1 :]).length
                        first = torch.arange(self.lengths[row] // shape[axis], dtype=torch.int32)
                        first = first // step * (step * shape[axis]) + first % step
                        table = torch.tensor([0, step, shape[axis]], dtype=torch.int32)
                        table = table.repeat(len(first), 1)
                        table[:, 0] = first + self.offsets[row]
                        tables.append(table)
                groups.append(Lines(axis, most, torch.cat(tables).to(device, non_blocking=True)))
        return groups


@dataclass
class Packed:
    """A batch of samples of different shapes, end to end: what NDLightNet takes instead of a
    padded batch and a mask. values: (length, channels), a row for each token; or numbers of words
    (length,)."""

    values: Tensor
    layout: Ragged

    def __len__(self) -> int:
        return len(self.layout)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Packed:
        return Packed(self.values.to(device, non_blocking=non_blocking), self.layout)

    def pin_memory(self) -> Packed:
        return Packed(self.values.pin_memory(), self.layout)

    def unpack(self) -> list[Tensor]:
        """Each sample by itself, (*grid, channels)."""
        return [part[0] for part in self.layout.split(self.values)]


def pack(samples: Iterable[Tensor], patch_size: int | Sequence[int] | None = None) -> Packed:
    """Samples (channels, *space) of any sizes, cut into patches and put end to end.

    patch_size: that of the network. Each sample is padded with zeros to whole patches, as it is
    alone. None: samples are words (length,). A nested tensor is a sequence of samples too.
    """
    samples = list(samples.unbind() if isinstance(samples, Tensor) else samples)
    if not samples:
        raise ValueError("samples=[]: expected one or more")
    if patch_size is None:
        if any(x.ndim != 1 for x in samples):
            raise ValueError("patch_size=None: expected words (length,); cells need a patch_size")
        return Packed(torch.cat(samples), Ragged(x.shape for x in samples))
    dims, channels = samples[0].ndim - 1, samples[0].shape[0]
    for i, x in enumerate(samples):
        if x.ndim != dims + 1 or x.shape[0] != channels or not x.is_floating_point():
            raise ValueError(
                f"samples[{i}] {tuple(x.shape)} {x.dtype}: expected floats (channels={channels}, "
                f"*space) with {dims} axes"
            )
    size = patch_size if isinstance(patch_size, int) else tuple(patch_size)
    patch = per_axis("patch_size", size, dims)
    parts = [cut_patches(x[None], patch)[0] for x in samples]
    layout = Ragged(part.shape[:-1] for part in parts)
    return Packed(torch.cat([part.flatten(0, -2) for part in parts]), layout)
