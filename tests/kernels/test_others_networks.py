"""The kernels in the layers of other people's networks: tokens in front of a grid, strided values, grouped heads."""

import pytest
import torch

from ndlightnet.layout import Grid
from ndlightnet.nn import LightNetAttention
from ndlightnet.ops import lightnet_attention

from .kernel_cases import DEVICE


@pytest.mark.slow
@pytest.mark.parametrize("lrpe", [None, "cosine"])
@pytest.mark.parametrize("masked", [False, True])
def test_tokens_in_front_of_a_grid(close, lrpe, masked):
    torch.manual_seed(0)
    grid, prefix = Grid((3, 5)), 2
    layer = LightNetAttention(32, 2, dims=2, lrpe=lrpe).to(DEVICE)
    x = torch.randn(2, prefix + grid.length, 32, device=DEVICE, requires_grad=True)
    mask = torch.ones(2, x.shape[1], dtype=torch.bool, device=DEVICE)
    mask[1, -6:] = False
    found = []
    for impl in ("torch", "triton"):
        layer.impl = layer.local_values.impl = impl
        y = layer.mix(x, grid, mask if masked else None, False, prefix)
        y = torch.where(mask[..., None], y, 0)
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])])
    for ours, theirs in zip(*found, strict=True):
        close(ours, theirs, 1e-4)  # of float32 sums over 17 tokens


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
def test_grouped_heads(close, is_causal):
    torch.manual_seed(0)
    q = torch.randn(2, 4, 9, 16, device=DEVICE, requires_grad=True)
    k, v = (torch.randn(2, 2, 9, 16, device=DEVICE, requires_grad=True) for _ in range(2))
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool, device=DEVICE)
    mask[1, ..., 6:] = False
    found = []
    for impl in ("torch", "triton"):
        y = lightnet_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=True, impl=impl)
        found.append([y, *torch.autograd.grad(y.square().sum(), [q, k, v])])
    for ours, theirs in zip(*found, strict=True):
        close(ours, theirs, 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(14, 14), (8, 8), (6, 5, 4)])
def test_a_swapped_layer_in_bfloat16(shape):
    """Its error is at most twice that of torch's operations in the same autocast."""
    from ndlightnet.integrations.tokens import TokenMixer

    torch.manual_seed(0)
    layer = TokenMixer(192, 3, grid=shape, prefix=1).to(DEVICE)
    x = torch.randn(4, 1 + Grid(shape).length, 192, device=DEVICE)
    pull = torch.randn_like(x)

    def results(impl, amp):
        layer.mixer.impl = layer.mixer.local_values.impl = impl
        leaf = x.to(layer.mixer.norm.weight.dtype).requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, amp):
            y = layer(leaf)
        grads = torch.autograd.grad((y.to(pull.dtype) * pull).sum(), [leaf, *layer.parameters()])
        return [z.detach().double() for z in (y, *grads)]

    assert "triton" in layer.mixer.implementation(x)
    kernels, plain = results("auto", True), results("torch", True)
    layer.double()
    names = ["y", "x", *(name for name, _ in layer.named_parameters())]
    truth = dict(zip(names, results("torch", False), strict=True))
    scales = {name: exact.norm() for name, exact in truth.items()}
    # a softmax over tokens does not see the keys' bias: its gradient is 0, and only rounded
    scales["mixer.k_proj.bias"] = scales["mixer.k_proj.weight"]
    for name, ours, theirs in zip(names, kernels, plain, strict=True):
        error, other = ((z - truth[name]).norm() / scales[name] for z in (ours, theirs))
        assert error <= 2 * other + 2**-9, (name, error, other)
