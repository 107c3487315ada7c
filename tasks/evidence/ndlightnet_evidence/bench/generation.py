"""Benchmark of a diffusion transformer: a step of training, and a step of sampling."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from ndlightnet.models import NDLightDiT
from ndlightnet.nn.mixers import Identity, LightNetAttention, SoftmaxAttention, WithLocal
from ndlightnet_evidence.bench.rows import Bench, Case
from ndlightnet_evidence.bench.step import updates
from ndlightnet_evidence.bench.timing import Call

SIDES, BATCH, CLASSES = (32, 64, 128), 256, 10  # a batch of 32 x 32 pixels; of larger ones fewer


def generation(bench: Bench, first: int = BATCH, dim: int = 384, depth: int = 12) -> None:
    """Time NDLightDiT, by default S/2, on batches of as many pixels: weights in float32, autocast
    to bf16. "fwd+bwd" is a step of training with AdamW, "fwd" a step of sampling with guidance,
    which calls the network with and without the class."""
    network = partial(NDLightDiT, 2, 3, CLASSES, embed_dim=dim, depth=depth)
    mixer = partial(LightNetAttention, impl=bench.impl)
    rows: dict[str, Callable[[], nn.Module]] = {
        "ours": partial(network, mixer=mixer),
        "without MD-TPE": partial(network, mixer=mixer, tpe=False),
        "without local": partial(network, mixer=partial(mixer, local=None)),
        "softmax": partial(network, mixer=SoftmaxAttention),
        "softmax + local": partial(network, mixer=partial(WithLocal, mixer=SoftmaxAttention)),
        "identity + local": partial(network, mixer=partial(WithLocal, mixer=Identity)),
    }
    for side in SIDES[: 1 if bench.quick else None]:
        batch = max(1, first * SIDES[0] ** 2 // side**2)
        case = Case(f"generation, {side} x {side}", batch, (side // 2) ** 2, dim // 32, 32)
        for who, make in rows.items():
            for direction, call in (("fwd+bwd", _train), ("fwd", _sample)):
                prepare = partial(_prepare, call, make, (batch, 3, side, side), bench.device)
                bench.measure(case, direction, who, prepare)
        bench.save(bench)


def _prepare(
    call: Callable[..., Call], make: Callable[[], nn.Module], shape: tuple[int, ...], device: torch.device
) -> list[Call]:
    net = make().to(device)
    for weight in net.parameters():
        if not weight.any():  # gates and output begin as 0, and products of zeros are faster
            nn.init.normal_(weight, std=0.02)
    x, t = torch.randn(shape, device=device), 1000 * torch.rand(shape[0], device=device)
    return [call(net, x, t, torch.randint(CLASSES, shape[:1], device=device))]


def _train(net: nn.Module, x: Tensor, t: Tensor, y: Tensor) -> Call:
    target = torch.randn_like(x)
    return updates(net, lambda: mse_loss(net(x, t, y).float(), target))[0]


def _sample(net: nn.Module, x: Tensor, t: Tensor, y: Tensor) -> Call:
    net.eval()
    inputs = torch.cat([x, x]), torch.cat([t, t]), torch.cat([torch.full_like(y, CLASSES), y])

    def work() -> None:
        with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
            net(*inputs)

    return work
