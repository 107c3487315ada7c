"""Base class of layouts, and the check of arguments given per axis."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]
# returns what was received, and waits for it if necessary; is called once
Future = Callable[[], list[Tensor]]


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


def exporting() -> bool:
    """Return whether torch.export traces: torch.compiler.is_exporting, which torch 2.11 takes for true in all that
    torch.compile traces."""
    return torch.compiler._is_exporting_flag


def check_not_empty(space: Sequence[int], x: Tensor) -> None:
    """Raise ValueError for an input of no cells or words; an exported graph does not check."""
    if not exporting() and 0 in space:
        raise ValueError(f"input {tuple(x.shape)}: expected 1 or more cells along each axis")


class Layout(ABC):
    """Where the tokens of a batch lie. `length`: tokens of a row; `shapes`: the samples' grids (one
    for all rows, or one for each sample in order); `ndim`: number of axes. The first axis is time
    in causal forms: a frame is a step of it.

    Operators ask a layout the questions below and never which one it is. The answers here are those
    of rows that hold whole samples.
    """

    ndim: int
    length: int
    shapes: tuple[Shape, ...]
    offset: tuple[int | Tensor, ...] | None = None
    count: int = 1  # rows in turn that are one sample
    axis: int | None = None  # the axis that is cut into slabs, along which `halo` has more tokens
    start: Shape | None = None  # of a slab: coordinates of its first token in the whole
    shared: bool = False  # whether other rows or slabs have tokens of a row's sample
    packed: bool = False  # whether samples of any shapes lie end to end in one row
    ordered: bool = True  # whether tokens lie on grids; else they are points at any coordinates
    joint: bool = True  # whether operators take all samples at once; else by `map_samples`

    @property
    def whole(self) -> Layout:
        """The layout of whole samples."""
        return self

    # -------------------------------------------------------------------------- questions
    def merge(self, state: Any) -> Callable[[], Any]:
        """Return, when called, the State (ndlightnet.ops.State) of all that a sample has, from that of each row
        (batch, ...); a slab already sends its own."""
        return lambda: state

    def before(self, state: Any, after: Callable[[], Any], window: int | None, forget: Any) -> Any:
        """Return the State before the first frame: `state`, a stream's, or that of earlier slabs.
        after: returns the State after the row's frames, from none before them."""
        return state

    def total(self, sums: Tensor) -> Tensor:
        """Return the sums over whole samples (samples, ...), from those of `sums`."""
        return sums

    def halo(
        self, x: Tensor, dim: int, before: int, after: int, channels: slice = slice(None)
    ) -> tuple[Tensor, Future]:
        """Return x, and, when called, the `before` steps before it along its dimension `dim`, which
        is `axis`, and the `after` steps behind it, of some channels: none at the ends of a grid."""
        raise ValueError(f"{self}: expected a layout with an axis that is cut, nothing lies beyond its edges")

    def map_channels(
        self, function: Callable[[Layout, slice | None, Tensor, Tensor | None], Tensor], x: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Call function(layout, channels, x, mask) on whole lines of tokens along all axes: with
        all channels (None), or on a slab with some channels of the whole grid. x and the result:
        (batch, length, dim), mask: (batch, length)."""
        return function(self, None, x, mask)

    def join(self, x: Tensor) -> Tensor:
        """Join the tokens of each sample's rows: (batch, length, ...) -> (samples, tokens, ...)."""
        return x

    def divide(self, x: Tensor) -> Tensor:
        """Inverse of `join`."""
        return x

    def draw(self, *shape: int, device: torch.device) -> Tensor:
        """Return uniform random numbers (samples, ...), the same for all of a sample."""
        return torch.rand(shape, device=device)

    def table(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, cached under this key, about samples of different shapes;
        None where all rows have one shape."""
        return None

    # ----------------------------------------------------------------------------- tokens
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

    def token_coordinates(self, device: torch.device) -> Tensor | None:
        """Return the coordinates of tokens that cannot be told axis by axis, (length, ndim), or (batch, length, ndim)
        of each row, on a device; None for tokens that fill a grid."""
        return None

    @abstractmethod
    def samples(self, batch: int) -> int:
        """Return the number of samples in `batch` rows."""

    @abstractmethod
    def sums(self, x: Tensor) -> Tensor:
        """Return the sums over the tokens (batch, length, dim) of each sample that are in the row."""

    @abstractmethod
    def spread_samples(self, values: Tensor) -> Tensor:
        """Give every token the row of its sample, (samples, ...) -> a tensor that broadcasts
        against (batch, length, ...)."""

    @abstractmethod
    def token_counts(self, device: torch.device) -> int | Tensor:
        """Return the number of tokens of all samples, or of each, (samples, 1) int64, 1 or more."""

    def pool(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the mean over the tokens of each sample: (batch, length, dim) -> (samples, dim). mask: (batch, length)
        bool, False = padding, which does not count. Sums are float32 or wider."""
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        if mask is None:
            return (self.total(self.sums(exact)) / self.token_counts(x.device)).to(x.dtype)
        keep = mask[..., None]
        sums = [self.sums(exact.masked_fill(~keep, 0)), self.sums(keep.to(torch.int64)).to(exact.dtype)]
        sums, counts = self.total(torch.cat(sums, 1)).split([x.shape[-1], 1], 1)
        return (sums / counts.clamp(min=1)).to(x.dtype)

    @abstractmethod
    def map_samples(self, function: Callable[..., Tensor], *xs: Tensor | None) -> Tensor:
        """Call function(grid, *xs) on samples of one grid: once for a Grid, for a Ragged once for all
        samples of a shape. xs and the result: (batch, length, ...); each of xs may be None."""

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

    def check_flat(self, x: Tensor) -> None:
        """Raise ValueError unless x is (batch, length, dim)."""
        if x.ndim != 3 or x.shape[1] != self.length:
            raise ValueError(f"x {tuple(x.shape)}: expected (batch, {self.length}, dim) of {self}")

    @abstractmethod
    def _flat(self, x: Tensor, trailing: int) -> Tensor | None:
        """Flatten x unless it is flat already; `trailing` axes follow those of the tokens. Return
        None where the shape does not fit."""

    @abstractmethod
    def _form(self, *trailing: str) -> str:
        """Return the expected shape, for error messages."""
