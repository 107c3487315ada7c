"""Mixers that read tokens one after the other, in one or more orders of a grid."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import reduce
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from ndlightnet.layout import Grid
from ndlightnet.nn.initial import Device, Space
from ndlightnet.nn.mixers.base import StreamingMixer, expand_to
from ndlightnet.ops.local_mixing import local_mixing

Scan = Literal["raster", "both", "axes"]


class RecurrentState(NamedTuple):
    """State of a recurrent mixer: the last `lookback` projected tokens, and the memory."""

    tail: Tensor  # (batch, lookback, width)
    memory: Tensor  # (batch, ...)


class Order:
    """One order of a grid's tokens. With a mask real tokens come first and padding behind them,
    where no recurrence, convolution or token shift reads it, so it does not change the result."""

    def __init__(self, grid: Grid, axis: int, reverse: bool, mask: Tensor | None) -> None:
        """axis: the axis that runs fastest. reverse: from the end. mask: bool (batch, length)."""
        self.grid, self.axis, self.reverse = grid, axis, reverse
        self.rank: Tensor | None = None  # index of each token in this order, (batch, length)
        if mask is not None:
            real = grid.reorder(mask, axis, reverse)
            count, hidden = real.cumsum(1), (~real).cumsum(1)
            self.rank = torch.where(real, count, count[:, -1:] + hidden) - 1

    def apply(self, x: Tensor) -> Tensor:
        """Reorder x (batch, length, ...) from row by row to this order."""
        x = self.grid.reorder(x, self.axis, self.reverse)
        if self.rank is None:
            return x
        return torch.empty_like(x).scatter(1, expand_to(self.rank, x), x)

    def undo(self, x: Tensor) -> Tensor:
        """Inverse of `apply`."""
        if self.rank is not None:
            x = x.gather(1, expand_to(self.rank, x))
        return self.grid.restore(x, self.axis, self.reverse)


class Recurrent(StreamingMixer):
    """A mixer that reads tokens one after the other, on a grid of any number of axes.

    scan: how it covers a grid. "raster": row by row, forward (the last axis runs fastest). "both":
    forward and backward. "axes": forward and backward in as many orders as there are axes, in each of which another
    axis runs fastest (2 x axes scans, as in VMamba). All scans share their weights; their outputs are summed, and a
    token reads itself in the first scan only. With causal=True a grid is read row by row, forward, whatever `scan` is.

    A subclass defines `project`, `inputs`, `recur`, `output` and `initial_memory`.
    """

    lookback = 0  # tokens before a token that `inputs` reads
    width: int  # channels of `project`'s result

    def __init__(self, scan: Scan) -> None:
        super().__init__()
        if scan not in get_args(Scan):
            raise ValueError(f"scan={scan!r}: expected 'raster', 'both' or 'axes'")
        self.scan = scan

    def project(self, x: Tensor) -> Tensor:
        """Compute what does not depend on the order: (..., dim) -> (..., width)."""
        return x

    def place(self, z: Tensor, grid: Grid) -> Tensor:
        """Add what depends on tokens' coordinates to what `project` returns, (batch, length, ...)."""
        return z

    @abstractmethod
    def inputs(self, z: Tensor, mask: Tensor | None) -> Any:
        """Map projected tokens in order (batch, lookback + length, width) to the inputs of the
        recurrence, tensors (batch, length, ...). mask: bool (batch, length), False = padding, which
        comes after all tokens: it need only leave the last memory unchanged, where that is read.
        """

    @abstractmethod
    def recur(self, inputs: Any, memory: Tensor, inclusive: int) -> tuple[Tensor, Tensor]:
        """Return what tokens read (batch, length, ...) and the last memory. The tokens of the first
        `inclusive` samples also read themselves."""

    def join(self, one: Tensor, two: Tensor) -> Tensor:
        """Combine what was read in two orders."""
        return one + two

    @abstractmethod
    def output(self, inputs: Any, y: Tensor) -> Tensor:
        """Map inputs in the first order, and what all orders read, to (batch, length, dim)."""

    @abstractmethod
    def initial_memory(self, batch: int, device: Device) -> Tensor:
        """Return the memory before the first token."""

    def mix(self, x: Tensor, layout: Grid, mask: Tensor | None, causal: bool) -> Tensor:
        first, y, _, order = self.read_orders(x, layout, mask, causal)
        return order.undo(self.output(first, y))

    def read_orders(
        self, x: Tensor, grid: Grid, mask: Tensor | None, causal: bool
    ) -> tuple[Any, Tensor, Tensor, Order]:
        """Read a grid in all orders. Return the inputs in the first order, what tokens read in all orders (batch,
        length, ...), the last memory of each order (orders, batch, ...), and the first order."""
        batch = x.shape[0]  # not len(x), which torch.export takes as a constant
        orders = [Order(grid, axis, reverse, mask) for axis, reverse in self.orders(grid, causal)]
        ordered = None
        if mask is not None:  # else NaN in the padding would leak
            x = x.masked_fill(~mask[..., None], 0)
            ordered = torch.cat([order.apply(mask) for order in orders])
        z = self.place(self.project(x), grid)
        # all orders are samples of one batch, which takes as many steps as one order
        lines = torch.cat([order.apply(z) for order in orders])
        inputs = self.inputs(nn.functional.pad(lines, (0, 0, self.lookback, 0)), ordered)
        start = self.initial_memory(lines.shape[0], x.device)
        y, memory = self.recur(inputs, start, inclusive=batch)
        y, memory = (z.unflatten(0, (len(orders), batch)) for z in (y, memory))
        others = zip(y[1:], orders[1:], strict=True)
        reads = [y[0], *(orders[0].apply(order.undo(one)) for one, order in others)]
        if isinstance(inputs, Tensor):
            first = inputs[:batch]
        else:
            first = type(inputs)(*(None if z is None else z[:batch] for z in inputs))
        return first, reduce(self.join, reads), memory, orders[0]

    def orders(self, grid: Grid, causal: bool) -> list[tuple[int, bool]]:
        """Return (axis that runs fastest, whether from the end) of all orders, row by row first."""
        axes = range(grid.ndim - 1, -1, -1) if self.scan == "axes" else [grid.ndim - 1]
        forward_only = causal or self.scan == "raster"
        both = [(axis, reverse) for axis in axes for reverse in (False, True)]
        return both[:1] if forward_only else both

    def init_state(self, batch: int, device: Device = None, space: Space = ()) -> RecurrentState:
        weight = next(self.parameters())
        tail = torch.zeros(batch, self.lookback, self.width, dtype=weight.dtype, device=device)
        return RecurrentState(tail, self.initial_memory(batch, device))

    def step(self, x: Tensor, grid: Grid, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        z = self.place(self.project(x), grid)
        z = torch.cat([state.tail.to(z.dtype), z], 1)
        inputs = self.inputs(z, None)
        y, memory = self.recur(inputs, state.memory, inclusive=x.shape[0])
        tail = z[:, z.shape[1] - self.lookback :].to(state.tail.dtype)
        return self.output(inputs, y), RecurrentState(tail, memory)


def exclude_self(y: Tensor, inclusive: int, self_read: Callable[[slice], Tensor]) -> Tensor:
    """Return y (batch, ...) minus what tokens read of themselves, self_read(samples), except in the
    first `inclusive` samples; in y's dtype, as weights in float32 may widen what they read."""
    if inclusive == y.shape[0]:
        return y
    others = slice(inclusive, None)
    return torch.cat([y[:inclusive], (y[others] - self_read(others)).to(y.dtype)])


def short_conv(z: Tensor, weight: Tensor) -> Tensor:
    """Convolve depthwise and causally: z (batch, taps - 1 + length, channels), weight (channels,
    taps), the last one of the token itself -> (batch, length, channels)."""
    taps = weight.shape[1]
    offsets = [(back,) for back in range(taps - 1, -1, -1)]
    return local_mixing(z, weight.mT, offsets, layout=Grid((z.shape[1],)))[:, taps - 1 :]


@torch.no_grad()
def init_dt_bias(bias: Tensor, dt_min: float, dt_max: float) -> None:
    """Initialise a bias (channels,) whose softplus is a step between dt_min and dt_max, drawn
    uniformly in its logarithm."""
    if not 0 < dt_min <= dt_max:
        raise ValueError(f"dt_min={dt_min}, dt_max={dt_max}: expected 0 < dt_min <= dt_max")
    step = bias.uniform_(math.log(dt_min), math.log(dt_max)).exp()
    bias.copy_(step + torch.log(-torch.expm1(-step)))
