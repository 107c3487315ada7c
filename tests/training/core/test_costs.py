"""Costs: operations against formulas, the clock and the peak against what they are read from."""

import json
from types import SimpleNamespace

import lightning
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ndlightnet import NDLightNet, NDLightUNet
from ndlightnet.nn import mixers
from ndlightnet.training import SegmentationTask
from ndlightnet.training.core import costs
from ndlightnet.training.core.costs import (
    CostMonitor,
    Meter,
    case_costs,
    forward_flops,
    latencies,
    median_seconds,
    state_size,
    training_costs,
)
from ndlightnet.training.core.task import Task
from ndlightnet.training.peers import SegResNet
from tests.training.conftest import last

LINEAR = nn.Linear(7, 3)
N, DIM = 3 * 4 * 5, 64


@pytest.mark.parametrize(
    "net, shape, flops",
    [
        (nn.Conv3d(2, 5, 3, padding=1), (1, 2, 9, 14, 11), 2 * 9 * 14 * 11 * 5 * 2 * 27),
        # a terabyte, if there were numbers
        (nn.Conv3d(1, 1, 3, padding=1), (1, 1, 10**4, 10**4, 10**4), 2 * 10**12 * 27),
        # each of the input's cells times a whole kernel
        (nn.ConvTranspose2d(3, 4, 2, stride=2), (1, 3, 7, 5), 2 * 7 * 5 * 3 * 4 * 4),
        (LINEAR, (11, 7), 2 * 11 * 7 * 3),
        (nn.SiLU(), (11, 7), 0),
        # projections and two products of all pairs
        (mixers.SoftmaxAttention(DIM), (1, 3, 4, 5, DIM), 4 * 2 * N * DIM**2 + 2 * 2 * N**2 * DIM),
    ],
)
def test_flops(net, shape, flops):
    assert forward_flops(net, shape) == flops


@pytest.mark.slow
@pytest.mark.parametrize(
    "build",
    [
        lambda: NDLightUNet(3, widths=[4, 8, 8], depths=[0, 0, 1], deep_supervision=True),  # more outputs in training
        lambda: SegResNet(3, 1, 2, init_filters=8),
    ],
)
def test_flops_are_those_of_a_forward_and_leave_the_network_as_it_was(build):
    net, shape = build().train(), (1, 1, 9, 14, 11)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    flops = forward_flops(net, shape)
    assert net.training and all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    with torch.no_grad(), FlopCounterMode(display=False) as count:
        net.eval()(torch.zeros(shape))
    assert flops == count.get_total_flops() > 0


def test_flops_of_odd_networks():
    """Of a kernel those of its torch form; where the forward needs numbers, none."""
    plain, kernel = (mixers.LightNetAttention(16, impl=impl) for impl in ("torch", "triton"))
    assert forward_flops(plain, (1, 5, 7, 16)) == forward_flops(kernel, (1, 5, 7, 16)) > 0
    assert kernel.impl == "triton"

    class Choosy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if bool(x.sum() > 0) else x

    assert forward_flops(Choosy(3, 3), (2, 3)) is None


def test_the_meter_on_a_card(monkeypatch):
    """The peak is set back before, and the clock is read after the device is done."""
    calls = []
    monkeypatch.setattr(costs.torch.cuda, "synchronize", lambda _: calls.append("wait"))
    monkeypatch.setattr(costs.torch.cuda, "reset_peak_memory_stats", lambda _: calls.append("reset"))
    monkeypatch.setattr(costs.torch.cuda, "max_memory_allocated", lambda _: 12345)
    monkeypatch.setattr(costs.time, "perf_counter", lambda: calls.append("clock") or len(calls))
    meter = Meter(torch.device("cuda", 0))
    assert calls == ["wait", "reset", "clock"]
    assert meter.read() == (2, 12345) and calls[3:] == ["wait", "clock"]


# the memory of a graph is in no peak of its replays
GRAPH = SimpleNamespace(activations=5 * 10**8)
TASK = SimpleNamespace(device=torch.device("cpu"), log=lambda *_, **__: None, captured=GRAPH)


def trained(monkeypatch, each: str, readings: list[tuple[float, int]], epochs: int = 1) -> CostMonitor:
    """A monitor after epochs of four steps, read by a meter of ours."""
    ahead = iter(readings)
    meter = SimpleNamespace(read=lambda: next(ahead), stop=lambda: None, done=True)
    for name in ("Meter", "StepMeter"):
        monkeypatch.setattr(costs, name, lambda device: meter)
    monitor, batch = CostMonitor(each), (torch.zeros(2, 3), torch.zeros(2))
    for _ in range(epochs):
        monitor.on_train_epoch_start(None, TASK)
        for number in range(4):
            trainer = SimpleNamespace(is_last_batch=number == 3, world_size=1)
            monitor.on_train_batch_start(trainer, TASK, batch, number)
            monitor.on_train_batch_end(trainer, TASK, None, batch, number)
    assert next(ahead, None) is None
    return monitor


