"""Logits of a whole grid, and class probabilities of clips."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet.inference.windows import parts


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
    for one in image.as_subclass(Tensor):
        logits = torch.empty(0)
        for corner, part in parts(net, one, window, overlap, halo, one):
            if not len(logits):
                logits = part.new_empty(len(part), *one.shape[1:])
            box = (slice(a, a + n) for a, n in zip(corner, part.shape[1:], strict=True))
            logits[(slice(None), *box)] = part
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
    odds = torch.softmax(net.head(so_far).float(), dim=-1)
    return odds.unflatten(0, clips.shape[:2]).mean(dim=1)
