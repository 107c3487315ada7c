"""Pictures of a classifier's answers: the confusion matrix, videos, images and volumes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ndlightnet.data.errors import printable
from ndlightnet.training.core.report import panels_of, save_figure

VIEWS = 36  # views in a gallery, about
RIGHT, WRONG = "#1a7f37", "#cf222e"
BARS = 16  # rows in the picture of a line


def save_confusion(path: Path, matrix: Tensor, classes: Sequence[str]) -> None:
    """Write a picture of counts (truth, prediction), coloured by their fraction of the row."""
    counts = matrix.cpu().numpy()
    fraction = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    side = 2.2 + 0.7 * len(classes)
    figure, axes = panels_of(1, 1, (side, side))
    axis = axes[0, 0]
    axis.imshow(fraction, cmap="Blues", vmin=0, vmax=1)
    # printable here: matplotlib sets the texts of ticks again, after `plain_text`
    ticks, names = range(len(classes)), [printable(name) for name in classes]
    axis.set_xticks(ticks, names, rotation=45, ha="right")
    axis.set_yticks(ticks, names)
    axis.set(xlabel="prediction", ylabel="truth")
    for i in ticks:
        for j in ticks:
            color = "white" if fraction[i, j] > 0.5 else "black"
            axis.text(j, i, str(counts[i, j]), ha="center", va="center", color=color)
    save_figure(figure, path)


def save_strips(
    path: Path, strips: Sequence[tuple[str, bool | None, Tensor]], frames: int = 8
) -> None:
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
    return np.concatenate(
        [np.pad(v, ((0, tallest - len(v)), (1, 1)), constant_values=1) for v in views], axis=1
    )


def save_gallery(
    path: Path, images: Tensor, probabilities: Tensor, labels: Tensor, names: Sequence[str]
) -> None:
    """Write images (n, *space), evenly spaced from the worst answer (n, classes) to the best: the
    first has the lowest probability of its truth. A caption is the answer with its probability."""
    truth = probabilities.gather(1, labels[:, None])[:, 0]
    each = math.comb(images.ndim - 1, 2)
    count = min(len(labels), max(4, VIEWS // each))
    shown = truth.argsort(stable=True)[torch.linspace(0, len(labels) - 1, count).round().long()]
    columns = max(1, 9 // each)
    figure, axes = panels_of(-(-count // columns), columns, (9, 1.3 * -(-count // columns)))
    for axis in axes.flat:
        axis.axis("off")
    for axis, number in zip(axes.flat, shown.tolist(), strict=False):
        answer, label = int(probabilities[number].argmax()), int(labels[number])
        axis.imshow(projections(images[number]), cmap="gray", vmin=0, vmax=1)
        caption = f"{names[answer]} {probabilities[number, answer]:.2f}"
        caption += "" if answer == label else f"\nnot {names[label]}"
        axis.set_title(caption, fontsize=6, color=RIGHT if answer == label else WRONG)
    save_figure(figure, path)