def test_costs_of_epochs_and_cases(monkeypatch, tmp_path):
    """Which a checkpoint keeps."""
    first = trained(monkeypatch, "epoch", [(8.0, 3 * 10**9), (2.0, 10**9), (4.0, 2 * 10**9)], 3)
    first.throughput, monitor, saved = [30.0, 10.0, 20.0], CostMonitor("epoch"), {}
    first.on_save_checkpoint(None, None, saved)
    torch.save(saved, tmp_path / "x.ckpt")
    monitor.on_load_checkpoint(None, None, torch.load(tmp_path / "x.ckpt", weights_only=True))
    assert case_costs(LINEAR, monitor, [(5.0, 10**8), (1.0, 4 * 10**8), (2.0, 10**8)], (1, 7)) == {
        "parameters": 24,
        "gflops": 42e-9,
        "step_ms": 1000.0,
        "peak_memory_gb": 3.5,
        "samples_per_second": 20.0,
        "case_seconds": 2.0,
        "case_memory_gb": 0.4,
    }
    untrained = case_costs(LINEAR, CostMonitor("epoch"), [(5.0, 0)], (1, 7))
    assert [untrained[name] for name in ("step_ms", "peak_memory_gb", "case_memory_gb")] == [None] * 3
    # Lightning starts no epoch that was begun before the checkpoint: the time of its rest counts
    monkeypatch.setattr(costs, "Meter", lambda device: SimpleNamespace(read=lambda: (3.0, 0)))
    monitor = CostMonitor("epoch")
    monitor.on_train_start(None, TASK)
    monitor.on_train_batch_end(SimpleNamespace(is_last_batch=True, world_size=1), TASK, None, torch.zeros(3), 2)
    assert monitor.seconds == [1.0]


def test_costs_of_steps(monkeypatch):
    monitor = trained(monkeypatch, "step", [(0.5, 10**9), (0.1, 0), (0.2, 2 * 10**9), (0.2, 0)])
    monitor.throughput = [8.0, 6.0]
    assert training_costs(LINEAR, monitor) == {
        "parameters": 24,
        "steps": 4,
        "train_seconds": 1.0,
        "step_ms": 200.0,
        "peak_memory_gb": 2.5,
        "samples_per_second": 7.0,
        "state_size": None,
    }


def test_steps_on_a_card_are_timed_by_events_and_waited_for_at_the_end(monkeypatch):
    """Of four steps, of which the card has done two when the third ends."""
    done, waits, events = [0], [], []

    class Event:
        def __init__(self, enable_timing):
            events.append(self)

        def record(self, stream):
            self.number = len(events) - 1  # start and end of each step in turn

        def query(self):
            return self.number < done[0]

        def synchronize(self):
            waits.append(self.number)

        def elapsed_time(self, end):
            return 1e3 * (end.number + self.number)

    monkeypatch.setattr(costs.torch.cuda, "Event", Event)
    monkeypatch.setattr(costs.torch.cuda, "synchronize", lambda _: pytest.fail("waited for the card"))
    for name, value in (("current_stream", None), ("reset_peak_memory_stats", None), ("max_memory_allocated", 7)):
        monkeypatch.setattr(costs.torch.cuda, name, lambda _, value=value: value)
    task, monitor = SimpleNamespace(device=torch.device("cuda", 0), log=TASK.log), CostMonitor("step")
    monitor.on_train_epoch_start(None, task)
    for number, ready in enumerate((0, 0, 4, 4)):
        done[0] = ready
        trainer = SimpleNamespace(is_last_batch=False, world_size=1)
        monitor.on_train_batch_start(trainer, task, None, number)
        monitor.on_train_batch_end(trainer, task, None, torch.zeros(3), number)
        assert len(monitor.seconds) == ready // 2
    monitor.on_train_end(trainer, task)
    assert monitor.seconds == [1.0, 5.0, 9.0, 13.0] and monitor.peak == 7 and waits == [1, 3, 5, 7]


