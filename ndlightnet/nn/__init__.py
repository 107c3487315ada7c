"""Layers: tokens in, tokens out."""

from ndlightnet.nn.block import GLU, Block, DropPath
from ndlightnet.nn.embedding import Patchify
from ndlightnet.nn.mixers import Identity, LightNetAttention, SoftmaxAttention
from ndlightnet.nn.multihead import MultiheadAttention
from ndlightnet.nn.position import MDLRPE, MDTPE
from ndlightnet.nn.stem import ConvStem

__all__ = [
    "GLU",
    "MDLRPE",
    "MDTPE",
    "Block",
    "ConvStem",
    "DropPath",
    "Identity",
    "LightNetAttention",
    "MultiheadAttention",
    "Patchify",
    "SoftmaxAttention",
]
