"""Costs: operations against formulas, the clock and the peak against what they are read from."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ndlightnet import NDLightUNet
from ndlightnet.nn import mixers
from ndlightnet.training import SegmentationTask
from ndlightnet.training.core import costs
from ndlightnet.training.core.costs import Meter, MeteredTask, forward_flops
from ndlightnet.training.peers import DynUNet, SegResNet

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
    "TNL": lambda: NDLightUNet(3, widths=[4, 8], depths=[0, 1], mixer=mixers.TNL),
    "WindowAttention": lambda: NDLightUNet(
        3, widths=[4, 8], depths=[0, 1], mixer=mixers.WindowAttention
    ),
    "DynUNet": lambda: DynUNet(3, 1, 2, strides=[2, [1, 2, 2]]),
    "SegResNet": lambda: SegResNet(3, 1, 2, init_filters=8),
}


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


def trained(monkeypatch, epochs: list[tuple[float, int]], batches: int = 4) -> MeteredTask:
    """A task after epochs of so many seconds and bytes."""
    ahead = iter(epochs)
    meter = SimpleNamespace(read=lambda: next(ahead))
    monkeypatch.setattr(costs, "Meter", lambda device: meter)
    task = MeteredTask()
    task.net = nn.Linear(7, 3)
    optimizer = SimpleNamespace(step=lambda closure: None)
    data = SimpleNamespace(seed=0)
    task._trainer = trainer = SimpleNamespace(datamodule=data, current_epoch=0, global_rank=0)
    for _ in epochs:
        task.on_train_epoch_start()
        for number in range(batches):
            trainer.is_last_batch = number == batches - 1
            task.optimizer_step(0, number, optimizer, None)
    return task


def test_costs_of_a_training_and_its_answers(monkeypatch):
    task = trained(monkeypatch, [(8.0, 3 * 10**9), (2.0, 10**9), (4.0, 2 * 10**9)])
    answers = [(5.0, 10**8), (1.0, 4 * 10**8), (2.0, 10**8)]
    assert task.costs(answers, (1, 7)) == {
        "parameters": 24, "gflops": 42e-9, "step_ms": 1000.0, "peak_memory_gb": 3.0,
        "case_seconds": 2.0, "case_memory_gb": 0.4,
    }  # fmt: skip


def test_without_a_training_and_a_card():
    task = MeteredTask()
    task.net = nn.Linear(7, 3)
    found = task.costs([(5.0, 0)], (1, 7))
    assert (found["step_ms"], found["peak_memory_gb"], found["case_memory_gb"]) == (None,) * 3


def test_checkpoints_keep_the_cost(monkeypatch, tmp_path):
    task, other = trained(monkeypatch, [(8.0, 5), (2.0, 6)]), MeteredTask()
    data = SimpleNamespace(names=dict, set_names=lambda names: None)
    for one in (task, other):
        one.data = lambda: data
    saved: dict[str, object] = {}
    task.on_save_checkpoint(saved)
    torch.save(saved, tmp_path / "x.ckpt")
    other.on_load_checkpoint(torch.load(tmp_path / "x.ckpt", weights_only=True))
    assert other.trained == [(2.0, 5), (0.5, 6)]


def test_a_run_writes_its_costs(decathlon, segment, tmp_path, monkeypatch):
    """Of two steps in 3 s, read before the validation, and of one case, on the CPU."""
    events, validation_step = [], SegmentationTask.validation_step
    reading = SimpleNamespace(read=lambda: events.append("read") or (3.0, 0))

    def validate(task, *args):
        events.append("validation")
        validation_step(task, *args)

    monkeypatch.setattr(SegmentationTask, "validation_step", validate)
    monkeypatch.setattr(costs, "Meter", lambda device: reading)
    common = (f"--trainer.default_root_dir={tmp_path}", f"--data.init_args.root={decathlon}",
              "--model.net.init_args.out_channels=2")  # fmt: skip
    assert segment("fit", *common).status == 0
    assert events[-2:] == ["read", "validation"] and events.count("read") == 1
    assert segment("test", *common, f"--ckpt_path={tmp_path}/checkpoints/last.ckpt").status == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert metrics["parameters"] == sum(x.numel() for k, x in saved.items() if k[:4] == "net.")
    assert metrics["gflops"] > 0 and metrics["step_ms"] == 1500 and metrics["case_seconds"] > 0
    assert metrics["peak_memory_gb"] is None and metrics["case_memory_gb"] is None
