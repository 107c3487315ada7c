"""Curves of a classifier: ROC of each class, and how often it is right when it is sure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc, binary_roc

from ndlightnet.data.errors import printable
from ndlightnet.training.core.report import panels_of, save_figure

DRAWN = 10  # classes with a curve of their own, those with most samples


def class_areas(probabilities: Tensor, labels: Tensor) -> list[float | None]:
    """Return the area under the ROC curve of each class against all others, None for a class that
    does not occur, or alone does. probabilities: (samples, classes), labels: (samples,)."""
    areas: list[float | None] = []
    for label in range(probabilities.shape[1]):
        own = (labels == label).long()
        both = 0 < int(own.sum()) < len(own)
        areas.append(float(binary_auroc(probabilities[:, label], own)) if both else None)
    return areas


def reliability(probabilities: Tensor, labels: Tensor, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (count, mean probability of the answer, fraction of right answers) of each of `bins`
    equal parts of the answer's probability, each (bins,); NaN where there is no answer."""
    sure, answers = probabilities.max(1)
    part = (sure * bins).ceil().long().clamp(1, bins) - 1  # as torchmetrics: (lower, upper]
    count = torch.bincount(part, minlength=bins)
    mean = torch.bincount(part, sure.double(), minlength=bins) / count
    right = torch.bincount(part, (answers == labels).double(), minlength=bins) / count
    return count, mean, right


def save_curves(path: Path, probabilities: Tensor, labels: Tensor, names: Sequence[str], ece: float, bins: int) -> None:
    """Write a picture: the ROC curve of each class, and the reliability diagram."""
    figure, axes = panels_of(1, 2, (9.5, 4.4))
    _roc(axes[0, 0], probabilities, labels, names)
    count, mean, right = (x.numpy() for x in reliability(probabilities, labels, bins))
    axis, used = axes[0, 1], count > 0
    middles = (np.arange(bins) + 0.5) / bins
    axis.bar(middles, count / count.sum(), 1 / bins, color="#d0d7de", label="share of the answers")
    axis.plot([0, 1], [0, 1], color="#8c959f", lw=1, ls="--", label="calibrated")
    axis.plot(mean[used], right[used], color="#0969da", lw=1)
    size = 12 + 200 * count[used] / count.sum()  # by the number of answers
    axis.scatter(mean[used], right[used], size, color="#0969da", label="right answers")
    axis.set(
        xlim=(0, 1),
        ylim=(0, 1.02),
        xlabel="probability of the answer",
        ylabel="fraction",
        title=f"Expected calibration error {ece:.3f}",
    )
    axis.legend(loc="upper left", fontsize=8, frameon=False)
    save_figure(figure, path)


def _roc(axis: Any, probabilities: Tensor, labels: Tensor, names: Sequence[str]) -> None:
    areas = class_areas(probabilities, labels)
    most = torch.bincount(labels, minlength=len(names)).argsort(descending=True, stable=True)
    for label in sorted(most[:DRAWN].tolist()):
        if areas[label] is not None:
            false, true, _ = binary_roc(probabilities[:, label], (labels == label).long())
            axis.plot(false, true, label=f"{printable(names[label])} {areas[label]:.3f}")
    axis.plot([0, 1], [0, 1], color="#8c959f", lw=1, ls="--")
    axis.set(
        xlim=(-0.01, 1.01),
        ylim=(-0.01, 1.02),
        xlabel="false positive rate",
        ylabel="true positive rate",
        title="ROC, each class against the rest",
    )
    if axis.get_legend_handles_labels()[0]:
        axis.legend(title="area under the curve", loc="lower right", fontsize=8, frameon=False)
