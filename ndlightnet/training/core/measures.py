"""What runs are compared by, the same for every task: the cost of steps and answers, and scores."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics.functional.classification import binary_auroc, multiclass_confusion_matrix

from ndlightnet.training.core.task import Task


class MeasuredTask(Task):
    """A task that knows what its training cost; its checkpoints keep it."""

    saved = (*Task.saved, "cost")

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []  # of every step
        self.peak = 0  # bytes on the GPU, the most of all steps

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Forward, backward and update: what is timed. The batch is on the device already."""
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
            torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        super().optimizer_step(*args, **kwargs)
        if on_gpu:
            torch.cuda.synchronize(self.device)
            self.peak = max(self.peak, torch.cuda.max_memory_allocated(self.device))
        self.seconds.append(time.perf_counter() - start)

    def costs(self) -> dict[str, Any]:
        """For metrics.json. None: not trained here, no GPU, or no state of a fixed size."""
        return {
            "parameters": sum(p.numel() for p in self.net.parameters()),
            "steps": len(self.seconds),
            "train_seconds": sum(self.seconds),
            "step_ms": 1e3 * statistics.median(self.seconds) if self.seconds else None,
            "peak_memory_gb": self.peak / 1e9 if self.peak else None,
            "state_size": state_size(self.net),
        }

    def latencies(self, *inputs: Tensor) -> dict[str, float]:
        """Milliseconds of a forward pass, as it is done in tests, of a batch and of its first."""
        found = {}
        with torch.no_grad(), self.trainer.precision_plugin.forward_context():
            for name, some in (("latency_ms", inputs), ("latency_one_ms", [x[:1] for x in inputs])):
                found[name] = 1e3 * median_seconds(partial(self.net, *some), self.device)
        return found

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["cost"] = [self.seconds, self.peak]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.seconds, self.peak = checkpoint["cost"]


def median_seconds(
    call: Callable[[], Any], device: torch.device, most: int = 30, budget: float = 2.0
) -> float:
    """Of `most` calls, fewer (but 3) when they take more than `budget` seconds; two come before."""
    found: list[float] = []
    for number in range(2 + most):
        if len(found) >= 3 and sum(found) > budget:
            break
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= 2:
            found.append(time.perf_counter() - start)
    return statistics.median(found)


def state_size(net: nn.Module) -> int | None:
    """Numbers that a mixer of `net` keeps of what it has seen, if all say the same."""
    sizes = {getattr(block.mixer, "state_size", None) for block in getattr(net, "blocks", ())}
    return sizes.pop() if len(sizes) == 1 else None


def scores(probabilities: Tensor, labels: Tensor, names: Sequence[str]) -> dict[str, Any]:
    """Of answers (n, classes) to questions with the truth `labels` (n,), for metrics.json.

    `balanced_accuracy` is the mean recall of the classes that occur; `auc` is of the second of two.
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
    return {**result, "confusion": matrix.tolist()}
