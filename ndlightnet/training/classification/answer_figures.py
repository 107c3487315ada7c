"""Figures of a classifier's answers: confusion matrix, ROC and calibration, samples, and what decided them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torchmetrics.functional.classification import binary_auroc, binary_roc

from ndlightnet.data.errors import printable
from ndlightnet.training.report.figures import BLUE, GREY, LIGHT, RIGHT, WRONG, panels_of, save_figure

VIEWS = 36  # views in a gallery, about
NAMED = 30  # classes in a confusion matrix with names
CURVES = 10  # classes with a ROC curve, those with most samples
BARS = 16  # rows in the picture of a signal of one channel
FRAMES, COLUMNS = 6, 6  # of a video, and of the figure, in attributions
STRONG = 0.6  # opacity of the strongest cell of an attribution


def save_confusion(path: Path, matrix: Tensor, classes: Sequence[str]) -> None:
    """Write a figure of counts (truth, prediction), coloured by their fraction of the row. With more than NAMED
    classes it has neither counts nor names."""
    counts = matrix.cpu().numpy()
    fraction = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    side = 2.2 + 0.7 * min(len(classes), NAMED)
    figure, axes = panels_of(1, 1, (side, side))
    axis = axes[0, 0]
    axis.imshow(fraction, cmap="Blues", vmin=0, vmax=1)
    axis.set(xlabel="prediction", ylabel="truth")
    if len(classes) <= NAMED:
        # printable here: matplotlib sets the texts of ticks again, after `plain_text`
        ticks, names = range(len(classes)), [printable(name) for name in classes]
        axis.set_xticks(ticks, names, rotation=45, ha="right")
        axis.set_yticks(ticks, names)
        for row, column in np.ndindex(counts.shape):
            color = "white" if fraction[row, column] > 0.5 else "black"
            axis.text(column, row, str(counts[row, column]), ha="center", va="center", color=color)
    save_figure(figure, path)


def class_areas(probabilities: Tensor, labels: Tensor) -> list[float | None]:
    """Return the area under the ROC curve of each class against all others, None for a class that does not occur, or
    alone does. probabilities: (samples, classes), labels: (samples,)."""
    areas: list[float | None] = []
    for label in range(probabilities.shape[1]):
        members = (labels == label).long()
        both = 0 < int(members.sum()) < len(members)
        areas.append(float(binary_auroc(probabilities[:, label], members)) if both else None)
    return areas


def reliability(probabilities: Tensor, labels: Tensor, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (count, mean probability of the answer, fraction of right answers) of each of `bins` equal intervals of
    the answer's probability, each (bins,); NaN where there is no answer."""
    sure, answers = probabilities.max(1)
    interval = (sure * bins).ceil().long().clamp(1, bins) - 1  # as torchmetrics: (lower, upper]
    count = torch.bincount(interval, minlength=bins)
    mean = torch.bincount(interval, sure.double(), minlength=bins) / count
    right = torch.bincount(interval, (answers == labels).double(), minlength=bins) / count
    return count, mean, right


def save_curves(path: Path, probabilities: Tensor, labels: Tensor, names: Sequence[str], ece: float, bins: int) -> None:
    """Write a figure: the ROC curve of each class, and the reliability diagram."""
    figure, axes = panels_of(1, 2, (9.5, 4.4))
    _draw_roc(axes[0, 0], probabilities, labels, names)
    count, mean, right = (x.numpy() for x in reliability(probabilities, labels, bins))
    axis, used = axes[0, 1], count > 0
    middles = (np.arange(bins) + 0.5) / bins
    axis.bar(middles, count / count.sum(), 1 / bins, color=LIGHT, label="share of the answers")
    axis.plot([0, 1], [0, 1], color=GREY, lw=1, ls="--", label="calibrated")
    axis.plot(mean[used], right[used], color=BLUE, lw=1)
    size = 12 + 200 * count[used] / count.sum()  # by the number of answers
    axis.scatter(mean[used], right[used], size, color=BLUE, label="right answers")
    title = f"Expected calibration error {ece:.3f}"
    axis.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="probability of the answer", ylabel="fraction", title=title)
    axis.legend(loc="upper left", fontsize=8, frameon=False)
    save_figure(figure, path)


