"""Layouts: the grids that the tokens of a batch lie on. Axes, frames, samples and offsets are defined here only.

Tokens are (batch, length, ...), with a Layout: a Grid, where every row is a sample and all have one
shape, Boxes, where several rows are boxes of a sample, or a Ragged, where the batch is one row that
holds samples of any shapes end to end (a pack). Points are packs, and PointRows rows, of tokens at
real coordinates. The slabs of a grid that several processes share are in ndlightnet.parallel.
Operators ask a layout the questions of `Layout` and never which one it is.
"""

from ndlightnet.layout.abstract import Layout, per_axis
from ndlightnet.layout.boxes import Boxed, Boxes, draw_boxes
from ndlightnet.layout.grid import Grid, as_layout
from ndlightnet.layout.pack import Packed, cut_patches, pack, pack_points, uncut_patches
from ndlightnet.layout.points import PointRows, Points
from ndlightnet.layout.ragged import Lines, Ragged

__all__ = [
    "Boxed",
    "Boxes",
    "Grid",
    "Layout",
    "Lines",
    "Packed",
    "PointRows",
    "Points",
    "Ragged",
    "as_layout",
    "cut_patches",
    "draw_boxes",
    "pack",
    "pack_points",
    "per_axis",
    "uncut_patches",
]
