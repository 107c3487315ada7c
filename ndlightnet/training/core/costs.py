"""What a network costs: arithmetic, time and memory, without slowing its training."""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from ndlightnet.training.core.task import Task

Cost = tuple[float, int]  # seconds, and the peak of memory (bytes)


class Meter:
    """Runs from where it is made; waits for the device there and when it is read."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        self.start = time.perf_counter()

    def read(self) -> Cost:
        """Seconds, and the most that tensors took of a CUDA device (bytes; 0 elsewhere)."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - self.start
        cuda = self.device.type == "cuda"
        return seconds, torch.cuda.max_memory_allocated(self.device) if cuda else 0


class MeteredTask(Task):
    """A task that knows what its training cost; its checkpoints keep it. Its meter is read once an
    epoch: to wait for the device in every step, as MeasuredTask does, slows small networks down."""

    saved = (*Task.saved, "cost")

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[Cost] = []  # of every epoch: a step's seconds, waiting for data included

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self.meter = Meter(self.device)

    def optimizer_step(self, epoch: int, batch_idx: int, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(epoch, batch_idx, *args, **kwargs)
        if self.trainer.is_last_batch:  # before a validation
            seconds, peak = self.meter.read()
            self.trained.append((seconds / (batch_idx + 1), peak))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["cost"] = self.trained

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.trained = checkpoint["cost"]

    def costs(self, answers: Collection[Cost], shape: Sequence[int]) -> dict[str, Any]:
        """For metrics.json; None: not known here.

        parameters; gflops of a forward of an input of `shape`, see `forward_flops`; step_ms, the
        median of the epochs' means; peak_memory_gb of the training (without the activations where
        they lie in a CUDA graph's own memory); of the `answers` to whole cases case_seconds, the
        median, and case_memory_gb, the most.
        """
        flops = forward_flops(self.net, shape)

        def gigabytes(costs: Collection[Cost]) -> float | None:
            return max((peak for _, peak in costs), default=0) / 1e9 or None

        return {
            "parameters": sum(p.numel() for p in self.net.parameters()),
            "gflops": None if flops is None else flops / 1e9,
            "step_ms": 1e3 * statistics.median(s for s, _ in self.trained)
            if self.trained
            else None,
            "peak_memory_gb": gigabytes(self.trained),
            "case_seconds": statistics.median(s for s, _ in answers) if answers else None,
            "case_memory_gb": gigabytes(answers),
        }


def forward_flops(net: nn.Module, shape: Sequence[int]) -> int | None:
    """Of a forward in evaluation: two for every multiplication and addition in matrix products,
    convolutions and torch's attention; nothing else counts, such as norms and activations.

    Counted with torch's forms of all operators, whatever kernels the device has, on tensors without
    memory, so that all networks are counted alike, and at any shape. None for a network that needs
    to see numbers.
    """
    copy = deepcopy(net)
    vars(copy).pop("forward", None)  # that of a CUDA graph, which knows the original
    copy.cpu().eval()
    for module in copy.modules():
        if hasattr(module, "impl"):
            module.impl = "torch"  # type: ignore[assignment]
    count = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), count:
            copy(torch.empty(*shape))
    except Exception:  # whatever the network does; a test of hours must not end here
        return None
    return int(count.get_total_flops())
