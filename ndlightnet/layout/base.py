"""Base class of layouts, and the check of arguments given per axis."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]


def per_axis(name: str, value: int | Sequence[int], ndim: int, least: int = 1) -> Shape:
    """Expand an argument given as `int` or one `int` per axis, and check it."""
    values: tuple[Any, ...] = (value,) * ndim
    if not isinstance(value, Integral):
        values = tuple(value) if isinstance(value, Iterable) else ()
    if len(values) != ndim or any(not isinstance(v, Integral) or v < least for v in values):
        raise ValueError(f"{name}={value!r}: expected an int >= {least} or {ndim} of them")
    return tuple(int(v) for v in values)


def check_integers(least: int, **arguments: Any) -> None:
    """Raise ValueError for an argument, given by its name, that is not an integer >= `least`."""
    for name, value in arguments.items():
        if not isinstance(value, Integral) or value < least:  # type: ignore[operator]
            raise ValueError(f"{name}={value!r}: expected an int >= {least}")


def check_not_empty(space: Sequence[int], x: Tensor) -> None:
    """Raise ValueError for an input of no cells or words; an exported graph does not check."""
    if not torch.compiler.is_exporting() and 0 in space:
        raise ValueError(f"input {tuple(x.shape)}: expected 1 or more cells along each axis")


class Layout(ABC):
    """Base class of Grid and Ragged. `length`: tokens of a row; `shapes`: the samples' grids (one
    for all rows, or one for each sample in order); `ndim`: number of axes. The first axis is time
    in causal forms: a frame is a step of it."""

    ndim: int
    length: int
    shapes: tuple[Shape, ...]
    offset: tuple[int | Tensor, ...] | None = None

    @abstractmethod
    def flatten(self, x: Tensor) -> Tensor:
        """Flatten a user's tokens, Grid: (batch, *grid, ...), Ragged: (length, ...) -> (batch,
        length, ...), where the batch of a Ragged is 1. `tokens` accepts flat ones too."""

    @abstractmethod
    def unflatten(self, x: Tensor) -> Tensor:
        """Inverse of `flatten`."""

    @abstractmethod
    def coordinates(self, device: torch.device | str | None = None) -> Tensor:
        """Return each token's coordinates in its sample, (length, ndim) int64, counted from 0."""

    @abstractmethod
    def samples(self, batch: int) -> int:
        """Return the number of samples in `batch` rows."""

    @abstractmethod
    def spread_samples(self, values: Tensor) -> Tensor:
        """Give every token the row of its sample, (samples, ...) -> a tensor that broadcasts
        against (batch, length, ...)."""

    @abstractmethod
    def pool(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the mean over the tokens of each sample: (batch, length, dim) -> (samples, dim).
        mask: (batch, length) bool, False = padding, which does not count."""

    @abstractmethod
    def map_samples(self, function: Callable[..., Tensor], *xs: Tensor | None) -> Tensor:
        """Call function(grid, *xs) on samples of one grid: once for a Grid, sample by sample for a
        Ragged. xs and the result: (batch, length, ...); each of xs may be None."""

    @abstractmethod
    def map_lines(self, function: Callable[[Tensor], Tensor], x: Tensor, axis: int) -> Tensor:
        """Apply `function`, (lines, size, dim) -> same shape, to all lines of tokens along an axis;
        short lines have zeros at their ends. x and the result: (batch, length, dim)."""

    def flatten_mask(self, mask: Tensor | None) -> Tensor | None:
        """Flatten a bool mask, Grid: (batch, *grid), Ragged: (length,) -> (batch, length)."""
        if mask is None:
            return None
        flat = self._flat(mask, 0)
        if mask.dtype != torch.bool or flat is None:
            raise ValueError(f"mask {tuple(mask.shape)} {mask.dtype}: expected bool {self._form()}")
        return flat

    def tokens(self, x: Tensor) -> Tensor:
        """Return tokens, in the form that `flatten` takes or flat, as (batch, length, dim)."""
        flat = self._flat(x, 1)
        if flat is None:
            raise ValueError(f"tokens of shape {tuple(x.shape)}: expected {self._form('dim')} of {self}")
        return flat

    @abstractmethod
    def _flat(self, x: Tensor, trailing: int) -> Tensor | None:
        """Flatten x unless it is flat already; `trailing` axes follow those of the tokens. Return
        None where the shape does not fit."""

    @abstractmethod
    def _form(self, *trailing: str) -> str:
        """Return the expected shape, for error messages."""
