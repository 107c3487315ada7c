"""Costs of a network: arithmetic, time and memory."""

from __future__ import annotations

import statistics
import time
from collections import deque
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
    """Measures time and memory from its creation; waits for the device then and in `read`."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        if self.cuda:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        self.start = time.perf_counter()

    def read(self) -> Cost:
        """Return seconds and the peak memory of tensors on a CUDA device (bytes; else 0)."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - self.start
        return seconds, torch.cuda.max_memory_allocated(self.device) if self.cuda else 0


class StepMeter:
    """Measures time and memory from its creation to `stop`, on the device's clock; only `read` waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(device)
        self.start = self._now()

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def stop(self) -> None:
        self.end = self._now()
        self.peak = torch.cuda.max_memory_allocated(self.device) if self.cuda else 0

    @property
    def done(self) -> bool:
        """Whether `read` need not wait."""
        return not self.cuda or self.end.query()

    def read(self) -> Cost:
        """Return what Meter.read does."""
        if not self.cuda:
            return self.end - self.start, 0
        self.end.synchronize()
        return self.start.elapsed_time(self.end) / 1e3, self.peak


class CostMonitor(L.Callback):
    """Measures a training; its checkpoints hold the result in their entry "cost". The progress bar
    shows the samples a second of this epoch, waiting for data included, of all processes.

    Args:
        each: "step": time forward, backward and update of every step, with its batch already on
            the device, without waiting for it in between. "epoch": time the mean step of every epoch,
            waiting for data included. None: neither.

    seconds: of each step, or of the mean step of each epoch. peak: the most bytes of a CUDA device.
    throughput: samples a second of each epoch.
    """

    def __init__(self, each: Literal["step", "epoch"] | None = "step") -> None:
        self.each, self.seconds, self.peak = each, list[float](), 0
        self.throughput = list[float]()
        self.running: deque[StepMeter] = deque()  # of steps that the device may not have done yet
        self.begun, self.samples = time.perf_counter(), 0  # of this epoch, without validations

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # runs before the other callbacks, so that their work at the end of a step is not timed
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks.insert(0, callbacks.pop(callbacks.index(self)))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Lightning omits on_train_epoch_start where it resumes within or at the end of an epoch
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.hidden = getattr(getattr(pl_module, "captured", None), "activations", 0)  # bytes, in a CUDA graph
        self.begun, self.samples = time.perf_counter(), 0
        if self.each == "epoch":
            self.meter = Meter(pl_module.device)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.paused = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.begun += time.perf_counter() - self.paused

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.each == "step":
            self.step = StepMeter(pl_module.device)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.each == "step":
            self.step.stop()
            self.running.append(self.step)
            self._read(trainer.is_last_batch)
        elif self.each and trainer.is_last_batch:  # before a validation
            seconds, peak = self.meter.read()
            self.seconds.append(seconds / (batch_idx + 1))
            self.peak = max(self.peak, peak + self.hidden)
        self.samples += len(batch[0] if isinstance(batch, list | tuple) else batch)
        if trainer.is_last_batch and self.each is None and pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        processes = trainer.world_size / getattr(pl_module, "grid_devices", 1)
        rate = processes * self.samples / (time.perf_counter() - self.begun)
        pl_module.log("samples/s", rate, prog_bar=True, batch_size=1)
        if trainer.is_last_batch:
            self.throughput.append(rate)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._read(True)

    def _read(self, wait: bool) -> None:
        """Take the measures of the steps that are done; wait: of all."""
        while self.running and (wait or self.running[0].done):
            seconds, peak = self.running.popleft().read()
            self.seconds.append(seconds)
            self.peak = max(self.peak, peak + self.hidden)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._read(True)
        checkpoint["cost"] = [self.seconds, self.peak, self.throughput]

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.seconds, self.peak, self.throughput = checkpoint["cost"]

    def measured(self) -> dict[str, float | None]:
        """Return, for metrics.json, step_ms, the median, peak_memory_gb and samples_per_second, the median over epochs.
        None: not trained here, not measured, or no GPU."""
        return {
            "step_ms": 1e3 * statistics.median(self.seconds) if self.seconds else None,
            "peak_memory_gb": self.peak / 1e9 or None,
            "samples_per_second": statistics.median(self.throughput) if self.throughput else None,
        }


def parameter_count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def training_costs(net: nn.Module, monitor: CostMonitor) -> dict[str, Any]:
    """Return costs for metrics.json from a "step" monitor. state_size: None if not fixed."""
    steps = {"steps": len(monitor.seconds), "train_seconds": sum(monitor.seconds)}
    return {"parameters": parameter_count(net), **steps, **monitor.measured(), "state_size": state_size(net)}


def case_costs(net: nn.Module, monitor: CostMonitor, cases: Collection[Cost], shape: Sequence[int]) -> dict[str, Any]:
    """Return, for metrics.json, costs of training and of predicting cases; None: not measured.

    gflops: of a forward of an input of `shape`, see `forward_flops`. case_seconds: the median over
    `cases`. case_memory_gb: the maximum over `cases`.
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
    """Return the FLOPs of a forward in evaluation: two for every multiply-add in matrix products,
    convolutions and torch's attention; nothing else counts, such as norms and activations.

    Counted with the torch implementation of all operators, whatever kernels the device has, on fake tensors, so that
    all networks are counted alike, and at any shape. None for a network whose forward needs the values of tensors.
    """
    copy = deepcopy(net)
    copy.cpu().eval()
    for module in copy.modules():
        if hasattr(module, "impl"):
            module.impl = "torch"  # type: ignore[assignment]
    count = FlopCounterMode(display=False)
    plain = sdpa_kernel(SDPBackend.MATH)  # some torch versions do not count fused CPU attention
    try:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), plain, count:
            copy(torch.empty(*shape))
    except Exception:  # a network may raise anything; a test of hours must go on
        return None
    return int(count.get_total_flops())


def state_size(net: nn.Module) -> int | None:
    """Return how many numbers a mixer of `net` holds of past tokens, the mean over layers rounded
    to an integer; None if that of a layer grows."""
    mixers = [getattr(block, "mixer", None) for block in getattr(net, "blocks", ())]
    sizes = [getattr(mixer, "state_size", None) for mixer in mixers]
    numbers = [size for size in sizes if size is not None]
    return round(statistics.mean(numbers)) if numbers and len(numbers) == len(sizes) else None


def latencies(task: L.LightningModule, *inputs: Tensor) -> dict[str, float]:
    """Return the milliseconds of a forward pass of `task.net`, in the precision of tests, for a
    batch and for its first sample."""
    net: Any = task.net
    batches = {"latency_ms": inputs, "latency_one_ms": [x[:1] for x in inputs]}
    with torch.no_grad(), task.trainer.precision_plugin.forward_context():
        return {name: 1e3 * median_seconds(partial(net, *batch), task.device) for name, batch in batches.items()}


def median_seconds(call: Callable[[], Any], device: torch.device, most: int = 30, budget: float = 2.0) -> float:
    """Return the median time of `most` calls, each with its wait for the device, or of fewer (3 at
    least) if they take more than `budget` seconds. Two calls before them are not timed."""
    seconds: list[float] = []
    for number in range(2 + most):
        if len(seconds) >= 3 and sum(seconds) > budget:
            break
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= 2:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
