"""Benchmark of training steps on pictures of growing size: one network with LightNet or softmax
attention, a vision transformer and a convolutional network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from ndlightnet.models import NDLightNet
from ndlightnet.nn.mixers import LightNetAttention, SoftmaxAttention, WithLocal
from ndlightnet_evidence import plots
from ndlightnet_evidence.bench.rows import Bench, Case, Cell
from ndlightnet_evidence.bench.step import training
from ndlightnet_evidence.bench.timing import Call
from ndlightnet_evidence.convolutions import SmallImageResNet18

SIDES = (32, 64, 128, 224, 384, 512)
PIXELS = 2**21  # of a batch
PATCH, DIM, DEPTH = 4, 192, 12
NAMES = {
    "ours": ("LightNet + local", plots.BLUE, "-o"),
    "softmax": ("softmax + local, the same network", plots.RED, "-s"),
    "timm": ("timm's ViT-Ti, patches of 4 x 4", plots.ORANGE, "-^"),
    "resnet": ("ResNet-18", plots.GREEN, "-D"),
}


def pictures(bench: Bench, sides: Sequence[int] = SIDES, pixels: int = PIXELS) -> None:
    """Time a step on a batch of about as many pixels for every size: weights in float32, autocast
    to bf16, AdamW. The network has 192 channels, 12 blocks, patches of 4 x 4."""
    network = partial(NDLightNet, 2, 3, 10, patch_size=PATCH, embed_dim=DIM, depth=DEPTH)
    softmax = partial(WithLocal, mixer=partial(SoftmaxAttention, heads=6))
    made: dict[str, Callable[[int], nn.Module]] = {
        "ours": lambda side: network(mixer=partial(LightNetAttention, impl=bench.impl)),
        "softmax": lambda side: network(mixer=softmax),
        "timm": _timm,
        "resnet": lambda side: SmallImageResNet18(),
    }
    for side in sides[: 1 if bench.quick else None]:
        batch = max(1, round(pixels / side**2))
        case = Case(f"pictures, {side} x {side}", batch, (side // PATCH) ** 2, 6, DIM // 6)
        for who, make in made.items():
            prepare = partial(_step, make, (batch, 3, side, side), bench.device)
            bench.measure(case, "fwd+bwd", who, prepare)
        bench.save(bench)


def _step(make: Callable[[int], nn.Module], shape: tuple[int, ...], device: torch.device) -> list[Call]:
    net = make(shape[-1]).to(device).train()
    return [training(net, torch.randn(shape, device=device))[0]]


def _timm(side: int) -> nn.Module:
    import timm

    name = "vit_tiny_patch16_224"
    net: nn.Module = timm.create_model(name, img_size=side, patch_size=PATCH, num_classes=10)
    return net


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Draw microseconds an image over its side."""
    picture = plots.figure(8, 3.8)
    axes = picture.subplots()
    shown = set()
    for who, (label, color, style) in NAMES.items():
        mine = [c for c in cells if c.who == who and c.ms is not None]
        points = sorted((PATCH * round(c.length**0.5), 1e3 * (c.ms or 0) / c.batch) for c in mine)
        shown |= {side for side, _ in points}
        axes.plot(*zip(*points, strict=True), style, label=label, color=color) if points else None
    axes.set(xscale="log", yscale="log", xlabel="pixels a side", ylabel="µs of a step, an image")
    axes.set_xticks(sorted(shown), [str(side) for side in sorted(shown)])
    axes.yaxis.set_major_formatter("{x:g}")
    plots.finish([axes])
    plots.legend(picture, [axes])
    plots.save(picture, path)