def test_samples_a_second_without_the_validations(monkeypatch):
    """Of all processes, in the progress bar, and of whole epochs in the checkpoint."""
    clock, logged = [0.0], []
    monkeypatch.setattr(costs.time, "perf_counter", lambda: clock[0])
    task = SimpleNamespace(device=torch.device("cpu"))
    task.log = lambda name, value, **options: logged.append((name, value, options["prog_bar"]))
    monitor, last = CostMonitor(None), lightning.Callback()
    callbacks = SimpleNamespace(callbacks=[last, monitor])
    monitor.on_fit_start(callbacks, None)
    assert callbacks.callbacks == [monitor, last]  # what others do at the end of a step costs the network nothing
    monitor.on_train_epoch_start(None, task)
    for number, batch in enumerate([torch.zeros(6, 2), (torch.zeros(4, 2), torch.zeros(9))]):
        clock[0] += 2
        trainer = SimpleNamespace(is_last_batch=number == 1, world_size=3)
        monitor.on_train_batch_end(trainer, task, None, batch, number)
        monitor.on_validation_start(trainer, task)
        clock[0] += 100
        monitor.on_validation_end(trainer, task)
    assert logged == [("samples/s", rate, True) for rate in (9.0, 7.5)]
    assert monitor.throughput == [7.5] and monitor.seconds == []
    assert monitor.measured() == {"step_ms": None, "peak_memory_gb": None, "samples_per_second": 7.5}


@pytest.mark.slow
def test_a_run_writes_its_costs(decathlon, segment, tmp_path, monkeypatch):
    """Of two steps in 3 s, read before the validation, and of one case, on the CPU."""
    events, validation_step = [], SegmentationTask.validation_step
    reading = SimpleNamespace(read=lambda: events.append("read") or (3.0, 0))

    def validate(task, *args):
        events.append("validation")
        validation_step(task, *args)

    monkeypatch.setattr(SegmentationTask, "validation_step", validate)
    monkeypatch.setattr(costs, "Meter", lambda device: reading)
    places = {"out": tmp_path, "root": decathlon, "net": {"out_channels": 2}}
    segment("fit", **places).well()
    assert events[-2:] == ["read", "validation"] and events.count("read") == 1
    segment("test", **places, ckpt=last(tmp_path)).well()
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    saved = torch.load(last(tmp_path), weights_only=True)["state_dict"]
    assert metrics["parameters"] == sum(x.numel() for k, x in saved.items() if k[:4] == "net.")
    assert metrics["gflops"] > 0 and metrics["step_ms"] == 1500 and metrics["case_seconds"] > 0
    assert metrics["peak_memory_gb"] is None and metrics["case_memory_gb"] is None


def test_latency_is_that_of_tests_of_a_batch_and_of_one():
    calls = set()

    class Net(torch.nn.Module):
        def forward(self, x):
            calls.add((tuple(x.shape), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
            return x

    task = Task(Net())
    options = {"logger": False, "enable_checkpointing": False}
    task.trainer = lightning.Trainer(accelerator="cpu", precision="bf16-mixed", **options)
    milliseconds = latencies(task, torch.zeros(4, 2))
    assert set(milliseconds) == {"latency_ms", "latency_one_ms"} and 0 < max(milliseconds.values()) < 100
    assert calls == {((4, 2), True, False), ((1, 2), True, False)}
    assert 0.01 < median_seconds(lambda: costs.time.sleep(0.01), task.device) < 0.05


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "durations, count",
    [
        ([9.0, 9.0, 0.5, 0.5, 0.75, 0.5], 6),  # after four: 2.25 s
        ([9.0, 9.0, 0.25, 8.0, 0.5], 5),  # three at least
        ([9.0, 9.0, *[2**-6] * 16, *[2**-4] * 14, 9.0], 32),
    ],
)
def test_seconds_are_the_median_of_single_calls(monkeypatch, device, durations, count):
    """Each with its wait: on a GPU a call returns before its work is done."""
    clock, ahead, waits = [0.0], iter(durations), []

    def work(device=None):
        waits.append(device)
        clock[0] += next(ahead)

    monkeypatch.setattr(costs.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(costs.torch.cuda, "synchronize", work)
    call = work if device == "cpu" else lambda: None
    assert median_seconds(call, torch.device(device)) == sorted(durations[2:count])[(count - 2) // 2]
    assert waits == [None if device == "cpu" else torch.device(device)] * count


def test_state_size():
    class Sized(mixers.Identity):
        size = state_size = 40

    net = NDLightNet(1, 1, 2, patch_size=1, embed_dim=8, depth=2, mixer=Sized)
    assert state_size(net) == 40
    net.blocks[1].mixer.state_size = 50
    assert state_size(net) == 45
    net.blocks[1].mixer = mixers.SoftmaxAttention(8)
    assert state_size(net) is None and state_size(LINEAR) is None
