"""Positions of tokens and angles of the slots of their heads, as flat arguments of operators and
kernels: tensors, a string and numbers. Does not need Triton.

A slot (a channel, with rotary a pair) is rotated by theta times the coordinate of its axis; each
axis has one consecutive group of slots. Samples are rows of a batch, which share a grid, or lie end
to end in one row: a pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

# The fields of FlatPosition as arguments in an operator's schema, in the same order
SCHEMA = "Tensor? theta, Tensor? offset, Tensor? splits, Tensor? first, Tensor? shapes, str kind, SymInt[] sizes"
FIELDS = 7
KINDS = {"none": 0, "cosine": 1, "rotary": 2}


class FlatPosition(NamedTuple):
    """Positions of tokens and angles of slots. theta: (heads or 1, slots), radians per step.

    offset: coordinates of the first cell. (1 or batch, 2 axes) int64 if it may be far away: its coordinates, then an
    origin, from which coordinates count in the gradient of theta (0 without an offset). Or (1 or batch, axes) int32 if
    it is near, within the grid or the whole that this is a slab of, with the origin 0.

    splits, first, shapes: of a pack, int32. splits (splits, 5), the longest first: its sample,
    its index among all in order of samples, its first token and the one after the last, and
    the sample's first token. first (samples + 1,): the index of each sample's first split. shapes
    (samples, axes): the grids.

    sizes: tokens in front of the grid, most tokens of a split (of a pack), index of theta's first
    slot among all slots, number of all slots (0: theta has all), the grid's shape (not of a pack).
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
        """All that launches depend on, except the values in tensors."""
        theta, offset, splits, _, shapes, kind, sizes = self
        return (
            kind,
            tuple(sizes),
            theta is not None and theta.shape,
            offset is not None and (offset.shape[0] > 1, offset.dtype),
            splits is not None and shapes is not None and (splits.shape, shapes.shape),
        )

    @property
    def angles(self) -> tuple[Tensor | None, Tensor | None]:
        """theta as a dense float32 tensor, and offset; None if absent."""
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
        """Rows of a memory for each key channel: 2 with angles (cos and sin half), else 1."""
        return 1 if self.kind == "none" else 2

    def width(self, dim: int) -> int:
        """Return the columns of a key tile: channels, or with rotary pairs of channels."""
        return dim // 2 if self.kind == "rotary" else dim

    def samples(self, batch: int) -> int:
        return batch if self.shapes is None else int(self.shapes.shape[0])

    def slots(self, block: slice) -> FlatPosition:
        """Return the FlatPosition of a block of channels, for kind "cosine"."""
        if self.theta is None:
            return self
        prefix, span, _, _, *shape = self.sizes
        sizes = (prefix, span, block.start, int(self.theta.shape[1]), *shape)
        return self._replace(theta=self.theta[:, block], sizes=sizes)


def grid_position(theta: Tensor, offset: Tensor | None, kind: str, prefix: int, shape: Any) -> FlatPosition:
    """Return the FlatPosition of rows that share a grid."""
    return FlatPosition(theta, offset, kind=kind, sizes=(prefix, 0, 0, 0, *shape))


NO_POSITION = FlatPosition()  # of tokens without angles
