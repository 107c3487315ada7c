"""Several maps of the same tokens by one product: the same maps."""

from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import grad

from ndlightnet.nn import block, projections
from ndlightnet.nn.block import GLU
from ndlightnet.nn.mixers import LightNetAttention


@pytest.mark.parametrize("bias", [False, True])
def test_a_joint_product_is_each_map(bias):
    layers = nn.ModuleList(nn.Linear(6, n, bias) for n in (3, 1, 5)).double()
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    expected = torch.cat([layer(x) for layer in layers], -1)
    torch.testing.assert_close(projections.joint_linear(x, *layers), expected)
    assert not projections.joins(x, *layers)  # on a CPU they stay apart


@pytest.mark.parametrize(
    "make, options",
    [
        (partial(GLU, 8), {}),
        (partial(LightNetAttention, 8, 2), {}),
        (partial(LightNetAttention, 8, 2, bias=True), {"causal": True}),
        (partial(LightNetAttention, 8, 2, context_dim=5), {"context": torch.randn(2, 5, 2, 5).double()}),
    ],
)
def test_layers_are_what_they_are_apart(monkeypatch, make, options):
    module, x = make().double(), torch.randn(2, 3, 4, 8, dtype=torch.float64)

    def results():
        y = module(x, **options)
        return y, *grad(y.square().sum(), [*module.parameters()])

    expected = results()
    for place in (block, projections):  # as on a GPU in training
        monkeypatch.setattr(place, "joins", lambda x, *layers: True)
    torch.testing.assert_close(results(), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_adapters_hooks_and_inference_stay_apart():
    plain, x = [nn.Linear(3, 2), nn.Linear(3, 4)], torch.randn(5, 3, device="cuda")
    assert projections.joins(x, *plain)
    with torch.no_grad():
        assert not projections.joins(x, *plain)
    assert not projections.joins(x, nn.Linear(3, 2, bias=False), plain[1])

    class Adapter(nn.Linear):
        pass

    assert not projections.joins(x, Adapter(3, 2), plain[1])
    for hook in ("register_forward_hook", "register_full_backward_hook"):
        watched = nn.Linear(3, 2)
        getattr(watched, hook)(lambda *_: None)
        assert not projections.joins(x, watched, plain[1])


def test_a_norm_that_is_more_than_its_weights_is_called(monkeypatch):
    """One with hooks, or with a `forward` of its own, which brings offloaded weights; and any norm of an export."""
    with FakeTensorMode():
        x = torch.empty(2, 3, device="cuda")
    norm, offloaded, watched = nn.LayerNorm(3), nn.LayerNorm(3), nn.LayerNorm(3)
    offloaded.forward = offloaded.forward
    watched.register_forward_hook(lambda *_: None)
    assert projections.fuses(x, norm)
    for other in (offloaded, watched, nn.LayerNorm(3, bias=False), nn.RMSNorm(3)):
        assert not projections.fuses(x, other)
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True)
    assert not projections.fuses(x, norm)
