"""Masked pre-training: a network sees some boxes of a sample, a light decoder predicts the rest.

After He et al. (2022, arXiv 2111.06377), on any number of axes. The tokens that are dropped are not
computed: the network's attention merges the States of the boxes that are left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet.layout import Boxed, Grid, cut_patches, draw_boxes, uncut_patches
from ndlightnet.models.backbone import NDLightNet
from ndlightnet.nn.block import Block, init_network
from ndlightnet.nn.initial import Initialized, reset
from ndlightnet.nn.mixers import LightNetAttention
from ndlightnet.nn.position import MDTPE

# patches whose spread is well below this fraction of their sample's are noise, such as that of a
# still background or of air; normalised as the others they would be most of what is learnt
STILL = 0.2


@dataclass(frozen=True)
class Reconstruction:
    """Samples in which what was dropped is predicted, computed when it is asked for.

    predicted: (batch, *grid, cells * channels), the normalised patches; target: the patches as they
    are; mean, spread: (batch, *grid, 1), what these are normalised by; absent: (batch, *grid),
    which tokens were dropped; patch: cells of a token along each axis.
    """

    predicted: Tensor
    target: Tensor
    mean: Tensor
    spread: Tensor
    absent: Tensor
    patch: tuple[int, ...]

    @property
    def cells(self) -> Tensor:
        """Samples (batch, channels, *space); dropped patches get the mean and spread they had."""
        undone = self.predicted * self.spread + self.mean
        patches = torch.where(self.absent[..., None], undone, self.target)
        return uncut_patches(patches, self.patch).movedim(-1, 1)  # patches hold channels last

    @property
    def explained(self) -> Tensor:
        """Fraction of the variance within the dropped patches, normalised, that is predicted (a
        scalar): 0 for the mean of each patch."""
        normal = (self.target - self.mean) / self.spread
        absent = self.absent[..., None]
        errors = ((self.predicted - normal).square() * absent).sum()
        return 1 - errors / (normal.square() * absent).sum().clamp(min=1e-6)

    @property
    def dropped(self) -> Tensor:
        """Which cells were dropped, (batch, *space) bool."""
        dropped = self.absent
        for axis, size in enumerate(self.patch):
            dropped = dropped.repeat_interleave(size, 1 + axis)
        return dropped


class MaskedDecoder(Initialized):
    """Predict the cells of dropped tokens from the features of the boxes that were kept.

    Features become `dim` wide, a learnt token stands for every dropped one, and MD-TPE and `depth`
    blocks see the whole grid. A linear map of each token gives its patch.

    Args:
        net: the NDLightNet whose features these are. It is not part of the decoder.
        dim, depth: width and number of blocks.
    """

    def __init__(self, net: NDLightNet, dim: int = 96, depth: int = 2) -> None:
        super().__init__()
        if net.causal or net.vocab_size is not None:
            raise ValueError("net: expected a network of cells that is not causal")
        embed: Any = net.embed
        self.patch, self.in_chans = embed.patch, net.in_chans
        mixer = partial(LightNetAttention, dims=net.dims)

        self.embed = nn.Linear(net.embed_dim, dim)
        self.token = nn.Parameter(torch.empty(dim))
        self.tpe = MDTPE(net.dims, dim, states=32)
        self.blocks = nn.ModuleList(Block(dim, mixer) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, math.prod(self.patch) * net.in_chans)
        init_network(self)
        self.reset_own()

    def reset_own(self) -> None:
        nn.init.normal_(self.token, std=0.02)

    def reset_parameters(self) -> None:
        """Initialise all parameters as the constructor does."""
        reset(self)
        init_network(self)

    def forward(self, features: Tensor, boxed: Boxed) -> Tensor:
        """Map features (rows, *box, embed_dim) of kept boxes to patches of the whole grid, (batch,
        *grid, cells * channels), which are normalised each."""
        tokens = self.embed(features).flatten(1, -2)
        return self.predict(boxed.spread(tokens, self.token))

    def predict(self, x: Tensor) -> Tensor:
        """Map tokens of the whole grid (batch, *grid, dim) to patches."""
        layout = Grid.of(x)
        x = self.tpe(layout.flatten(x), None, layout)
        for block in self.blocks:
            x = block(x, None, False, layout)
        return self.head(self.norm(layout.unflatten(x)))


def masked_loss(
    net: NDLightNet,
    decoder: MaskedDecoder,
    x: Tensor,
    box: int | tuple[int, ...],
    dropped: float,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Reconstruction]:
    """Return the mean squared error of the dropped patches, and the reconstruction.

    A patch is normalised by its mean and by sqrt(its variance + (0.2 of its sample's standard
    deviation)^2): patches in which next to nothing happens count little.

    Args:
        x: samples (batch, channels, *space).
        box, dropped, generator: as in ndlightnet.layout.draw_boxes.
    """
    boxed = draw_boxes(x, decoder.patch, box, dropped, generator)
    predicted = decoder(net.forward_features(boxed), boxed)
    return loss_of_dropped(predicted, x, boxed.absent(), decoder.patch)


def loss_of_dropped(
    predicted: Tensor, x: Tensor, absent: Tensor, patch: tuple[int, ...]
) -> tuple[Tensor, Reconstruction]:
    """Return what `masked_loss` does, of the patches (batch, *grid, cells * channels) predicted
    for samples x, of which the tokens `absent` (batch, *grid) were dropped."""
    predicted, target, x = predicted.float(), cut_patches(x, patch).float(), x.float()
    var, mean = torch.var_mean(target, -1, keepdim=True, correction=0)
    sample = x.var(tuple(range(1, x.ndim)), correction=0).view(-1, *[1] * (var.ndim - 1))
    spread = (var + STILL**2 * sample + 1e-6).sqrt()
    errors = (predicted - (target - mean) / spread).square().mean(-1)
    loss = (errors * absent).sum() / absent.sum()
    return loss, Reconstruction(predicted.detach(), target, mean, spread, absent, patch)
