"""Metrics of a classifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torchmetrics.functional.classification import (
    binary_auroc,
    multiclass_accuracy,
    multiclass_confusion_matrix,
)


def scores(probabilities: Tensor, labels: Tensor, names: Sequence[str]) -> dict[str, Any]:
    """Return metrics of probabilities (samples, classes), given the true classes (samples,).

    `balanced_accuracy` is the mean recall of the classes that occur; `auc`, for two classes only,
    is that of the second; `top5` is for more than five. For metrics.json.
    """
    matrix = multiclass_confusion_matrix(probabilities, labels, len(names))
    recall = matrix.diagonal() / matrix.sum(1)  # not a number where a class does not occur
    result = {
        "top1": float(matrix.trace() / matrix.sum()),
        "balanced_accuracy": float(recall.nanmean()),
        "recall": dict(zip(names, recall.tolist(), strict=True)),
        "majority_class": float(matrix.sum(1).max() / matrix.sum()),
    }
    if len(names) == 2:
        both = len(labels.unique()) == 2
        result["auc"] = float(binary_auroc(probabilities[:, 1], labels)) if both else None
    if len(names) > 5:
        result["top5"] = float(multiclass_accuracy(probabilities, labels, len(names), "micro", 5))
    return {**result, "confusion": matrix.tolist()}
