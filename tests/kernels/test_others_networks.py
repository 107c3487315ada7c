"""The kernels in the layers of other people's networks: tokens in front of a grid, strided values,
grouped heads."""

import pytest
import torch

from ndlightnet.layout import Grid
from ndlightnet.nn import LightNetAttention
from ndlightnet.ops import lightnet_attention

from .cases import DEVICE


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
