"""The models of the table models x doors: small ones, at a traced size and at others."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet import MultiheadAttention, NDLightNet, NDLightUNet, mixers

WORDS = 50


@dataclass(frozen=True)
class Case:
    """A model, and the sizes it is tried at: the first one is the traced one."""

    name: str
    make: partial[nn.Module]
    sizes: tuple[tuple[int, ...], ...]
    takes: str = "cells"  # or "words" (batch, length), "tokens" (batch, length, dim), used thrice
    channels: int = 3

    @property
    def mixer(self) -> Any:
        """The class of a case "mixer GLA", else None."""
        return self.make.keywords.get("mixer")

    @property
    def is_layer(self) -> bool:
        return self.make.func is MultiheadAttention

    @property
    def is_unet(self) -> bool:
        return self.make.func is NDLightUNet

    def inputs(self, at: int = 0, batch: int = 2) -> tuple[Tensor, ...]:
        """Return random inputs of the model, of size number `at`."""
        size = self.sizes[at]
        if self.takes == "words":
            return (torch.randint(WORDS, (batch, *size)),)
        if self.takes == "tokens":
            return (torch.randn(batch, *size, self.channels),) * 3
        return (torch.randn(batch, self.channels, *size),)


def output(model: Any, *inputs: Tensor) -> Tensor:
    """Return the output of a model, of attention layers without their weights."""
    y = model(*inputs)
    out: Tensor = y[0] if isinstance(y, tuple) else y
    return out


# one block has every part, and graphs of half the size
net = partial(NDLightNet, num_classes=5, embed_dim=32, depth=1, tpe_states=8)
image = partial(net, 2, patch_size=4)
LAYER = "MultiheadAttention"
LENGTHS = ((90,), (30,), (256,), (257,), (801,), (4000,))
IMAGES = ((30, 41), (8, 8), (33, 300), (257, 100), (260, 512), (40, 999))
VOLUMES = ((9, 8, 10), (4, 5, 6), (150, 4, 8), (3, 130, 9), (5, 6, 161), (131, 7, 133))
TEXTS = ((40,), (8,), (64,), (65,), (200,), (4300,))
VIDEOS = ((8, 8, 10), (4, 5, 6), (30, 20, 8), (3, 13, 9), (150, 6, 6), (9, 8, 8))
PICTURES = ((22, 27), (8, 8), (33, 300), (257, 100), (150, 141), (40, 401))
SCANS = ((9, 10, 11), (8, 8, 8), (140, 9, 12), (9, 150, 10), (7, 15, 160), (21, 22, 23))
TOKENS = ((20,), (7,), (64,), (65,), (130,), (16,))
hybrid = partial(NDLightUNet, 3, 3, 4, widths=(8, 16, 16), convs=(1, 1, 0), depths=(0, 0, 1), size="hybrid")
models = [
    Case("NDLightNet, 1 axis", partial(net, 1, patch_size=4), LENGTHS),
    Case("NDLightNet, 2 axes", image, IMAGES),
    Case("NDLightNet, 3 axes", partial(net, 3, patch_size=2), VOLUMES),
    Case("causal text", partial(net, 1, num_classes=None, vocab_size=WORDS, causal=True), TEXTS, "words"),
    Case("causal video", partial(net, 3, patch_size=2, causal=True), VIDEOS),
    Case("NDLightUNet, 2 axes", partial(NDLightUNet, 2, 3, 4, widths=(8, 16), depths=(0, 1)), PICTURES),
    Case("NDLightUNet, 3 axes", hybrid, SCANS),
    Case(LAYER, partial(MultiheadAttention, 32, 4, batch_first=True), TOKENS, "tokens", 32),
    *(Case(f"mixer {m.__name__}", partial(image, mixer=m), IMAGES) for m in (mixers.GLA, mixers.Mamba)),
    Case("mixer SoftmaxAttention", partial(image, mixer=mixers.SoftmaxAttention), IMAGES),
]
CASES = {case.name: case for case in models}
# one of a kind: global attention with MD-TPE, the causal scan, convolutions, padding and heads, a recurrence
KINDS = {"NDLightNet, 1 axis", "causal text", "NDLightUNet, 2 axes", LAYER, "mixer Mamba"}
