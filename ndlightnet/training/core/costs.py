"""What a network costs: arithmetic, time and memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

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


class CostMonitor(L.Callback):
    """Measures a training; its checkpoints keep the result in their entry "cost".

    Args:
        each: "step": forward, backward and update of every step, whose batch is on the device
            already. "epoch": the mean step of every epoch, waiting for data included: to wait for
            the device in every step slows small networks down.

    seconds: of each step, or of the mean step of each epoch. peak: the most bytes of a CUDA device.
    """

    def __init__(self, each: Literal["step", "epoch"] = "step") -> None:
        self.each, self.seconds, self.peak = each, list[float](), 0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # before the other callbacks, whose work at the end of a step is none of the network's
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks.insert(0, callbacks.pop(callbacks.index(self)))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Lightning does not start an epoch anew that a checkpoint cut off or has just ended
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.each == "epoch":
            self.meter = Meter(pl_module.device)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.each == "step":
            self.meter = Meter(pl_module.device)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any,
        batch_idx: int,
    ) -> None:  # fmt: skip
        if self.each == "step" or trainer.is_last_batch:  # before a validation
            seconds, peak = self.meter.read()
            self.seconds.append(seconds / (1 if self.each == "step" else batch_idx + 1))
            self.peak = max(self.peak, peak)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["cost"] = [self.seconds, self.peak]

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint["cost"]
        if len(saved) != 2 or not isinstance(saved[0], list):  # before 0.1: a pair of each epoch
            saved = [[seconds for seconds, _ in saved], max((peak for _, peak in saved), default=0)]
        self.seconds, self.peak = [*saved[0]], saved[1]

    def measured(self) -> dict[str, float | None]:
        """For metrics.json: step_ms, the median, and peak_memory_gb (without the activations where
        they lie in a CUDA graph's own memory). None: not trained here, or no GPU."""
        return {
            "step_ms": 1e3 * statistics.median(self.seconds) if self.seconds else None,
            "peak_memory_gb": self.peak / 1e9 or None,
        }


def parameter_count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def training_costs(net: nn.Module, monitor: CostMonitor) -> dict[str, Any]:
    """For metrics.json, of a monitor of steps. state_size is None where it is of no fixed size."""
    return {
        "parameters": parameter_count(net),
        "steps": len(monitor.seconds),
        "train_seconds": sum(monitor.seconds),
        **monitor.measured(),
        "state_size": state_size(net),
    }


def case_costs(
    net: nn.Module, monitor: CostMonitor, cases: Collection[Cost], shape: Sequence[int]
) -> dict[str, Any]:
    """For metrics.json, of a training and of predictions of whole cases; None: not known here.

    gflops of a forward of an input of `shape`, see `forward_flops`; of the `cases` case_seconds,
    the median, and case_memory_gb, the most.
    """
    flops = forward_flops(net, shape)
    return {
        "parameters": parameter_count(net),
        "gflops": None if flops is None else flops / 1e9,
        **monitor.measured(),
        "case_seconds": statistics.median(seconds for seconds, _ in cases) if cases else None,
        "case_memory_gb": max((peak for _, peak in cases), default=0) / 1e9 or None,
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
    plain = sdpa_kernel(SDPBackend.MATH)  # not every torch counts the fused one of a CPU
    try:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), plain, count:
            copy(torch.empty(*shape))
    except Exception:  # whatever the network does; a test of hours must not end here
        return None
    return int(count.get_total_flops())


def state_size(net: nn.Module) -> int | None:
    """Numbers that a mixer of `net` keeps of the tokens before, if all mixers say the same."""
    sizes = {getattr(block.mixer, "state_size", None) for block in getattr(net, "blocks", ())}
    return sizes.pop() if len(sizes) == 1 else None


def latencies(task: L.LightningModule, *inputs: Tensor) -> dict[str, float]:
    """Milliseconds of a forward pass of `task.net`, in the precision of tests, of a batch and of
    its first sample."""
    found: dict[str, float] = {}
    net: Any = task.net
    plugin = task.trainer.precision_plugin
    with torch.no_grad(), plugin.forward_context():
        for name, some in (("latency_ms", inputs), ("latency_one_ms", [x[:1] for x in inputs])):
            found[name] = 1e3 * median_seconds(partial(net, *some), task.device)
    return found


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
