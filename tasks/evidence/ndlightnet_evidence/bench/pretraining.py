"""Benchmark of masked pre-training: a step that computes the boxes that are kept, or all tokens."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ndlightnet import NDLightNet
from ndlightnet.layout import draw_boxes
from ndlightnet.models.masked import MaskedDecoder, loss_of_dropped, masked_loss
from ndlightnet_evidence.bench.rows import Bench, Case
from ndlightnet_evidence.bench.step import updates
from ndlightnet_evidence.bench.timing import Call


class Sample(NamedTuple):
    """Samples of a row, and the network for them."""

    name: str
    shape: tuple[int, ...]  # channels, *space
    patch: tuple[int, ...]
    box: int  # tokens along each axis
    dim: int
    depth: int


SAMPLES = (
    Sample("clips", (3, 16, 112, 112), (2, 8, 8), 2, 256, 6),
    Sample("volumes", (1, 64, 64, 64), (4, 4, 4), 4, 256, 8),
    Sample("volumes", (1, 64, 64, 64), (4, 4, 4), 2, 256, 8),
)
TOKENS = {"cuda": 2**19, "cpu": 2**13}  # of a batch
DROPPED = (0.75, 0.9)


def pretraining(bench: Bench, samples: tuple[Sample, ...] = SAMPLES, tokens: int | None = None) -> None:
    """Time steps with AdamW, weights in float32, autocast to bf16, with the default decoder and
    implementation. "all tokens" computes the whole sample, and then forgets what was dropped."""
    for sample in samples[: 1 if bench.quick else None]:
        grid = [n // p for n, p in zip(sample.shape[1:], sample.patch, strict=True)]
        batch = max(1, (tokens or TOKENS[bench.device.type]) // math.prod(grid))
        for dropped in DROPPED:
            name = f"{sample.name}, boxes of {sample.box}, {dropped:.0%} dropped"
            case = Case(name, batch, math.prod(grid), sample.dim // 32, 32)
            make = partial(_prepare, bench, sample, batch, dropped)
            bench.measure(case, "fwd+bwd", "ours", make)
            bench.measure(case, "fwd+bwd", "all tokens", partial(make, whole=True))
        bench.save(bench)


def _prepare(bench: Bench, sample: Sample, batch: int, dropped: float, whole: bool = False) -> list[Call]:
    channels, *space = sample.shape
    net = NDLightNet(
        len(space), channels, num_classes=0, patch_size=sample.patch, embed_dim=sample.dim, depth=sample.depth
    )
    decoder = MaskedDecoder(net)
    both = nn.ModuleList([net, decoder]).to(bench.device)
    x = torch.randn(batch, channels, *space, device=bench.device)
    box = (sample.box,) * len(space)

    def loss() -> Tensor:
        if not whole:
            return masked_loss(net, decoder, x, box, dropped)[0]
        absent = draw_boxes(x, decoder.patch, box, dropped).absent()
        tokens = decoder.embed(net.forward_features(x))
        tokens = torch.where(absent[..., None], decoder.token.to(tokens.dtype), tokens)
        return loss_of_dropped(decoder.predict(tokens), x, absent, decoder.patch)[0]

    return [updates(both, loss)[0]]
