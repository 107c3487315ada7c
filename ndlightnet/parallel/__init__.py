"""Grids whose slabs lie on several processes, or are computed in turn on one device: slabs are layouts, which
exchange what operators ask a layout for. Collectives are called here only."""

from ndlightnet.parallel.exchange import Exchange, Processes, in_a_row
from ndlightnet.parallel.shard import (
    Shard,
    activated,
    is_sharded,
    layout_of,
    layout_of_pack,
    layout_of_tokens,
    refuse_shards,
    shard_grid,
    split_sizes,
)
from ndlightnet.parallel.slab import Slab, SlabPack, add_planes

__all__ = [
    "Exchange",
    "Processes",
    "Shard",
    "Slab",
    "SlabPack",
    "activated",
    "add_planes",
    "in_a_row",
    "is_sharded",
    "layout_of",
    "layout_of_pack",
    "layout_of_tokens",
    "refuse_shards",
    "shard_grid",
    "split_sizes",
]
