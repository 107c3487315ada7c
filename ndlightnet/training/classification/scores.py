"""Metrics of a classifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torchmetrics.functional.classification import (
    multiclass_accuracy,
    multiclass_auroc,
    multiclass_calibration_error,
    multiclass_confusion_matrix,
)

BINS = 15  # of the expected calibration error


def scores(probabilities: Tensor, labels: Tensor, names: Sequence[str]) -> dict[str, Any]:
    """Return metrics of probabilities (samples, classes), given the true classes (samples,).

    `balanced_accuracy` is the mean recall of the classes that occur. `auc`: the area under the ROC curve of the second
    of two classes, the mean over each class against the rest of more; None unless all classes occur. `ece`: the
    expected calibration error (Naeini et al., 2015) of BINS bins. `top5` is for more than five classes. For
    metrics.json.
    """
    matrix = multiclass_confusion_matrix(probabilities, labels, len(names))
    recalls = matrix.diagonal() / matrix.sum(1)  # not a number where a class does not occur
    result = {
        "top1": float(matrix.trace() / matrix.sum()),
        "balanced_accuracy": float(recalls.nanmean()),
        "recall": dict(zip(names, recalls.tolist(), strict=True)),
        "majority_class": float(matrix.sum(1).max() / matrix.sum()),
    }
    every = len(labels.unique()) == len(names)
    result["auc"] = float(multiclass_auroc(probabilities, labels, len(names))) if every else None
    result["ece"] = float(multiclass_calibration_error(probabilities, labels, len(names), BINS))
    if len(names) > 5:
        result["top5"] = float(multiclass_accuracy(probabilities, labels, len(names), "micro", 5))
    return {**result, "confusion": matrix.tolist()}
