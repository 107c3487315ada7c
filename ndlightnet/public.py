"""The names of the package `ndlightnet`, which gets them all when the first one is used."""

from ndlightnet.layout import Grid, Packed, Ragged, pack
from ndlightnet.models import NDLightDiT, NDLightNet, NDLightUNet, ndlightnet_base, ndlightnet_small, ndlightnet_tiny
from ndlightnet.models.cuda_graphs import Replay
from ndlightnet.nn import MultiheadAttention, mixers
from ndlightnet.nn.mixers import Identity, LightNetAttention, SoftmaxAttention
from ndlightnet.ops import (
    State,
    attention_step,
    axis_causal_attention,
    causal_attention,
    global_attention,
    merge,
    read,
    summarize,
)
from ndlightnet.parallel import shard_grid
from ndlightnet.version import __version__

__all__ = [
    "Grid",
    "Identity",
    "LightNetAttention",
    "MultiheadAttention",
    "NDLightDiT",
    "NDLightNet",
    "NDLightUNet",
    "Packed",
    "Ragged",
    "Replay",
    "SoftmaxAttention",
    "State",
    "__version__",
    "attention_step",
    "axis_causal_attention",
    "causal_attention",
    "global_attention",
    "merge",
    "mixers",
    "ndlightnet_base",
    "ndlightnet_small",
    "ndlightnet_tiny",
    "pack",
    "read",
    "shard_grid",
    "summarize",
]
