"""Steps from graphs are steps of AdamW and of an average; making a graph moves nothing."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ndlightnet_evidence.cuda_graphs import Steps

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_cuda)])
def test_steps_are_those_of_adamw_and_the_average_follows(device):
    """With batches of two shapes, the second of which appears later, and rates that change."""
    layers = (partial(nn.Linear, 3, 8, bias=False), partial(nn.BatchNorm1d, 8), partial(nn.Linear, 8, 2))
    net, plain = (nn.Sequential(*(layer() for layer in layers)).to(device) for _ in range(2))
    plain.load_state_dict(net.state_dict())
    average = {name: value.clone().double() for name, value in net.state_dict().items()}
    decays = (0.1, 0.2, 0.5, 0.4, 0.3)
    steps = Steps(net, lambda x, y: cross_entropy(net(x), y), 0.1, 0.5, decays.__getitem__)
    groups = [
        {"params": [p for p in plain.parameters() if p.ndim == ndim], "weight_decay": decay}
        for ndim, decay in ((2, 0.1), (1, 0.0))
    ]
    adamw = torch.optim.AdamW(groups, lr=1.0)
    for number, size in enumerate((4, 4, 6, 4, 6)):
        x = torch.randn(size, 3, device=device)
        y, rate = torch.randint(2, (size,), device=device), 0.01 * (1 + number)
        value = float(steps(rate, x, y))
        loss = cross_entropy(plain(x), y)
        adamw.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()
        assert value == pytest.approx(loss.item(), rel=1e-5)
        torch.testing.assert_close(list(net.parameters()), list(plain.parameters()))
        for name, value in net.state_dict().items():
            average[name] = decays[number] * average[name] + (1 - decays[number]) * value
    assert len(steps.replays) == 2
    for name, value in steps.averaged.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value.double(), average[name], rtol=1e-5, atol=1e-6)
