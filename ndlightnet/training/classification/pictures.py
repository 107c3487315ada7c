"""Pictures of a classifier's answers: the confusion matrix, videos, images and volumes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ndlightnet.data.errors import printable
from ndlightnet.training.core.report import panels_of, save_figure

VIEWS = 36  # views in a gallery, about
NAMED = 30  # classes in a confusion matrix with names
RIGHT, WRONG = "#1a7f37", "#cf222e"
BARS = 16  # rows in the picture of a line


def save_confusion(path: Path, matrix: Tensor, classes: Sequence[str]) -> None:
    """Write a picture of counts (truth, prediction), coloured by their fraction of the row. With
    more than NAMED classes it has neither counts nor names."""
    counts = matrix.cpu().numpy()
    fraction = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    side = 2.2 + 0.7 * min(len(classes), NAMED)
    figure, axes = panels_of(1, 1, (side, side))
    axis = axes[0, 0]
    axis.imshow(fraction, cmap="Blues", vmin=0, vmax=1)
    axis.set(xlabel="prediction", ylabel="truth")
    if len(classes) <= NAMED:
        _write_counts(axis, counts, fraction, classes)
    save_figure(figure, path)


def _write_counts(axis: Any, counts: np.ndarray, fraction: np.ndarray, classes: Sequence[str]) -> None:
    # printable here: matplotlib sets the texts of ticks again, after `plain_text`
    ticks, names = range(len(classes)), [printable(name) for name in classes]
    axis.set_xticks(ticks, names, rotation=45, ha="right")
    axis.set_yticks(ticks, names)
    for i in ticks:
        for j in ticks:
            color = "white" if fraction[i, j] > 0.5 else "black"
            axis.text(j, i, str(counts[i, j]), ha="center", va="center", color=color)


def save_strips(path: Path, strips: Sequence[tuple[str, bool | None, Tensor]], frames: int = 8) -> None:
    """Write a row per clip: (caption, whether right or None, frames (frames, h, w, 3) uint8)."""
    figure, axes = panels_of(len(strips), frames, (1.25 * frames, 1.55 * len(strips)))
    for row, (caption, right, clip) in zip(axes, strips, strict=True):
        shown = np.linspace(0, len(clip) - 1, frames).round().astype(int)
        for axis, number in zip(row, shown, strict=True):
            axis.imshow(clip[int(number)].cpu().numpy())
            axis.axis("off")
        color = {True: RIGHT, False: WRONG, None: "black"}[right]
        row[0].set_title(caption, loc="left", fontsize=9, color=color)
    save_figure(figure, path)


def projections(image: Tensor) -> np.ndarray:
    """Return means of an image (*space) over all but two axes, side by side: 3 for a volume. Of one
    axis: bars as high as its values."""
    if image.ndim == 1:
        heights = image.float() / max(1.0, float(image.max()))
        image = (heights >= torch.linspace(1, 1 / BARS, BARS)[:, None]).float()
    views = []
    for pair in combinations(range(image.ndim), 2):
        others = [axis for axis in range(image.ndim) if axis not in pair]
        view = image.float().mean(others) if others else image.float()
        views.append(view.cpu().numpy() / max(1.0, float(view.max())))
    tallest = max(len(view) for view in views)
    return np.concatenate([np.pad(v, ((0, tallest - len(v)), (1, 1)), constant_values=1) for v in views], axis=1)


def save_gallery(
    path: Path, image: Callable[[int], Tensor], probabilities: Tensor, labels: Tensor | None, names: Sequence[str]
) -> None:
    """Write some images, `image(row)` (channels, *space) of 1 channel or, uint8, of 3 colours,
    evenly spaced from the worst answer (n, classes) to the best: the first has the lowest
    probability of its truth, or without labels of its answer. A caption is the answer with its
    probability."""
    truth = probabilities.argmax(1) if labels is None else labels
    sure = probabilities.gather(1, truth[:, None])[:, 0]
    each = max(1, math.comb(image(0).ndim - 1, 2))  # a line has one, too
    count = min(len(sure), max(4, VIEWS // each))
    shown = sure.argsort(stable=True)[torch.linspace(0, len(sure) - 1, count).round().long()]
    columns = max(1, 9 // each)
    figure, axes = panels_of(-(-count // columns), columns, (9, 1.3 * -(-count // columns)))
    for axis in axes.flat:
        axis.axis("off")
    for axis, row in zip(axes.flat, shown.tolist(), strict=False):
        answer, label, cells = int(probabilities[row].argmax()), int(truth[row]), image(row)
        view = cells.permute(1, 2, 0).numpy() if len(cells) == 3 else projections(cells[0])
        axis.imshow(view, cmap="gray", vmin=0, vmax=1)
        caption = f"{names[answer]} {probabilities[row, answer]:.2f}"
        caption += "" if answer == label else f"\nnot {names[label]}"
        color = "black" if labels is None else RIGHT if answer == label else WRONG
        axis.set_title(caption, fontsize=6, color=color)
    save_figure(figure, path)
