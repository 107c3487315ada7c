"""Forecaster: against its formula written out, what it sees, and what it is asked to mix with."""

import math

import pytest
import torch
from torch import nn
from torch.autograd import grad

from ndlightnet.data.series.regular_series import simple_forecasts
from ndlightnet.models.forecaster import Forecaster
from ndlightnet.nn.mixers import LightNetAttention, SoftmaxAttention


class Mean(nn.Module):
    """A cross form that is simple to write down: the mean of the context."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, *, context=None, mask=None, causal=False):
        if context is None:
            count = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
            mean = x.cumsum(1) / count if causal else x.mean(1, keepdim=True)
        else:
            mean = context.mean(1, keepdim=True)
        return self.proj(mean + 0 * x)


def tiny(label_length: int = 6, **options) -> Forecaster:
    return Forecaster(3, label_length, **{"embed_dim": 16, **options})


def inputs(past: int = 10, horizon: int = 5, dtype=torch.float32):
    return torch.randn(2, past, 3, dtype=dtype), torch.rand(2, past + horizon, 4, dtype=dtype)


@pytest.mark.parametrize("label", [0, 6, 10])
def test_forward_is_its_formula(close, label):
    """Every step by itself, in float64."""
    net = tiny(label, mixer=Mean, cross=Mean).double()
    values, times = inputs(dtype=torch.float64)
    level = values.sum(1, keepdim=True) / 10
    tokens = []
    for step in range(15):
        now = values[:, step] - level[:, 0] if step < 10 else torch.zeros(2, 3).double()
        angles = [step / 10000 ** (j / 8) for j in range(8)]
        place = torch.tensor([f(a) for f in (math.sin, math.cos) for a in angles])
        tokens.append(now @ net.embed.weight.T + net.embed.bias + times[:, step] @ net.embed_time.weight.T + place)
    x = torch.stack(tokens, 1)
    source, x = x[:, :10], x[:, 10 - label :]
    for block in net.encoder:
        source = source + block.mixer(block.norm1(source))
        source = source + block.mlp(block.norm2(source))
    for block in net.decoder:
        x = x + block.mixer(block.norm1(x), causal=True)
        x = x + block.cross(block.norm_cross(x), context=net.encoder_norm(source))
        x = x + block.mlp(block.norm2(x))
    y = level + net.norm(x)[:, label:] @ net.head.weight.T + net.head.bias
    close(net(values, times), y, 1e-5)  # the places are float32


@pytest.mark.parametrize("past, horizon", [(48, 30), (50, 1), (24, 100)])
def test_without_a_network_it_is_the_mean_day(past, horizon):
    """And what the network reads of the known steps is the difference to it."""
    net, calls = tiny(period=24).double(), []
    nn.init.zeros_(net.head.weight)
    net.embed.register_forward_pre_hook(lambda _, args: calls.append(args[0]))
    values, times = inputs(past, horizon, torch.float64)
    day = simple_forecasts(values, horizon, 24)["mean_season"]
    torch.testing.assert_close(net(values, times), day)
    (read,) = calls
    assert not read[:, past:].any()
    for hour in range(past):  # backwards from the end, the forecast's hours are those of the input
        expected = values[:, hour] - simple_forecasts(values, 24, 24)["mean_season"][:, (hour - past) % 24]
        torch.testing.assert_close(read[:, hour], expected)


def test_nothing_is_known_of_the_later_steps():
    """What the decoder is given after the label depends on the times alone."""
    net, calls = tiny().eval(), []
    net.decoder[0].register_forward_pre_hook(lambda _, args: calls.append(args))
    values, times = inputs()
    net(values, times)
    net(torch.randn_like(values), times)
    (x, source), (x2, source2) = calls
    assert x.shape == (2, 6 + 5, 16) and torch.equal(x[:, 6:], x2[:, 6:])
    assert (x[:, :6] != x2[:, :6]).any(-1).all() and (source != source2).any(-1).all()


@pytest.mark.parametrize("mixer", [LightNetAttention, SoftmaxAttention])
def test_who_sees_whom(mixer):
    """A later step sees all that is known, the times before it and its own, and none after it."""
    net, (values, times) = tiny(mixer=mixer), inputs()
    values.requires_grad_()
    times.requires_grad_()
    y = net(values, times)
    for step in range(5):
        pulled = grad(y[0, step].square().sum(), (values, times), retain_graph=True)
        assert pulled[0][0].any(-1).all() and pulled[1][0, : 10 + step + 1].any(-1).all()
        assert not pulled[1][0, 10 + step + 1 :].any()
        assert not pulled[0][1].any() and not pulled[1][1].any()  # nor another sample


@pytest.mark.parametrize("period", [1, 4])
def test_a_series_on_another_level_gives_the_same_shape(close, period):
    net, (values, times) = tiny(period=period).double(), inputs(dtype=torch.float64)
    lift = torch.tensor([3.0, -20.0, 100.0], dtype=torch.float64)
    close(net(values + lift, times), net(values, times) + lift, 1e-10)


def test_quantiles_are_in_order_and_on_the_level(close):
    net, (values, times) = tiny(quantiles=[0.1, 0.5, 0.9], period=5).double(), inputs(dtype=torch.float64)
    y = net(values, times)
    assert y.shape == (2, 5, 3, 3) and (y.diff(dim=-1) > 0).all()
    close(net(values + 7, times), y + 7, 1e-10)
    nn.init.zeros_(net.head.weight)
    with torch.no_grad():
        net.head.bias.copy_(torch.arange(9.0).flip(0))
    day = simple_forecasts(values, 5, 5)["mean_season"]
    expected = torch.arange(9.0, dtype=torch.float64).flip(0).view(3, 3).flip(1)
    close(net(values, times), day[..., None] + expected, 1e-12)
    assert Forecaster(**net.config).quantiles == (0.1, 0.5, 0.9)


@pytest.mark.parametrize(
    "quantiles", [[0.1, 0.9], [0.5, 0.1], [0.0, 0.5], [0.5, 1.0], [0.5, 0.5], [float("nan"), 0.5], []]
)
def test_wrong_quantiles(quantiles):
    with pytest.raises(ValueError, match=r"quantiles=.*: expected fractions above 0 and below 1 in order, 0\.5 among"):
        tiny(quantiles=quantiles)


@pytest.mark.slow
def test_dropout_only_in_training():
    net, (values, times) = tiny(drop_rate=0.5), inputs()
    assert not torch.equal(net(values, times), net(values, times))
    net.eval()
    assert torch.equal(net(values, times), net(values, times))


@pytest.mark.slow
def test_it_compiles_as_one_graph(close):
    net, (values, times) = tiny().eval(), inputs()
    close(torch.compile(net, fullgraph=True, backend="eager")(values, times), net(values, times), 1e-6)
