"""Gradient checkpointing and torch.compile change neither losses, gradients nor names."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ndlightnet import NDLightNet, NDLightUNet
from ndlightnet.models import Forecaster
from ndlightnet.nn import Block
from ndlightnet.training import ForecastTask, ImageTask, SegmentationTask
from ndlightnet.training.core import speed

LABELS, NUMBERS = torch.tensor([0, 2]), torch.arange(2)
SMALL = {"embed_dim": 8, "depth": 2, "tpe_states": 2}


# of each task: its network, and a batch as its loader makes them
KINDS = {
    "image": (
        ImageTask,
        lambda: NDLightNet(2, 1, 3, patch_size=2, drop_rate=0.3, **SMALL),
        lambda: (torch.randn(2, 1, 4, 6), LABELS, NUMBERS),
    ),
    "segmentation": (
        SegmentationTask,
        lambda: NDLightUNet(3, 1, 3, widths=[2, 4], depths=[0, 1], convs=[1, 1]),
        lambda: (torch.randn(2, 1, 4, 4, 4), torch.randint(3, (2, 1, 4, 4, 4)), NUMBERS),
    ),
    "forecast": (
        ForecastTask,
        lambda: Forecaster(2, 4, embed_dim=8, depth=1),
        lambda: (torch.randn(2, 6, 2), torch.randn(2, 9, 4), torch.randn(2, 3, 2), NUMBERS),
    ),
}


def step(kind: str, **flags: bool) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The loss and all gradients of a training step, and the names in a checkpoint."""
    task_type, net, batch = KINDS[kind]
    torch.manual_seed(0)
    task = task_type(net(), **flags).train()
    task.log = lambda *_, **__: None
    task._trainer = SimpleNamespace(datamodule=SimpleNamespace(target_places=[0, 1]))  # a forecast's step asks it
    torch.manual_seed(1)
    batch = batch()
    torch.manual_seed(2)  # dropout
    loss = task.training_step(batch, 0)
    loss.backward()
    grads = {name: p.grad for name, p in task.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}, list(task.state_dict())


def compare(close, kind: str, **flags: bool) -> None:
    (plain, names), (changed, same) = step(kind), step(kind, **flags)
    assert same == names and changed.keys() == plain.keys() and len(plain) > 10
    scale = max(float(x.abs().max()) for x in plain.values())
    for name, value in plain.items():
        assert float((changed[name] - value).abs().max()) < 1e-5 * scale, name
    close(changed["loss"], plain["loss"], 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_is_plain(close, kind, monkeypatch):
    ran, forward = [], Block.forward

    def counted(block, *inputs, **named):
        ran.append(torch.is_grad_enabled())
        return forward(block, *inputs, **named)

    monkeypatch.setattr(Block, "forward", counted)
    blocks = sum(type(m).forward is Block.forward for m in KINDS[kind][1]().modules())
    compare(close, kind, grad_checkpointing=True)
    assert len(ran) == 3 * blocks > 0  # once, then once forwards and once backwards


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grad_checkpointing", (False, True))
def test_offloaded_is_plain(close, kind, grad_checkpointing, monkeypatch):
    packed = []

    class Watched(torch.autograd.graph.save_on_cpu):
        def __init__(self, **options):
            super().__init__(**options)
            pack = self.pack_hook
            self.pack_hook = lambda x: packed.append(x.shape) or pack(x)

    monkeypatch.setattr("ndlightnet.training.core.task.save_on_cpu", Watched)
    compare(close, kind, offload=True, grad_checkpointing=grad_checkpointing)
    assert packed


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_through_what_is_compiled(kind, monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "compile", lambda net: lambda *inputs: calls.append(net) or net(*inputs))
    results, names = step(kind, compile=True)
    assert len(calls) == 1 and names == step(kind)[1]
    assert torch.equal(results["loss"], step(kind)[0]["loss"])


@pytest.mark.slow
def test_compiled_is_plain(close, monkeypatch):
    """Traced as for Inductor, but run by torch: its C++ takes a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    compare(close, "image", compile=True, grad_checkpointing=True)


def test_what_checkpointing_refuses_and_leaves(monkeypatch):
    """A network without blocks; an evaluation, which has nothing to compute again."""
    with pytest.raises(ValueError, match="grad_checkpointing=True: Linear has no blocks"):
        ImageTask(nn.Linear(2, 2), grad_checkpointing=True)
    net = Forecaster(2, 4, embed_dim=8, depth=1)
    speed.checkpoint_blocks(net)
    monkeypatch.setattr(speed, "checkpoint", lambda *_, **__: pytest.fail("in evaluation"))
    net.eval()(torch.randn(2, 6, 2), torch.randn(2, 9, 4))
