"""Logits of a whole grid, and class probabilities of clips."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def predict_volume(
    net: nn.Module, image: Tensor, window: Sequence[int] | None = None, overlap: float = 0.5
) -> Tensor:
    """Logits `(batch, classes, *space)`, float32, for an image `(batch, channels, *space)`.

    window None: the whole grid in one forward. Otherwise overlapping windows of this shape, blended
    with Gaussian weights (MONAI), for grids that do not fit.
    """
    if window is None:
        out: Tensor = net(image)
        return out.float()
    from monai.inferers.inferer import SlidingWindowInferer

    inferer = SlidingWindowInferer(tuple(window), sw_batch_size=4, overlap=overlap, mode="gaussian")
    blended = inferer(image, net)
    assert isinstance(blended, Tensor)
    return blended.float()


@torch.no_grad()
def predict_clips(net: nn.Module, clips: Tensor) -> Tensor:
    """Class probabilities `(batch, classes)` of videos given as clips `(batch, clips, channels,
    *space)`: the mean over a video's clips."""
    logits = net(clips.flatten(0, 1)).float()
    return torch.softmax(logits, dim=-1).unflatten(0, clips.shape[:2]).mean(dim=1)


@torch.no_grad()
def predict_clips_early(net: Any, clips: Tensor) -> Tensor:
    """Class probabilities `(batch, frames of tokens, classes)` of a causal NDLightNet after each
    frame of its tokens; arguments as in `predict_clips`, which gives the last of them."""
    features = net.forward_features(clips.flatten(0, 1)).float().flatten(2, -2).mean(2)
    count = torch.arange(1, features.shape[1] + 1, device=features.device)
    so_far = features.cumsum(1) / count[:, None]
    odds = torch.softmax(net.head(so_far).float(), dim=-1)
    return odds.unflatten(0, clips.shape[:2]).mean(dim=1)
