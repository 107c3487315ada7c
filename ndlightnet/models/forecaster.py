"""Forecaster: an encoder reads the past of a series, a decoder predicts all later steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from ndlightnet.models.config import recorded
from ndlightnet.models.hub import Pretrained
from ndlightnet.nn.block import Block, init_network
from ndlightnet.nn.cross_block import CrossBlock
from ndlightnet.nn.initial import Device
from ndlightnet.nn.mixers import LightNetAttention
from ndlightnet.nn.mixers.base import Factories, layer_factories
from ndlightnet.ops import frequencies
from ndlightnet.ops.dtypes import check_floats, check_not_wider
from ndlightnet.parallel import refuse_shards

TIME_FEATURES = 4  # of a step, as ndlightnet.data.series has them


class Forecaster(Pretrained):
    """Predict the later values of a series from its input values and the times of all steps, in one pass (Informer,
    Zhou et al. 2021, without its distilling).

    A step is a token: its values, zeros in the later steps, its time features and its position (sinusoidal), embedded
    alike in encoder and decoder. The encoder's blocks read all input steps, not causally. The decoder's read the last
    `label_length` of them and the later steps, causally as in Informer, and the encoder's output. Unlike Informer, each
    column's mean period over the input steps (its mean day for hourly steps and `period=24`; its mean for 1) is
    subtracted from its values and added to the forecast, since the level of a series drifts.

    Args:
        in_chans: columns of the series.
        label_length: input steps that the decoder starts from. If these are all, encoder and decoder count from the
            same step, which matters to mixers with a position code.
        covariates: number of features of a step that are known beforehand, behind those of its time.
        quantiles: what is forecast of each value: fractions in order, 0.5, the median, among them; None: one number.
        period: steps after which the series roughly repeats. The mean is over all whole periods that end with the last
            input step.
        embed_dim, depth, decoder_depth: width and numbers of blocks.
        mixer: as in NDLightNet; the decoder's layers follow the encoder's. cross: likewise, for the decoder's layers to
            read the encoder's output, called with `context`; default: the cross form of `mixer`, or of LightNet
            attention where it has none.
        drop_rate: dropout after the embedding and before the head.
        device, dtype: as in NDLightNet.
    """

    pipeline_tag = "time-series-forecasting"

    @recorded
    def __init__(
        self,
        in_chans: int = 7,
        label_length: int = 336,
        *,
        covariates: int = 0,
        quantiles: Sequence[float] | None = None,
        period: int = 1,
        embed_dim: int = 128,
        depth: int = 2,
        decoder_depth: int = 1,
        mixer: Factories = LightNetAttention,
        cross: Factories | None = None,
        drop_rate: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if label_length < 0:
            raise ValueError(f"label_length={label_length}: expected 0 or more")
        levels = [0.0, *([0.5] if quantiles is None else quantiles), 1.0]
        if 0.5 not in levels or not all(low < high for low, high in pairwise(levels)):
            raise ValueError(f"quantiles={quantiles}: expected fractions above 0 and below 1 in order, 0.5 among them")
        if covariates < 0:
            raise ValueError(f"covariates={covariates}: expected 0 or more")
        if period < 1:
            raise ValueError(f"period={period}: expected 1 or more")
        if embed_dim < 2 or embed_dim % 2:
            raise ValueError(f"embed_dim={embed_dim}: expected an even number")
        if depth < 1 or decoder_depth < 1:
            raise ValueError(f"depth={depth}, decoder_depth={decoder_depth}: expected 1 or more of both")
        layers = depth + decoder_depth
        encoders = layer_factories("mixer", mixer, layers, dims=1, causal=False)[:depth]
        decoders = layer_factories("mixer", mixer, layers, dims=1, causal=True)[depth:]
        # without `dims`: a layer that reads another source mixes nothing locally
        crosses = layer_factories("mixer", mixer, layers, dims=None)[depth:]
        if cross is not None:
            crosses = layer_factories("cross", cross, decoder_depth, dims=None, first=depth)
        self.in_chans, self.label_length, self.period, self.covariates = in_chans, label_length, period, covariates
        self.quantiles = None if quantiles is None else tuple(quantiles)
        self.embed_dim = embed_dim
        self.embed = nn.Linear(in_chans, embed_dim)
        self.embed_time = nn.Linear(TIME_FEATURES + covariates, embed_dim, bias=False)
        self.drop = nn.Dropout(drop_rate)
        self.encoder = nn.ModuleList(Block(embed_dim, factory) for factory in encoders)
        self.encoder_norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.decoder = nn.ModuleList(
            CrossBlock(embed_dim, *pair, fixed=cross is not None) for pair in zip(decoders, crosses, strict=True)
        )
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.head = nn.Linear(embed_dim, in_chans * (len(levels) - 2))
        init_network(self)

    def forward(self, values: Tensor, times: Tensor) -> Tensor:
        """Map values (batch, input_length, in_chans) and times (batch, input_length + horizon, 4 + covariates) to the
        forecast, (batch, horizon, in_chans), or with quantiles (batch, horizon, in_chans, quantiles), in order."""
        refuse_shards("Forecaster")
        check_floats(values=values, times=times)
        check_not_wider(self, values=values, times=times)
        past, horizon = values.shape[1], times.shape[1] - values.shape[1]
        least = max(self.label_length, self.period)
        if values.shape[2] != self.in_chans or least > past or horizon < 1:
            raise ValueError(
                f"values {tuple(values.shape)}, times {tuple(times.shape)}: expected (batch, "
                f"{least} or more, {self.in_chans}) and times of more steps"
            )
        level = self._level(values, horizon)
        x = nn.functional.pad(values - level[:, :past], (0, 0, 0, horizon))
        x = self.embed(x) + self.embed_time(times) + sinusoids(x.shape[1], self.embed_dim, x.device)
        # the residual stream stays in the parameters' precision under autocast
        x = self.drop(x.to(self.norm.weight.dtype))
        source, x = x[:, :past], x[:, past - self.label_length :]
        for block in self.encoder:
            source = block(source)
        source = self.encoder_norm(source)
        for block in self.decoder:
            x = block(x, source)
        out: Tensor = self.head(self.drop(self.norm(x[:, -horizon:])))
        if self.quantiles is None:
            return level[:, past:] + out
        return level[:, past:, :, None] + out.unflatten(-1, (self.in_chans, -1)).sort(-1).values

    def _level(self, values: Tensor, horizon: int) -> Tensor:
        """Return the mean period of the input steps, repeated over them and the later steps."""
        past, period = values.shape[1], self.period
        mean = values[:, past % period :].unflatten(1, (-1, period)).mean(1)
        phase = torch.arange(-past, horizon, device=values.device) % period
        return mean[:, phase]


def sinusoids(length: int, dim: int, device: torch.device) -> Tensor:
    """Return sine and cosine of positions 0, 1, ... at frequencies 10000^(-2j/dim): (length, dim)
    float32 (Vaswani et al. 2017, section 3.5)."""
    position = torch.arange(length, dtype=torch.float32, device=device)
    angles = position[:, None] * frequencies(dim, 1, device=device)[: dim // 2]
    return torch.cat([angles.sin(), angles.cos()], -1)
