"""Where tokens lie and how fast the slots of their heads turn: the one description of it that
crosses torch.library and that kernels read. Free of Triton.

A slot's angle is theta times the coordinate of its axis; slots are in one consecutive group per
axis. Samples are rows of a batch, which share a grid, or lie end to end in one row: a pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

# How an operator's schema says it, in the order of Position's fields
SCHEMA = (
    "Tensor? theta, Tensor? offset, Tensor? splits, Tensor? first, Tensor? shapes, str kind, "
    "SymInt[] sizes"
)
FIELDS = 7
KINDS = {"none": 0, "cosine": 1, "rotary": 2}


class Position(NamedTuple):
    """theta: (heads or 1, slots), radians per step.

    offset, coordinates of the first cell: (1 or batch, 2 axes) int64, where it may be far away: its
    coordinates, then an origin, from which coordinates count in the gradient of theta (0 without an
    offset); or (1 or batch, axes) int32, near: not beyond the length, with the origin 0.

    splits, first, shapes: of a pack, int32. splits (parts, 5), the longest part first: its sample,
    its place among all parts in order of samples, its first token and the one after the last, and
    the sample's first token; first (samples + 1,): the first part of each sample; shapes (samples,
    axes): grids.

    sizes: tokens in front of the grid, most tokens of a part (of a pack), the first slot of theta
    among all slots and the number of all (0: theta has all), and the grid's shape (not of a pack).
    """

    theta: Tensor | None = None
    offset: Tensor | None = None
    splits: Tensor | None = None
    first: Tensor | None = None
    shapes: Tensor | None = None
    kind: str = "none"
    sizes: Sequence[int] = (0, 0, 0, 0)

    @property
    def key(self) -> tuple[Any, ...]:
        """All that launches depend on, but for the numbers in tensors."""
        theta, offset, splits, _, shapes, kind, sizes = self
        return (
            kind, tuple(sizes), theta is not None and theta.shape,
            offset is not None and (offset.shape[0] > 1, offset.dtype),
            splits is not None and shapes is not None and (splits.shape, shapes.shape),
        )  # fmt: skip

    @property
    def angles(self) -> tuple[Tensor | None, Tensor | None]:
        """theta, float32 and dense, and offset."""
        theta = self.theta
        return None if theta is None else theta.float().contiguous(), self.offset

    @property
    def prefix(self) -> int:
        return self.sizes[0]

    @property
    def span(self) -> int:
        return self.sizes[1]

    @property
    def shape(self) -> Sequence[int]:
        return self.sizes[4:]

    @property
    def halves(self) -> int:
        """Rows of a memory for each key channel: a cos and a sin half, or one."""
        return 1 if self.kind == "none" else 2

    def width(self, dim: int) -> int:
        """Columns of a key tile: channels, or pairs of them."""
        return dim // 2 if self.kind == "rotary" else dim

    def samples(self, batch: int) -> int:
        return batch if self.shapes is None else int(self.shapes.shape[0])

    def slots(self, block: slice) -> Position:
        """For a block of channels of kind "cosine"."""
        if self.theta is None:
            return self
        prefix, span, _, _, *shape = self.sizes
        sizes = (prefix, span, block.start, int(self.theta.shape[1]), *shape)
        return self._replace(theta=self.theta[:, block], sizes=sizes)


def grid(theta: Tensor, offset: Tensor | None, kind: str, prefix: int, shape: Any) -> Position:
    """Of rows that share a grid."""
    return Position(theta, offset, kind=kind, sizes=(prefix, 0, 0, 0, *shape))
