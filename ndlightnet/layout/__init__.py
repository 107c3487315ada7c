"""Layouts: which grids the tokens of a batch lie on. The only room that knows of axes, frames,
samples and offsets.

Tokens are (batch, length, ...) beside a Layout: a Grid, where every row is a sample of one shape,
or a Ragged, where the batch is one row and samples of any shapes lie in it end to end (a pack).
"""

from ndlightnet.layout.base import Layout, per_axis
from ndlightnet.layout.grid import Grid
from ndlightnet.layout.pack import Packed, cut_patches, pack
from ndlightnet.layout.ragged import Lines, Ragged

__all__ = ["Grid", "Layout", "Lines", "Packed", "Ragged", "cut_patches", "pack", "per_axis"]
