"""Which parts of a sample decided a classifier's answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from ndlightnet.training.core.report import panels_of, save_figure

WINDOWS, AT_ONCE = 64, 8  # of a sample; in a batch
BARS = 16  # rows in the picture of a signal of one channel
FRAMES, COLUMNS = 6, 6  # of a video; of the picture
STRONG = 0.6  # opacity of the strongest cell
RIGHT, WRONG = "#1a7f37", "#cf222e"


def attribution(net: Callable[[Tensor], Tensor], x: Tensor, label: int) -> Tensor:
    """Return how much each part of a sample (channels, *space) speaks for a class, by occlusion
    (Zeiler and Fergus, 2014, arXiv 1311.2901): (*space) float32.

    A window, in all channels, becomes 0, which is the mean of normalised data. What the class's
    logit loses by that is the value of its cells, the mean over the windows that hold a cell: above
    0 for the class, below 0 against it. Windows are twice as large as the steps between them, of
    which there are about WINDOWS in all.
    """
    from captum.attr import Occlusion  # here, as a training does not need it

    space = x.shape[1:]
    count = min(16, round(WINDOWS ** (1 / len(space))))  # along each axis
    steps = [max(1, math.ceil(n / count)) for n in space]
    windows = [min(2 * step, n) for step, n in zip(steps, space, strict=True)]
    with torch.no_grad():
        found: Tensor = Occlusion(net).attribute(
            x[None], (len(x), *windows), (len(x), *steps), baselines=0, target=label, perturbations_per_eval=AT_ONCE
        )
    return found[0, 0].float()


def views(picture: Tensor, heat: Tensor, video: bool = False) -> list[tuple[np.ndarray, Any]]:
    """Return pairs of a picture (height, width, 3) from 0 to 1 and of its part of `heat` (height,
    width).

    picture: (1 or 3 channels, *space) uint8; heat: (*space). An image is itself; a volume has three
    slices, those of most heat where it is bright; a video has FRAMES of its frames, evenly spaced;
    of a signal (channels, length) the channels are the rows.
    """
    cells, heat = picture.float().cpu() / 255, heat.cpu()
    if heat.ndim == 1:
        rows = cells[None] if len(cells) > 1 else cells[None].expand(-1, BARS, -1)
        return [_pair(rows, heat.expand(rows.shape[1], -1))]
    if heat.ndim == 2:
        return [_pair(cells, heat)]
    if video:
        shown = torch.linspace(0, len(heat) - 1, min(FRAMES, len(heat))).round().long().tolist()
        return [_pair(cells[:, t], heat[t]) for t in shown]
    weight, pairs = heat.abs() * (1 + cells.mean(0)), []
    for axis in range(3):
        others = [other for other in range(3) if other != axis]
        at = int(weight.sum(others).argmax())
        pairs.append(_pair(cells.select(axis + 1, at), heat.select(axis, at)))
    return pairs


def _pair(cells: Tensor, heat: Tensor) -> tuple[np.ndarray, Any]:
    return cells.expand(3, -1, -1).permute(1, 2, 0).numpy(), heat.numpy()


def overlaid(view: np.ndarray, heat: np.ndarray, most: float) -> np.ndarray:
    """Return the grey `view` (height, width, 3) under red, where `heat` (height, width) is above 0,
    and blue, below; its opacity grows with |heat| up to STRONG at `most`."""
    grey = view.mean(-1, keepdims=True)
    share = np.clip(heat / max(most, 1e-30), -1, 1)[..., None]
    colour = np.where(share > 0, [0.90, 0.16, 0.12], [0.10, 0.35, 0.90])
    opacity = STRONG * np.abs(share)
    mixed: np.ndarray = grey * (1 - opacity) + colour * opacity
    return mixed


def save_attributions(path: Path, samples: Sequence[tuple[str, bool, list[tuple[np.ndarray, Any]]]]) -> None:
    """Write a picture: of each sample (caption, whether right, `views`) the pictures, and below
    them the same with what spoke for the answer in red, against it in blue."""
    wide = max(len(pairs) for _, _, pairs in samples)
    beside = max(1, COLUMNS // wide)  # samples in a line
    lines, columns = math.ceil(len(samples) / beside), min(beside, len(samples)) * wide
    figure, axes = panels_of(2 * lines, columns, (1.6 * columns, 3.5 * lines))
    for axis in axes.flat:
        axis.axis("off")
    for number, (caption, right, pairs) in enumerate(samples):
        line, place = divmod(number, beside)
        most = max(float(np.abs(heat).max()) for _, heat in pairs)
        for column, (view, heat) in enumerate(pairs, place * wide):
            size = _drawn(view.shape[:2])
            axes[2 * line, column].imshow(_resized(view, size))
            axes[2 * line + 1, column].imshow(_resized(overlaid(view, heat, most), size))
        color = RIGHT if right else WRONG
        axes[2 * line, place * wide].set_title(caption, loc="left", fontsize=8, color=color)
    save_figure(figure, path)


def _drawn(size: tuple[int, ...]) -> tuple[int, int]:
    """Enlarge small pictures, whose cells would be interpolated."""
    factor = max(1, round(120 / max(size)))
    return size[0] * factor, size[1] * factor


def _resized(view: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    cells = torch.from_numpy(np.ascontiguousarray(view)).permute(2, 0, 1)[None]
    return interpolate(cells, size, mode="nearest")[0].permute(1, 2, 0).clamp(0, 1).numpy()
