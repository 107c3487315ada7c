"""Steps from graphs are steps of AdamW; making a graph moves nothing."""

import gc

import pytest
import torch
from torch import nn

from ndlightnet_evidence.graphs import Replay, Steps


def nets(device):
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 2)).to(device)
    other = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 2)).to(device)
    other.load_state_dict(one.state_dict())
    return one, other


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))],
)
def test_steps_are_those_of_adamw(device):
    """With batches of two shapes, the second of which appears later, and rates that change."""
    one, other = nets(device)

    def loss_of(net):
        return lambda x, y: nn.functional.cross_entropy(net(x), y)

    steps = Steps(one, loss_of(one), 0.1, 0.5)
    groups = [
        {"params": [p for p in other.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in other.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1.0)
    for number, size in enumerate((4, 4, 6, 4, 6)):
        x = torch.randn(size, 3, device=device)
        y, rate = torch.randint(2, (size,), device=device), 0.01 * (1 + number)
        found = float(steps(rate, x, y))
        loss = loss_of(other)(x, y)
        adamw.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()
        assert found == pytest.approx(float(loss), rel=1e-5)
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b)
    assert len(steps.replays) == 2


def test_a_replay_takes_shorter_inputs():
    replay = Replay(lambda x: 2 * x, torch.zeros(4, 2))
    assert torch.equal(replay(torch.ones(3, 2))[:3], torch.full((3, 2), 2.0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_an_old_graph_is_not_freed_during_a_capture():
    """A graph in a cycle lives until the garbage collector runs, which may be at any time."""
    gc.disable()  # nothing but the calls below
    try:
        old = Replay(lambda x: 2 * x, torch.zeros(4, device="cuda"))
        old.me = old
        del old

        def function(x):
            if torch.cuda.is_current_stream_capturing():
                gc.collect()
            return 3 * x

        replay = Replay(function, torch.zeros(4, device="cuda"))
        assert torch.equal(replay(torch.ones(4, device="cuda")).cpu(), torch.full((4,), 3.0))
    finally:
        gc.enable()
