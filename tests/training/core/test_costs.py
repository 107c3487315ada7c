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

SPACE = (9, 14, 11)


def test_flops_of_convolutions_and_products():
    conv = nn.Conv3d(2, 5, 3, padding=1)
    assert forward_flops(conv, (1, 2, *SPACE)) == 2 * 9 * 14 * 11 * 5 * 2 * 27
    up = nn.ConvTranspose2d(3, 4, 2, stride=2)  # each of the input's cells times a whole kernel
    assert forward_flops(up, (1, 3, 7, 5)) == 2 * 7 * 5 * 3 * 4 * 4
    assert forward_flops(nn.Linear(7, 3), (11, 7)) == 2 * 11 * 7 * 3
    assert forward_flops(nn.SiLU(), (11, 7)) == 0


def test_softmax_attention_has_its_square():
    """Projections and two products of all pairs."""
    n, dim = 3 * 4 * 5, 64
    net = mixers.SoftmaxAttention(dim)
    assert forward_flops(net, (1, 3, 4, 5, dim)) == 4 * 2 * n * dim**2 + 2 * 2 * n**2 * dim


NETS = {
    "LightNet": lambda: NDLightUNet(3, widths=[4, 8], depths=[0, 1], deep_supervision=True),
    "WindowAttention": lambda: NDLightUNet(3, widths=[4, 8], depths=[0, 1], mixer=mixers.WindowAttention),
    "SegResNet": lambda: SegResNet(3, 1, 2, init_filters=8),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_without_memory_it_counts_what_a_forward_does(name):
    """And leaves the network, in training here, as it was."""
    net = NETS[name]().train()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    found = forward_flops(net, (1, 1, *SPACE))
    assert net.training and all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    with torch.no_grad(), FlopCounterMode(display=False) as count:
        net.eval()(torch.zeros(1, 1, *SPACE))
    assert found == count.get_total_flops() > 0


@pytest.mark.slow
def test_a_large_patch_takes_no_memory():
    """A terabyte, if there were numbers; convolutions cost as many as there are cells."""
    net = SegResNet(3, 1, 2)
    small, large = (forward_flops(net, (1, 1, n, n, n)) for n in (64, 1024))
    assert small is not None and large == 16**3 * small


def test_whatever_a_network_runs_on_its_torch_form_is_counted():
    one, other = (mixers.LightNetAttention(16, impl=impl) for impl in ("torch", "triton"))
    shape = (1, 5, 7, 16)
    assert forward_flops(one, shape) == forward_flops(other, shape) > 0
    assert other.impl == "triton"


def test_a_network_that_needs_numbers_is_not_counted():
    class Choosy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if bool(x.sum() > 0) else x

    assert forward_flops(Choosy(3, 3), (2, 3)) is None


def test_a_network_with_a_graph_in_its_place():
    """torch.cuda.make_graphed_callables puts a forward there that knows the weights on the card."""
    net = nn.Linear(7, 3)
    net.forward = lambda x: pytest.fail("the graph was asked")
    assert forward_flops(net, (11, 7)) == 2 * 11 * 7 * 3


def test_the_meter_on_a_card(monkeypatch):
    """The peak is set back before, and the clock is read after the device is done."""
    seen = []
    monkeypatch.setattr(costs.torch.cuda, "synchronize", lambda _: seen.append("wait"))
    monkeypatch.setattr(costs.torch.cuda, "reset_peak_memory_stats", lambda _: seen.append("reset"))
    monkeypatch.setattr(costs.torch.cuda, "max_memory_allocated", lambda _: 12345)
    monkeypatch.setattr(costs.time, "perf_counter", lambda: seen.append("clock") or len(seen))
    meter = Meter(torch.device("cuda", 0))
    assert seen == ["wait", "reset", "clock"]
    assert meter.read() == (2, 12345) and seen[3:] == ["wait", "clock"]


def trained(monkeypatch, each: str, readings: list[tuple[float, int]], epochs: int = 1):
    """A monitor after epochs of four steps, read by a meter of ours."""
    ahead = iter(readings)
    monkeypatch.setattr(costs, "Meter", lambda device: SimpleNamespace(read=lambda: next(ahead)))
    monitor, batch = CostMonitor(each), (torch.zeros(2, 3), torch.zeros(2))
    task = SimpleNamespace(device=torch.device("cpu"), log=lambda *_, **__: None)
    for _ in range(epochs):
        monitor.on_train_epoch_start(None, task)
        for number in range(4):
            trainer = SimpleNamespace(is_last_batch=number == 3, world_size=1)
            monitor.on_train_batch_start(trainer, task, batch, number)
            monitor.on_train_batch_end(trainer, task, None, batch, number)
    assert next(ahead, None) is None
    return monitor


def test_costs_of_epochs_and_cases(monkeypatch):
    readings = [(8.0, 3 * 10**9), (2.0, 10**9), (4.0, 2 * 10**9)]
    monitor, net = trained(monkeypatch, "epoch", readings, 3), nn.Linear(7, 3)
    monitor.throughput = [30.0, 10.0, 20.0]
    cases = [(5.0, 10**8), (1.0, 4 * 10**8), (2.0, 10**8)]
    assert case_costs(net, monitor, cases, (1, 7)) == {
        "parameters": 24,
        "gflops": 42e-9,
        "step_ms": 1000.0,
        "peak_memory_gb": 3.0,
        "samples_per_second": 20.0,
        "case_seconds": 2.0,
        "case_memory_gb": 0.4,
    }


def test_an_epoch_that_was_begun_before_the_checkpoint(monkeypatch):
    """Lightning starts none then: the time of its rest counts."""
    monkeypatch.setattr(costs, "Meter", lambda device: SimpleNamespace(read=lambda: (3.0, 0)))
    monitor = CostMonitor("epoch")
    task = SimpleNamespace(device=torch.device("cpu"), log=lambda *_, **__: None)
    monitor.on_train_start(None, task)
    trainer = SimpleNamespace(is_last_batch=True, world_size=1)
    monitor.on_train_batch_end(trainer, task, None, torch.zeros(3), 2)
    assert monitor.seconds == [1.0]


def test_costs_of_steps(monkeypatch):
    monitor = trained(monkeypatch, "step", [(0.5, 10**9), (0.1, 0), (0.2, 2 * 10**9), (0.2, 0)])
    monitor.throughput = [8.0, 6.0]
    assert training_costs(nn.Linear(7, 3), monitor) == {
        "parameters": 24,
        "steps": 4,
        "train_seconds": 1.0,
        "step_ms": 200.0,
        "peak_memory_gb": 2.0,
        "samples_per_second": 7.0,
        "state_size": None,
    }


def test_without_a_training_and_a_card():
    found = case_costs(nn.Linear(7, 3), CostMonitor("epoch"), [(5.0, 0)], (1, 7))
    assert (found["step_ms"], found["peak_memory_gb"], found["case_memory_gb"]) == (None,) * 3


def test_checkpoints_keep_the_cost(monkeypatch, tmp_path):
    monitor, other = trained(monkeypatch, "epoch", [(8.0, 5), (2.0, 6)], 2), CostMonitor("epoch")
    saved: dict[str, object] = {}
    monitor.on_save_checkpoint(None, None, saved)
    torch.save(saved, tmp_path / "x.ckpt")
    other.on_load_checkpoint(None, None, torch.load(tmp_path / "x.ckpt", weights_only=True))
    assert (other.seconds, other.peak, other.throughput) == ([2.0, 0.5], 6, monitor.throughput)


def test_samples_a_second_without_the_validations(monkeypatch):
    """Of all processes, in the progress bar, and of whole epochs in the checkpoint."""
    clock, logged = [0.0], []
    monkeypatch.setattr(costs.time, "perf_counter", lambda: clock[0])
    task = SimpleNamespace(device=torch.device("cpu"))
    task.log = lambda name, value, **how: logged.append((name, value, how["prog_bar"]))
    monitor = CostMonitor(None)
    monitor.on_train_epoch_start(None, task)
    for number, batch in enumerate([torch.zeros(6, 2), (torch.zeros(1, 9), torch.zeros(4))]):
        clock[0] += 2
        trainer = SimpleNamespace(is_last_batch=number == 1, world_size=3)
        monitor.on_train_batch_end(trainer, task, None, batch, number)
        monitor.on_validation_start(trainer, task)
        clock[0] += 100
        monitor.on_validation_end(trainer, task)
    assert logged == [("samples/s", rate, True) for rate in (9.0, 7.5)]
    assert monitor.throughput == [7.5] and monitor.seconds == []
    assert monitor.measured() == {"step_ms": None, "peak_memory_gb": None, "samples_per_second": 7.5}


def test_it_is_the_first_of_the_callbacks():
    """What others do at the end of a step costs the network nothing."""
    monitor, other = CostMonitor(), lightning.Callback()
    trainer = SimpleNamespace(callbacks=[other, monitor])
    monitor.on_fit_start(trainer, None)
    assert trainer.callbacks == [monitor, other]


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
    common = (
        f"--trainer.default_root_dir={tmp_path}",
        f"--data.init_args.root={decathlon}",
        "--model.net.init_args.out_channels=2",
    )
    assert segment("fit", *common).status == 0
    assert events[-2:] == ["read", "validation"] and events.count("read") == 1
    assert segment("test", *common, f"--ckpt_path={tmp_path}/checkpoints/last.ckpt").status == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert metrics["parameters"] == sum(x.numel() for k, x in saved.items() if k[:4] == "net.")
    assert metrics["gflops"] > 0 and metrics["step_ms"] == 1500 and metrics["case_seconds"] > 0
    assert metrics["peak_memory_gb"] is None and metrics["case_memory_gb"] is None


@pytest.mark.parametrize(
    "seconds, expected, calls",
    [([9, 9, 1, 2, 6], 2, 5), ([9, 9, *[0.25] * 30], 0.25, 11), ([9, 9, *[0.01] * 30], 0.01, 32)],
)
def test_median_after_warm_up(monkeypatch, seconds, expected, calls):
    """Two calls do not count; it ends after 30, or sooner when they last 2 seconds, but not
    before 3."""
    clock, done = [0.0], []

    def call():
        clock[0] += seconds[len(done)]
        done.append(None)

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    assert median_seconds(call, torch.device("cpu")) == pytest.approx(expected)
    assert len(done) == calls


def test_latency_is_that_of_tests_of_a_batch_and_of_one():
    seen = set()

    class Net(torch.nn.Module):
        def forward(self, x):
            seen.add((tuple(x.shape), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
            return x

    task = Task(Net())
    task.trainer = lightning.Trainer(
        accelerator="cpu", precision="bf16-mixed", logger=False, enable_checkpointing=False
    )
    found = latencies(task, torch.zeros(4, 2))
    assert set(found) == {"latency_ms", "latency_one_ms"}
    assert seen == {((4, 2), True, False), ((1, 2), True, False)}


def test_state_size():
    class Sized(mixers.Identity):
        def __init__(self, dim: int, size: int = 40) -> None:
            super().__init__(dim)
            self.size = size

        @property
        def state_size(self) -> int:
            return self.size

    net = NDLightNet(1, 1, 2, patch_size=1, embed_dim=8, depth=2, mixer=Sized)
    assert state_size(net) == 40
    net.blocks[1].mixer.size = 50
    assert state_size(net) == 45
    net.blocks[1].mixer = mixers.SoftmaxAttention(8)
    assert state_size(net) is None and state_size(torch.nn.Linear(2, 2)) is None
