"""Logits of a whole grid, and class probabilities of clips."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet.inference.windows import tiles


@torch.no_grad()
def predict_volume(net: nn.Module, image: Tensor, window: Sequence[int] | None = None, overlap: float = 0.5) -> Tensor:
    """Return logits `(batch, classes, *space)`, float32, of an image `(batch, channels, *space)`.

    window None: the whole grid in one forward. Otherwise overlapping windows of this shape, blended
    with Gaussian weights, for grids that do not fit in memory.
    """
    if window is None:
        out: Tensor = net(image)
        return out.float()
    halo, images = [0] * (image.ndim - 2), []
    for sample in image.as_subclass(Tensor):
        logits = torch.empty(0)
        for corner, tile in tiles(net, sample, window, overlap, halo, sample):
            if not len(logits):
                logits = tile.new_empty(len(tile), *sample.shape[1:])
            box = (slice(a, a + n) for a, n in zip(corner, tile.shape[1:], strict=True))
            logits[(slice(None), *box)] = tile
        images.append(logits)
    return torch.stack(images)


@torch.no_grad()
def predict_clips(net: nn.Module, clips: Tensor) -> Tensor:
    """Return class probabilities `(batch, classes)` of videos given as clips `(batch, clips,
    channels, *space)`: the mean over a video's clips."""
    logits = net(clips.flatten(0, 1)).float()
    return torch.softmax(logits, dim=-1).unflatten(0, clips.shape[:2]).mean(dim=1)


@torch.no_grad()
def predict_clips_early(net: Any, clips: Tensor) -> Tensor:
    """Return class probabilities `(batch, frames of tokens, classes)` of a causal NDLightNet after
    each frame of its tokens; arguments as in `predict_clips`, which returns the last of them."""
    features = net.forward_features(clips.flatten(0, 1)).float().flatten(2, -2).mean(2)
    count = torch.arange(1, features.shape[1] + 1, device=features.device)
    so_far = features.cumsum(1) / count[:, None]
    probs = torch.softmax(net.head(so_far).float(), dim=-1)
    return probs.unflatten(0, clips.shape[:2]).mean(dim=1)
