"""What all mixers have in common, and what those that read tokens one after the other share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import reduce
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from ndlightnet.layout import Grid, Ragged

Scan = Literal["raster", "both", "axes"]


class Mixer(nn.Module):
    """Tokens (batch, *grid, dim) -> same shape, by `forward(x, mask=None, causal=False,
    layout=None)`; see ndlightnet.nn.mixers."""

    @property
    def state_size(self) -> int | None:
        """Numbers that the causal form remembers of one sequence; None where these grow with it."""
        make = getattr(self, "init_state", None)
        if make is None:
            return None
        return sum(x.numel() * (2 if x.is_complex() else 1) for x in make(1))

    def implementation(self, x: Tensor, causal: bool = False) -> str:
        """What forward(x, causal=causal) runs on here and now (dtype, autocast, gradients):
        "torch", or the kernels' name; with the reason where kernels do not run."""
        return "torch"


def check_source(context: Tensor | None, causal: bool, layout: Ragged | None) -> None:
    """A cross form is called with neither `causal` nor `layout`."""
    if context is None:
        return
    if causal:
        raise ValueError("causal=True with a context: a source is read as a whole")
    if layout is not None:
        raise ValueError("layout with a context: expected samples of one shape, or no context")


def check_axes(grid: Grid, source: Grid, remedy: str = "") -> None:
    """Of x and of a context, for a position code in both."""
    if source.ndim != grid.ndim:
        raise ValueError(
            f"context on a grid {source.shape}, x on {grid.shape}: they share coordinates and need "
            f"as many axes{remedy}"
        )


def drawn_like(x: Tensor, *shape: int) -> Tensor:
    """An empty tensor as a projection of x would be: dtype under autocast, gradients."""
    kind = x.device.type
    on = kind != "meta" and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if on else x.dtype
    made = torch.empty(0, *shape, dtype=dtype, device=x.device)
    return made.requires_grad_(torch.is_grad_enabled())


class Past(NamedTuple):
    """What a recurrent mixer knows of the tokens before: the last few of them as they are, and the
    memory."""

    tail: Tensor  # (batch, reach, width)
    memory: Tensor  # (batch, ...)


class Way:
    """One order of a grid's tokens. With a mask those that are seen come first and padding behind
    them, where no recurrence, convolution or shift meets it: a sample is what it is alone."""

    def __init__(self, grid: Grid, axis: int, back: bool, mask: Tensor | None) -> None:
        """axis: the one that runs fastest. back: from the end. mask: bool (batch, *grid)."""
        self.grid, self.axis, self.back, self.place = grid, axis, back, None
        if mask is not None:
            keep = grid.line(mask, axis, back)
            seen, hidden = keep.cumsum(1), (~keep).cumsum(1)
            self.place = torch.where(keep, seen, seen[:, -1:] + hidden) - 1

    def line(self, x: Tensor) -> Tensor:
        """(batch, *grid, ...) -> (batch, length, ...)."""
        x = self.grid.line(x, self.axis, self.back)
        if self.place is None:
            return x
        return torch.empty_like(x).scatter(1, spread(self.place, x), x)

    def unline(self, x: Tensor) -> Tensor:
        """Inverse of `line`."""
        if self.place is not None:
            x = x.gather(1, spread(self.place, x))
        return self.grid.unline(x, self.axis, self.back)