def _draw_roc(axis: Any, probabilities: Tensor, labels: Tensor, names: Sequence[str]) -> None:
    areas = class_areas(probabilities, labels)
    most = torch.bincount(labels, minlength=len(names)).argsort(descending=True, stable=True)
    for label in sorted(most[:CURVES].tolist()):
        if areas[label] is not None:
            false, true, _ = binary_roc(probabilities[:, label], (labels == label).long())
            axis.plot(false, true, label=f"{printable(names[label])} {areas[label]:.3f}")
    axis.plot([0, 1], [0, 1], color=GREY, lw=1, ls="--")
    axis.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.02), title="ROC, each class against the rest")
    axis.set(xlabel="false positive rate", ylabel="true positive rate")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(title="area under the curve", loc="lower right", fontsize=8, frameon=False)


def save_strips(path: Path, strips: Sequence[tuple[str, bool | None, Tensor]], frames: int = 8) -> None:
    """Write a row per clip: (caption, whether right or None, frames (frames, h, w, 3) uint8)."""
    figure, axes = panels_of(len(strips), frames, (1.25 * frames, 1.55 * len(strips)))
    for row, (caption, right, clip) in zip(axes, strips, strict=True):
        numbers = np.linspace(0, len(clip) - 1, frames).round().astype(int)
        for axis, number in zip(row, numbers, strict=True):
            axis.imshow(clip[int(number)].cpu().numpy())
            axis.axis("off")
        color = {True: RIGHT, False: WRONG, None: "black"}[right]
        row[0].set_title(caption, loc="left", fontsize=9, color=color)
    save_figure(figure, path)


def projections(image: Tensor) -> np.ndarray:
    """Return means of an image (*space) over all but two axes, side by side: 3 for a volume. Of one axis: bars as
    high as its values."""
    if image.ndim == 1:
        heights = image.float() / max(1.0, float(image.max()))
        image = (heights >= torch.linspace(1, 1 / BARS, BARS)[:, None]).float()
    views = []
    for pair in combinations(range(image.ndim), 2):
        axes = [axis for axis in range(image.ndim) if axis not in pair]
        view = image.float().mean(axes) if axes else image.float()
        views.append(view.cpu().numpy() / max(1.0, float(view.max())))
    tallest = max(len(view) for view in views)
    return np.concatenate([np.pad(v, ((0, tallest - len(v)), (1, 1)), constant_values=1) for v in views], axis=1)


def worst_to_best(sure: Tensor, count: int) -> list[int]:
    """Return the numbers of `count` samples, or of all if they are fewer, evenly spaced from the lowest probability
    of the truth (samples,) to the highest."""
    count = min(count, len(sure))
    return sure.argsort(stable=True)[torch.linspace(0, len(sure) - 1, count).round().long()].tolist()


