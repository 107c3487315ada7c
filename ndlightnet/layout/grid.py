"""Grid layout: samples of one shape, each a row of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ndlightnet.layout.abstract import Layout, Shape


@dataclass(frozen=True)
class Grid(Layout):
    """Shape of the token grid, flattened row-major (the last axis varies fastest).

    offset: coordinates of the first token, one per axis, where the grid is a part of a larger one: an int, a scalar
    tensor, or a tensor (batch,) with one for every sample. Comparisons of grids ignore it.
    """

    shape: Shape
    offset: tuple[int | Tensor, ...] | None = field(default=None, compare=False)

    @staticmethod
    def of(tokens: Tensor) -> Grid:
        """Return the grid of tokens `(batch, *grid, dim)`."""
        if tokens.ndim < 3:
            raise ValueError(f"tokens of shape {tuple(tokens.shape)}: expected (batch, *grid, dim)")
        return Grid(tuple(tokens.shape[1:-1]))

    def after(self, frames: int | Tensor) -> Grid:
        """Return the grid starting at frame `frames`: an int, scalar tensor, or one per sample."""
        return replace(self, offset=(frames, *[0] * (self.ndim - 1)))

    def frame(self) -> Grid:
        """Return the grid of one frame."""
        return Grid(self.shape[1:])

    def strided(self, step: Shape, shape: Shape | None = None) -> Grid:
        """Return the grid whose cells are blocks of `step` cells: of ceil(size / step), or of this shape."""
        return Grid(tuple(-(-n // by) for n, by in zip(self.shape, step, strict=True)) if shape is None else shape)

    def longer(self, frames: int) -> Grid:
        """Return the grid with so many more frames, without an offset."""
        return replace(self, shape=(self.shape[0] + frames, *self.shape[1:]), offset=None)

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self.shape)

    @property
    def shapes(self) -> tuple[Shape, ...]:  # type: ignore[override]
        return (self.shape,)

    @property
    def frame_count(self) -> int:
        """Number of steps of the first axis, which is time in causal forms."""
        return self.shape[0]

    @property
    def length(self) -> int:  # type: ignore[override]
        n = 1
        for size in self.shape:
            n = n * size
        return n

    def flatten(self, x: Tensor) -> Tensor:
        """Reshape `(batch, *grid, ...)` to `(batch, length, ...)`."""
        return x.reshape(x.shape[0], self.length, *x.shape[1 + len(self.shape) :])

    def unflatten(self, x: Tensor) -> Tensor:
        """Reshape `(batch, length, ...)` to `(batch, *grid, ...)`."""
        return x.reshape(x.shape[0], *self.shape, *x.shape[2:])

    def _flat(self, x: Tensor, trailing: int) -> Tensor | None:
        middle = tuple(x.shape[1 : x.ndim - trailing])
        if middle == self.shape:
            return self.flatten(x)
        return x if middle == (self.length,) else None

    def _form(self, *trailing: str) -> str:
        return f"(batch, {', '.join(map(str, (*self.shape, *trailing)))})"

    def coordinates(self, device: torch.device | str | None = None) -> Tensor:
        axes = [self.spread(torch.arange(size, device=device), axis) for axis, size in enumerate(self.shape)]
        return torch.stack(axes, dim=-1).reshape(self.length, self.ndim)

    def samples(self, batch: int) -> int:
        return batch

    def sums(self, x: Tensor) -> Tensor:
        return x.sum(1)

    def token_counts(self, device: torch.device) -> int:
        return self.length

    def spread_samples(self, values: Tensor) -> Tensor:
        return values[:, None]

    def pool(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the mean over the tokens of each sample, as torch sums them in the dtype of x."""
        if mask is None:
            return x.mean(1)
        count = mask.sum(1).clamp(min=1)[:, None]
        return x.masked_fill(~mask[..., None], 0).sum(1) / count

    def map_samples(self, function: Callable[..., Tensor], *xs: Tensor | None) -> Tensor:
        return function(self, *xs)

    def map_lines(self, function: Callable[[Tensor], Tensor], x: Tensor, axis: int) -> Tensor:
        if x.numel() == 0:
            return x
        lines = function(self.lines(self.unflatten(x), axis))
        return self.flatten(self.unlines(lines, axis))

    def spread(self, values: Tensor, axis: int) -> Tensor:
        """Expand values along one axis, `(grid[axis], ...)`, to all tokens: `(*grid, ...)`."""
        view = [1] * self.ndim
        view[axis] = self.shape[axis]
        return values.reshape(*view, *values.shape[1:]).expand(*self.shape, *values.shape[1:])

    def lines(self, x: Tensor, axis: int) -> Tensor:
        """Return every line along `axis`: `(batch, *grid, dim)` -> `(batch * other axes, grid[axis], dim)`."""
        return x.movedim(1 + axis, -2).reshape(-1, self.shape[axis], x.shape[-1])

    def unlines(self, lines: Tensor, axis: int) -> Tensor:
        """Inverse of `lines`."""
        rest = self.shape[:axis] + self.shape[axis + 1 :]
        x = lines.reshape(-1, *rest, self.shape[axis], lines.shape[-1])
        return x.movedim(-2, 1 + axis)

    def reorder(self, x: Tensor, axis: int, reverse: bool = False) -> Tensor:
        """Reorder row-major tokens `(batch, length, ...)` so that `axis` varies fastest and the
        other axes stay in row-major order; reverse: also reverse the result."""
        x = self.unflatten(x).movedim(1 + axis, self.ndim).flatten(1, self.ndim)
        return x.flip(1) if reverse else x

    def restore(self, x: Tensor, axis: int, reverse: bool = False) -> Tensor:
        """Inverse of `reorder`."""
        rest = self.shape[:axis] + self.shape[axis + 1 :]
        x = (x.flip(1) if reverse else x).unflatten(1, (*rest, self.shape[axis]))
        return self.flatten(x.movedim(self.ndim, 1 + axis))


def as_layout(layout: Layout | Shape | int) -> Layout:
    """Return a layout: the one given, or that of a grid of this shape, or of so many frames."""
    if isinstance(layout, tuple):
        return Grid(layout)
    return Grid((layout,)) if isinstance(layout, int) else layout
