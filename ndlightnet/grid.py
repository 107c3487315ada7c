"""Grid: the shape of a token lattice. The only room that knows about the number of axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor


def per_axis(name: str, value: int | Sequence[int], ndim: int, least: int = 1) -> tuple[int, ...]:
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


@dataclass(frozen=True)
class Grid:
    """Shape of the token lattice, flattened row-major (the last axis runs fastest)."""

    shape: tuple[int, ...]

    @staticmethod
    def of(tokens: Tensor) -> Grid:
        """The grid of tokens `(batch, *grid, dim)`."""
        if tokens.ndim < 3:
            raise ValueError(f"tokens of shape {tuple(tokens.shape)}: expected (batch, *grid, dim)")
        return Grid(tuple(tokens.shape[1:-1]))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def length(self) -> int:
        n = 1
        for size in self.shape:
            n = n * size
        return n

    def flatten(self, x: Tensor) -> Tensor:
        """`(batch, *grid, ...)` -> `(batch, length, ...)`."""
        return x.reshape(x.shape[0], self.length, *x.shape[1 + self.ndim :])

    def flatten_mask(self, mask: Tensor | None) -> Tensor | None:
        """Token mask `(batch, *grid)` bool -> `(batch, length)`."""
        if mask is None:
            return None
        if mask.dtype != torch.bool or tuple(mask.shape[1:]) != self.shape:
            raise ValueError(
                f"mask {tuple(mask.shape)} {mask.dtype}: expected bool (batch, {self.shape})"
            )
        return self.flatten(mask)

    def unflatten(self, x: Tensor) -> Tensor:
        """`(batch, length, ...)` -> `(batch, *grid, ...)`."""
        return x.reshape(x.shape[0], *self.shape, *x.shape[2:])

    def spread(self, values: Tensor, axis: int) -> Tensor:
        """Values along one axis, `(grid[axis], ...)`, as seen by every token: `(*grid, ...)`."""
        view = [1] * self.ndim
        view[axis] = self.shape[axis]
        return values.reshape(*view, *values.shape[1:]).expand(*self.shape, *values.shape[1:])

    def coordinates(self, device: torch.device | str | None = None) -> Tensor:
        """Integer coordinates of every token, `(length, ndim)`, counted from 0."""
        axes = [
            self.spread(torch.arange(size, device=device), axis)
            for axis, size in enumerate(self.shape)
        ]
        return torch.stack(axes, dim=-1).reshape(self.length, self.ndim)

    def lines(self, x: Tensor, axis: int) -> Tensor:
        """`(batch, *grid, dim)` -> `(batch * other axes, grid[axis], dim)`: every line along
        `axis`."""
        return x.movedim(1 + axis, -2).reshape(-1, self.shape[axis], x.shape[-1])

    def unlines(self, lines: Tensor, axis: int) -> Tensor:
        """Inverse of `lines`."""
        rest = self.shape[:axis] + self.shape[axis + 1 :]
        x = lines.reshape(-1, *rest, self.shape[axis], lines.shape[-1])
        return x.movedim(-2, 1 + axis)

    def line(self, x: Tensor, axis: int, back: bool = False) -> Tensor:
        """`(batch, *grid, ...)` -> `(batch, length, ...)`, ordered so that `axis` runs fastest and
        the others as they do row by row; back: from the end."""
        x = x.movedim(1 + axis, self.ndim).flatten(1, self.ndim)
        return x.flip(1) if back else x

    def unline(self, x: Tensor, axis: int, back: bool = False) -> Tensor:
        """Inverse of `line`."""
        rest = self.shape[:axis] + self.shape[axis + 1 :]
        x = (x.flip(1) if back else x).unflatten(1, (*rest, self.shape[axis]))
        return x.movedim(self.ndim, 1 + axis)
