"""What all layouts have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Shape = tuple[int, ...]


def per_axis(name: str, value: int | Sequence[int], ndim: int, least: int = 1) -> Shape:
    """Expand an argument given as `int` or one `int` per axis, and check it."""
    values = (value,) * ndim if isinstance(value, int) else tuple(value)
    if len(values) != ndim or any(not isinstance(v, int) or v < least for v in values):
        raise ValueError(f"{name}={value!r}: expected an int >= {least} or {ndim} of them")
    return values


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
        length, ...), where the batch of a Ragged is 1. `tokens` takes flat ones too."""

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
