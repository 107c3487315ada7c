"""PointCompletion: a part of a cloud of points in, what it lacks out."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ndlightnet.layout import Packed, PointRows
from ndlightnet.layout.abstract import check_integers
from ndlightnet.layout.pack import STEPS, pad_rows
from ndlightnet.models.backbone import NDLightNet
from ndlightnet.models.config import recorded
from ndlightnet.models.hub import Pretrained
from ndlightnet.nn.block import init_network
from ndlightnet.nn.cross_block import CrossBlock
from ndlightnet.nn.initial import Device
from ndlightnet.nn.mixers import LightNetAttention
from ndlightnet.nn.mixers.base import Factories, layer_factories
from ndlightnet.ops.recurrence.chunks import exact
from ndlightnet.parallel import refuse_shards

AXES = 3


class PointCompletion(Pretrained):
    """Predict the points that a part of a cloud lacks, as PoinTr does (arXiv 2108.08839): an encoder reads the points,
    each a token at its coordinates, without an order; the mean of its features gives a coarse cloud; its points, at
    their coordinates, are the queries of a decoder that reads the encoder's tokens, and each becomes several points
    around it (PoinTr folds a grid for that, here it is a linear map).

    Args:
        points: number of predicted ones, a multiple of `queries`. queries: points of the coarse cloud.
        embed_dim, depth, decoder_depth: width and numbers of blocks.
        mixer: of encoder and decoder, without an order, as in NDLightNet; default: LightNet attention without local
            mixing. cross: how the decoder reads the encoder's tokens, a mixer with a cross form; default: LightNet
            attention.
        device, dtype: as in NDLightNet.
    """

    @recorded
    def __init__(
        self,
        points: int = 2048,
        queries: int = 256,
        *,
        embed_dim: int = 192,
        depth: int = 4,
        decoder_depth: int = 4,
        mixer: Factories | None = None,
        cross: Factories | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_integers(1, points=points, queries=queries, decoder_depth=decoder_depth)
        if points % queries:
            raise ValueError(f"points={points}: expected a multiple of queries={queries}")
        mixer = partial(LightNetAttention, local=None) if mixer is None else mixer
        self.points, self.queries, self.embed_dim = points, queries, embed_dim
        self.encoder = NDLightNet(
            AXES, AXES, num_classes=0, patch_size=1, embed_dim=embed_dim, depth=depth, mixer=mixer, tpe=False
        )
        self.coarse = nn.Sequential(
            nn.Linear(embed_dim, 2 * embed_dim), nn.SiLU(), nn.Linear(2 * embed_dim, queries * AXES)
        )
        self.embed_point, self.embed_cloud = nn.Linear(AXES, embed_dim), nn.Linear(embed_dim, embed_dim)
        mixers = layer_factories("mixer", mixer, decoder_depth, dims=AXES, causal=False)
        crosses = layer_factories(
            "cross", LightNetAttention if cross is None else cross, decoder_depth, dims=None, first=depth
        )
        self.blocks = nn.ModuleList(
            CrossBlock(embed_dim, *pair, causal=False) for pair in zip(mixers, crosses, strict=True)
        )
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.head = nn.Linear(embed_dim, points // queries * AXES)
        init_network(self.coarse, self.embed_point, self.embed_cloud, *self.blocks, self.head)

    def forward(self, clouds: Packed) -> tuple[Tensor, Tensor]:
        """Map clouds of any sizes, see `pack_points`, to coarse ones of the whole, (batch, queries, 3), and to
        the points that complete them, (batch, points, 3)."""
        refuse_shards("PointCompletion")
        if not isinstance(clouds, Packed) or clouds.layout.ordered:
            raise ValueError(f"clouds of type {type(clouds).__name__}: expected the result of pack_points")
        features = self.encoder.forward_features(clouds)
        pooled = features.layout.pool(features.values[None])
        with exact(pooled):  # 16 bits have no three digits of a coordinate
            coarse = self.coarse(pooled.to(self.norm.weight.dtype)).unflatten(-1, (self.queries, AXES))
            x = self.embed_point(coarse) + self.embed_cloud(pooled.to(coarse.dtype))[:, None]
        lengths, tokens = clouds.layout.lengths, features.unpack()
        context, mask = (torch.stack(tokens), None) if min(lengths) == max(lengths) else pad_rows(tokens)
        places = clouds.layout.token_coordinates(pooled.device).split(lengths)
        source = PointRows.at(pad_sequence([*places], batch_first=True))
        layout = PointRows.at(coarse * STEPS)
        for block in self.blocks:
            x = block(x, context, mask, layout, source)
        with exact(x):
            around = self.head(self.norm(x)).unflatten(-1, (-1, AXES))
        return coarse, (coarse[:, :, None] + around).flatten(1, 2)