def save_gallery(
    path: Path, image: Callable[[int], Tensor], probabilities: Tensor, labels: Tensor | None, names: Sequence[str]
) -> None:
    """Write some images, `image(row)` (channels, *space) of 1 channel or, uint8, of 3 colours, evenly spaced from
    the worst answer (n, classes) to the best: the first has the lowest probability of its truth, or without labels
    of its answer. A caption is the answer with its probability."""
    truth = probabilities.argmax(1) if labels is None else labels
    each = max(1, math.comb(image(0).ndim - 1, 2))  # a line has one, too
    rows = worst_to_best(probabilities.gather(1, truth[:, None])[:, 0], max(4, VIEWS // each))
    columns = max(1, 9 // each)
    lines = -(-len(rows) // columns)
    figure, axes = panels_of(lines, columns, (9, 1.3 * lines))
    for axis in axes.flat:
        axis.axis("off")
    for axis, row in zip(axes.flat, rows, strict=False):
        cells, (caption, right) = image(row), answer_caption(probabilities[row], int(truth[row]), names, "\n")
        view = cells.permute(1, 2, 0).numpy() if len(cells) == 3 else projections(cells[0])
        axis.imshow(view, cmap="gray", vmin=0, vmax=1)
        axis.set_title(caption, fontsize=6, color="black" if labels is None else RIGHT if right else WRONG)
    save_figure(figure, path)


def answer_caption(probs: Tensor, label: int, names: Sequence[str], separator: str = ", ") -> tuple[str, bool]:
    """Return the answer with its probability and, if it is wrong, the truth after `separator`; and whether it is
    right. probs: (classes,)."""
    answer = int(probs.argmax())
    caption = f"{names[answer]} {probs[answer]:.2f}"
    return (caption, True) if answer == label else (f"{caption}{separator}not {names[label]}", False)


# ------------------------------------------------------------------------------- what decided them
def views(picture: Tensor, heat: Tensor, video: bool = False) -> list[tuple[np.ndarray, Any]]:
    """Return pairs of a picture (height, width, 3) from 0 to 1 and of its cells of `heat` (height, width).

    picture: (1 or 3 channels, *space) uint8; heat: (*space). An image is itself; a volume has three slices, those of
    most heat where it is bright; a video has FRAMES of its frames, evenly spaced; of a signal (channels, length) the
    channels are the rows.
    """
    cells, heat = picture.float().cpu() / 255, heat.cpu()
    if heat.ndim == 1:
        rows = cells[None] if len(cells) > 1 else cells[None].expand(-1, BARS, -1)
        return [_pair(rows, heat.expand(rows.shape[1], -1))]
    if heat.ndim == 2:
        return [_pair(cells, heat)]
    if video:
        frames = torch.linspace(0, len(heat) - 1, min(FRAMES, len(heat))).round().long().tolist()
        return [_pair(cells[:, t], heat[t]) for t in frames]
    weight, pairs = heat.abs() * (1 + cells.mean(0)), []
    for axis in range(3):
        at = int(weight.sum([a for a in range(3) if a != axis]).argmax())
        pairs.append(_pair(cells.select(axis + 1, at), heat.select(axis, at)))
    return pairs


def _pair(cells: Tensor, heat: Tensor) -> tuple[np.ndarray, Any]:
    return cells.expand(3, -1, -1).permute(1, 2, 0).numpy(), heat.numpy()


def overlaid(view: np.ndarray, heat: np.ndarray, most: float) -> np.ndarray:
    """Return the grey `view` (height, width, 3) under red, where `heat` (height, width) is above 0, and blue, below;
    its opacity grows with |heat| up to STRONG at `most`."""
    grey = view.mean(-1, keepdims=True)
    share = np.clip(heat / max(most, 1e-30), -1, 1)[..., None]
    colour = np.where(share > 0, [0.90, 0.16, 0.12], [0.10, 0.35, 0.90])
    opacity = STRONG * np.abs(share)
    mixed: np.ndarray = grey * (1 - opacity) + colour * opacity
    return mixed


def save_attributions(path: Path, samples: Sequence[tuple[str, bool, list[tuple[np.ndarray, Any]]]]) -> None:
    """Write a figure: of each sample (caption, whether right, `views`) the pictures, and below them the same with
    what spoke for the answer in red, against it in blue."""
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
            axes[2 * line, column].imshow(_enlarged(view))
            axes[2 * line + 1, column].imshow(_enlarged(overlaid(view, heat, most)))
        axes[2 * line, place * wide].set_title(caption, loc="left", fontsize=8, color=RIGHT if right else WRONG)
    save_figure(figure, path)


def _enlarged(view: np.ndarray) -> np.ndarray:
    """Return a small picture with larger cells, which matplotlib would interpolate."""
    factor = max(1, round(120 / max(view.shape[:2])))
    cells = torch.from_numpy(np.ascontiguousarray(view)).permute(2, 0, 1)[None]
    return interpolate(cells, scale_factor=factor, mode="nearest")[0].permute(1, 2, 0).clamp(0, 1).numpy()
