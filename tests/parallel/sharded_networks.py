"""Networks, inputs and axes that several processes share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ndlightnet import Identity, NDLightNet, NDLightUNet, mixers
from ndlightnet.parallel import split_sizes


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of a sample: channels, *space
    multiple: int = 2  # slabs are multiples of it
    masked: bool = False
    words: int = 0  # the vocabulary of a language model

    @property
    def axes(self) -> list[int]:
        """All axes where there is a mask, else the first and the last one."""
        axes = range(1 if self.words else len(self.shape) - 1)
        return [*axes] if self.masked else sorted({0, axes[-1]})


def _net(dims: int, patch: int = 2, depth: int = 2, **how: object) -> Callable[[], nn.Module]:
    channels = 3 if dims < 3 else 1
    small = {"patch_size": patch, "embed_dim": 32, "depth": depth, "tpe_states": 8}
    return partial(NDLightNet, dims, channels, 5, **small, **how)


def _mixer(**how: object) -> partial:
    return partial(mixers.LightNetAttention, **how)


_hybrid: dict[str, Any] = {"convs": (1, 1, 0), "depths": (0, 0, 1), "size": "hybrid", "deep_supervision": True}

# sizes that nothing divides; with two, three and four slabs these are uneven
CASES: dict[str, Case] = {
    "signal": Case(_net(1), (3, 22)),
    "image": Case(_net(2), (3, 12, 15)),
    "image, masked": Case(_net(2), (3, 12, 15), masked=True),
    "image, dense taps on the input": Case(_net(2, mixer=_mixer(local="both", radius=2, dense=True)), (3, 16, 18)),
    "volume": Case(_net(3), (1, 12, 9, 13)),
    "volume, masked": Case(_net(3), (1, 12, 9, 13), masked=True),
    "volume, rotary, no MD-TPE": Case(_net(3, tpe=False, mixer=_mixer(lrpe="rotary")), (1, 9, 8, 9)),
    "volume, no position code": Case(_net(3, mixer=_mixer(lrpe=None, local=None)), (1, 9, 8, 9)),
    "volume, identity with local mixing": Case(_net(3, mixer=partial(mixers.WithLocal, mixer=Identity)), (1, 9, 8, 9)),
    "series": Case(_net(4, patch=1, depth=1), (1, 4, 5, 4, 4), 1),
    "text": Case(partial(NDLightNet, 1, vocab_size=11, embed_dim=32, depth=2, causal=True), (21,), 1, words=11),
    "video, causal": Case(_net(3, causal=True), (1, 14, 16, 15)),
    "video, causal, masked": Case(_net(3, causal=True), (1, 14, 16, 15), masked=True),
    "video, windows that forget": Case(_net(3, causal=True, mixer=_mixer(window=3, forget=0.1)), (1, 13, 9, 9)),
    "signal, causal, forgets": Case(_net(1, causal=True, mixer=_mixer(forget=[0.1])), (3, 23)),
    "signal, causal, window": Case(_net(1, causal=True, mixer=_mixer(window=5)), (3, 23)),
    "U-Net M": Case(partial(NDLightUNet, 3, 1, 3, widths=(8, 8, 16)), (1, 11, 8, 10), 4),
    "U-Net, hybrid": Case(partial(NDLightUNet, 3, 1, 3, widths=(8, 16, 32), **_hybrid), (1, 12, 9, 8), 4),
    "U-Net, images": Case(partial(NDLightUNet, 2, 3, 3, widths=(8, 16), mixer=_mixer(radius=2)), (3, 18, 17)),
    "U-Net, series": Case(partial(NDLightUNet, 4, 1, 3, widths=(8, 16)), (1, 8, 9, 8, 8)),
    "U-Net, causal series": Case(partial(NDLightUNet, 4, 1, 3, widths=(8, 16), causal=True), (1, 8, 9, 8, 8)),
}

# cases that two processes take in float32, too: one of each kind of network
FLOAT32 = ("volume, masked", "video, windows that forget", "text", "U-Net, hybrid")


def slab(x: Tensor, dim: int, multiple: int = 1) -> Tensor:
    sizes = split_sizes(x.shape[dim], dist.get_world_size(), multiple)
    return x.split(sizes, dim)[dist.get_rank()]


def error_of(actual: Tensor, expected: Tensor, largest: Tensor) -> float:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    assert actual.isfinite().all() and expected.isfinite().all()  # NaN would get lost in a maximum of errors
    return ((actual - expected).abs().max() / largest.abs().max()).item()


def gradients(net: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradients of all parameters, zeros where there is none, and delete them."""
    loss.backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in net.named_parameters()}
    net.zero_grad()
    return grads


def gradient_error(actual: dict[str, Tensor], expected: dict[str, Tensor], mean: bool = True) -> float:
    """Return the largest error relative to the largest gradient: of the mean over the processes, or of each."""
    assert actual.keys() == expected.keys()
    flat, exact = (torch.cat([grad.flatten() for grad in grads.values()]) for grads in (actual, expected))
    if mean:
        dist.all_reduce(flat)
        flat = flat / dist.get_world_size()
    return error_of(flat, exact, exact)
