"""Boxes layout: parts of samples, such as those that masked pre-training leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ndlightnet.layout.abstract import per_axis
from ndlightnet.layout.grid import Grid


@dataclass(frozen=True)
class Boxes(Grid):
    """Boxes of one shape: each row of tokens is a box, and `count` rows in turn are one sample.

    What acts along lines or on neighbours (MD-TPE, local mixing) stays within a box; attention
    reads all boxes of a sample, at the coordinates that `offset`, one for each row, says.
    """

    count: int = 1

    @property
    def shared(self) -> bool:  # type: ignore[override]
        return self.count > 1

    def samples(self, batch: int) -> int:
        return batch // self.count

    def merge(self, state: Any) -> Callable[[], Any]:
        kind = type(state)
        merged = kind(*(x.unflatten(0, (-1, self.count)) for x in state)).merged(1)
        return lambda: kind(*(x.repeat_interleave(self.count, 0) for x in merged))

    def before(self, state: Any, after: Callable[[], Any], window: int | None, forget: Any) -> Any:
        if self.shared:
            raise ValueError(f"{self}: its rows are boxes of samples, expected whole samples in a causal form")
        return state

    def total(self, sums: Tensor) -> Tensor:
        return sums.unflatten(0, (-1, self.count)).sum(1)

    def join(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, self.count)).flatten(1, 2)

    def divide(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.count, -1)).flatten(0, 1)

    def token_counts(self, device: torch.device) -> int:
        return self.count * self.length

    def spread_samples(self, values: Tensor) -> Tensor:
        return values.repeat_interleave(self.count, 0)[:, None]

    def pool(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return Grid((self.count * self.length,)).pool(self.join(x), None if mask is None else self.join(mask))


@dataclass
class Boxed:
    """Boxes of cells, which NDLightNet takes instead of whole samples.

    values: (samples * count, channels, *cells of a box). layout: of the tokens. numbers: (samples, count) int64, which
    boxes of the sample's grid of boxes these are, in row-major order. boxes: that grid.
    """

    values: Tensor
    layout: Boxes
    numbers: Tensor
    boxes: Grid

    def spread(self, x: Tensor, fill: Tensor) -> Tensor:
        """Lay out tokens (samples * count, box length, dim) on the whole grid, (samples, *grid,
        dim), with `fill` (dim,) in the boxes that are not there."""
        samples, count = self.numbers.shape
        length, dim = self.layout.length, x.shape[-1]
        grid = fill.to(x.dtype).expand(samples, self.boxes.length, length, dim)
        at = self.numbers[..., None, None].expand(samples, count, length, dim)
        grid = grid.scatter(1, at, x.reshape(samples, count, length, dim))
        return _join(grid, self.boxes.shape, self.layout.shape)

    def absent(self) -> Tensor:
        """Return which tokens are not there: (samples, *grid) bool."""
        shape = len(self.numbers), self.boxes.length
        none = torch.ones(shape, dtype=torch.bool, device=self.numbers.device)
        none = none.scatter(1, self.numbers, False)[..., None, None]
        tokens = none.expand(-1, -1, self.layout.length, 1)
        return _join(tokens, self.boxes.shape, self.layout.shape)[..., 0]


def _join(x: Tensor, boxes: Sequence[int], box: Sequence[int]) -> Tensor:
    """Lay out (batch, boxes, length, ...) as (batch, *grid, ...)."""
    n = len(boxes)
    x = x.reshape(len(x), *boxes, *box, *x.shape[3:])
    order = [axis for a in range(n) for axis in (1 + a, 1 + n + a)]
    x = x.permute(0, *order, *range(1 + 2 * n, x.ndim))
    grid = [a * b for a, b in zip(boxes, box, strict=True)]
    return x.reshape(len(x), *grid, *x.shape[1 + 2 * n :])


def draw_boxes(
    x: Tensor, patch: Sequence[int], box: int | Sequence[int], dropped: float, generator: torch.Generator | None = None
) -> Boxed:
    """Keep random boxes of samples (batch, channels, *space), other ones of each sample.

    Args:
        patch: cells of a token. box: tokens of a box, an int or one per axis; space is a multiple
            of patch * box along each axis.
        dropped: fraction of the boxes that is dropped; one at least stays, and one is dropped.
        generator: for the draws, on the device of x; default: torch's own.
    """
    dims = x.ndim - 2
    box = per_axis("box", box, dims)
    cells = [p * b for p, b in zip(patch, box, strict=True)]
    space = tuple(x.shape[2:])
    if any(n % c or not n for n, c in zip(space, cells, strict=True)):
        raise ValueError(
            f"samples of {space}: expected multiples of {tuple(cells)}, boxes of {box} tokens of {tuple(patch)} cells"
        )
    boxes = Grid(tuple(n // c for n, c in zip(space, cells, strict=True)))
    if boxes.length < 2 or not 0 < dropped < 1:
        raise ValueError(
            f"dropped={dropped} of {boxes.length} boxes: expected a fraction between 0 and 1, of 2 boxes or more"
        )
    count = min(max(1, round((1 - dropped) * boxes.length)), boxes.length - 1)
    draws = torch.rand(len(x), boxes.length, generator=generator, device=x.device)
    numbers = draws.argsort(1)[:, :count].sort(1).values
    split = x.reshape(*x.shape[:2], *(n for pair in zip(boxes.shape, cells, strict=True) for n in pair))
    order = [0, *range(2, 2 + 2 * dims, 2), 1, *range(3, 3 + 2 * dims, 2)]
    all_boxes = split.permute(order).flatten(1, dims)  # (batch, boxes, channels, *cells)
    index = numbers.reshape(*numbers.shape, *[1] * (dims + 1))
    values = all_boxes.gather(1, index.expand(-1, -1, *all_boxes.shape[2:])).flatten(0, 1)
    corner = boxes.coordinates(x.device)[numbers.flatten()]
    offset = tuple(corner[:, axis] * size for axis, size in enumerate(box))
    return Boxed(values, Boxes(box, offset, count), numbers, boxes)