class Recurrent(Mixer, ABC):
    """A mixer that reads tokens one after the other, on a grid of any number of axes.

    scan: how it covers a grid. "raster": row by row, one way (the last axis runs fastest). "both":
    so and back again. "axes": both ways in as many orders as there are axes, in each of which
    another axis runs fastest (2 x axes scans, as in VMamba). The ways share all weights; what they
    read is added up, and a token reads itself once. With causal=True a grid is read row by row, one
    way, whatever `scan` says.

    A subclass gives `project`, `inputs`, `recur`, `output` and `empty`.
    """

    reach = 0  # tokens before a token that `inputs` looks at
    width: int  # channels of `project`'s result

    def __init__(self, scan: Scan) -> None:
        super().__init__()
        if scan not in get_args(Scan):
            raise ValueError(f"scan={scan!r}: expected 'raster', 'both' or 'axes'")
        self.scan = scan

    def project(self, x: Tensor) -> Tensor:
        """What is the same whatever the order: (..., dim) -> (..., width)."""
        return x

    @abstractmethod
    def inputs(self, z: Tensor, keep: Tensor | None) -> Any:
        """Projected tokens in their order (batch, reach + length, width) -> what the recurrence
        takes; its tensors are (batch, length, ...). keep (batch, length) bool, False = padding: it
        lies behind all tokens, so only the last memory, where it is read, has to be kept from it.
        """

    @abstractmethod
    def recur(self, parts: Any, memory: Tensor, own: int) -> tuple[Tensor, Tensor]:
        """(what tokens read (batch, length, ...), the last memory). own: the samples, the first
        ones, whose tokens also read themselves."""

    def join(self, one: Tensor, other: Tensor) -> Tensor:
        """What was read in two ways, together."""
        return one + other

    @abstractmethod
    def output(self, parts: Any, y: Tensor) -> Tensor:
        """What was read, and the inputs of the first way -> (batch, length, dim)."""

    @abstractmethod
    def empty(self, batch: int, device: torch.device | str | None) -> Tensor:
        """The memory before the first token."""

    def forward(
        self, x: Tensor, *, mask: Tensor | None = None, causal: bool = False,
        layout: Ragged | None = None,
    ) -> Tensor:  # fmt: skip
        """Tokens (batch, *grid, dim) -> same shape. mask: bool (batch, *grid), False = padding.
        causal: row by row, one way. layout: of samples end to end (x (length, dim), mask
        (length,)), which are done one after the other."""
        if layout is not None:
            return layout.each(self, x, mask, causal=causal)
        first, y, _, way = self.cover(x, mask, causal)
        return way.unline(self.output(first, y))

    def cover(
        self, x: Tensor, mask: Tensor | None, causal: bool
    ) -> tuple[Any, Tensor, Tensor, Way]:
        """A grid in all its ways: the inputs of the first one, what its tokens read in all of them
        (batch, length, ...), the last memory of each, (ways, batch, ...), and the first way."""
        grid, batch = Grid.of(x), len(x)
        grid.flatten_mask(mask)  # checks it
        ways = [Way(grid, axis, back, mask) for axis, back in self.ways(grid, causal)]
        keep = None
        if mask is not None:  # else NaN in the padding would leak
            x = x.masked_fill(~mask[..., None], 0)
            keep = torch.cat([way.line(mask) for way in ways])
        z = self.project(x)
        # all ways are samples of one batch: as many steps as one way takes
        lines = torch.cat([way.line(z) for way in ways])
        parts = self.inputs(nn.functional.pad(lines, (0, 0, self.reach, 0)), keep)
        y, memory = self.recur(parts, self.empty(len(lines), x.device), own=batch)
        y, memory = (part.unflatten(0, (len(ways), batch)) for part in (y, memory))
        others = zip(y[1:], ways[1:], strict=True)
        reads = [y[0], *(ways[0].line(way.unline(one)) for one, way in others)]
        if isinstance(parts, Tensor):
            first = parts[:batch]
        else:
            first = type(parts)(*(None if part is None else part[:batch] for part in parts))
        return first, reduce(self.join, reads), memory, ways[0]

    def ways(self, grid: Grid, causal: bool) -> list[tuple[int, bool]]:
        """(axis that runs fastest, whether from the end); the first one is row by row."""
        axes = range(grid.ndim - 1, -1, -1) if self.scan == "axes" else [grid.ndim - 1]
        one_way = causal or self.scan == "raster"
        return [(axis, back) for axis in axes for back in (False, True)][: 1 if one_way else None]

    def init_state(
        self, batch: int, device: torch.device | str | None = None, space: tuple[int, ...] = ()
    ) -> Past:
        """What is known before the first token."""
        weight = next(self.parameters())
        tail = torch.zeros(batch, self.reach, self.width, dtype=weight.dtype, device=device)
        return Past(tail, self.empty(batch, device))

    def advance(self, x: Tensor, state: Past, position: int | Tensor) -> tuple[Tensor, Past]:
        """The next frames (batch, frames, *space, dim) of the causal form; to a recurrence it does
        not matter how many came before, `position`."""
        z = self.project(Grid.of(x).flatten(x))
        z = torch.cat([state.tail.to(z.dtype), z], 1)
        parts = self.inputs(z, None)
        y, memory = self.recur(parts, state.memory, own=len(x))
        tail = z[:, z.shape[1] - self.reach :]
        return self.output(parts, y).reshape(x.shape), Past(tail.to(state.tail.dtype), memory)


def once(y: Tensor, own: int, alone: Callable[[slice], Tensor]) -> Tensor:
    """y (batch, ...) without what tokens read of themselves, alone(samples), but for the first
    `own` samples."""
    if own == len(y):
        return y
    others = slice(own, None)
    return torch.cat([y[:own], y[others] - alone(others)])


def short_conv(z: Tensor, weight: Tensor) -> Tensor:
    """Depthwise and causal: z (batch, taps - 1 + length, channels), weight (channels, taps) ->
    (batch, length, channels)."""
    taps = weight.shape[1]
    n = z.shape[1] - taps + 1
    return sum((z[:, i : i + n] * weight[:, i].to(z.dtype) for i in range(1, taps)),
               z[:, :n] * weight[:, 0].to(z.dtype))  # fmt: skip


def spread(tokens: Tensor, x: Tensor) -> Tensor:
    """(batch, length) for all that x (batch, length, ...) has of a token."""
    return tokens.reshape(*tokens.shape, *[1] * (x.ndim - 2)).expand_as(x)


def hide(keep: Tensor | None, *xs: Tensor) -> tuple[Tensor, ...]:
    """(batch, length, ...) with 0 where keep (batch, length) is False."""
    if keep is None:
        return xs
    return tuple(x.masked_fill(~spread(keep, x), 0) for x in xs)


def first_shift(channels: int, dt_min: float, dt_max: float) -> nn.Parameter:
    """(channels,): softplus of it is a step between dt_min and dt_max, its logarithm evenly
    drawn."""
    if not 0 < dt_min <= dt_max:
        raise ValueError(f"dt_min={dt_min}, dt_max={dt_max}: expected 0 < dt_min <= dt_max")
    step = torch.empty(channels).uniform_(math.log(dt_min), math.log(dt_max)).exp()
    return nn.Parameter(step + torch.log(-torch.expm1(-step)))
