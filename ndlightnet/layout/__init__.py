"""Layouts: the grids that the tokens of a batch lie on. Axes, frames, samples and offsets are
defined here only.

Tokens are (batch, length, ...), with a Layout: a Grid, where every row is a sample and all have one
shape, Boxes, where several rows are parts of a sample, a Part, a slab of a grid whose others lie on
other processes, or a Ragged, where the batch is one row that holds samples of any shapes end to end
(a pack; a Spread is one of slabs).
"""

from ndlightnet.layout.base import Layout, per_axis
from ndlightnet.layout.boxes import Boxed, Boxes, draw_boxes
from ndlightnet.layout.exchange import Exchange, Processes
from ndlightnet.layout.grid import Grid
from ndlightnet.layout.pack import Packed, cut_patches, pack, uncut_patches
from ndlightnet.layout.part import Part, add_planes
from ndlightnet.layout.ragged import Lines, Ragged
from ndlightnet.layout.shard import (
    Shard,
    activated,
    is_sharded,
    layout_of,
    layout_of_pack,
    layout_of_tokens,
    shard_grid,
    split_sizes,
)
from ndlightnet.layout.spread import Spread

__all__ = [
    "Boxed",
    "Boxes",
    "Exchange",
    "Grid",
    "Layout",
    "Lines",
    "Packed",
    "Part",
    "Processes",
    "Ragged",
    "Shard",
    "Spread",
    "activated",
    "add_planes",
    "cut_patches",
    "draw_boxes",
    "is_sharded",
    "layout_of",
    "layout_of_pack",
    "layout_of_tokens",
    "pack",
    "per_axis",
    "shard_grid",
    "split_sizes",
    "uncut_patches",
]
