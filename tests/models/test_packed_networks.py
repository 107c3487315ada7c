"""A whole network on samples of different shapes: packed, padded and alone agree."""

from functools import partial

import pytest
import torch
from torch import nn

from ndlightnet import LightNetAttention, NDLightNet

SIZES = {
    1: ((300,), (7,), (33,)),
    2: ((9, 40), (3, 3), (5, 1)),
    3: ((5, 8, 6), (2, 3, 9), (12, 1, 4)),
    4: ((3, 4, 3, 5), (1, 2, 7, 1)),
}


def network(dims, causal, **options):
    sizes = {"patch_size": 2, "embed_dim": 16, "depth": 2, "tpe_states": 4}
    mixer = partial(LightNetAttention, heads=2)
    return NDLightNet(dims, 2, 5, **sizes, causal=causal, mixer=mixer, **options).double()


@pytest.mark.parametrize("dims", SIZES)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_padded_and_alone_agree(close, close_grads, dims, causal):
    """As mixers do, see tests/nn, so do patches, MD-TPE and the mean."""
    net = network(dims, causal)
    samples = [torch.randn(2, *size).double() for size in SIZES[dims]]

    def alone():
        return torch.cat([net(x[None]) for x in samples])

    packed = net(net.pack(samples))
    most = [max(sizes) for sizes in zip(*SIZES[dims], strict=True)]
    # what lies in the padding must not matter
    padded = torch.full((len(samples), 2, *most), torch.nan).double()
    mask = torch.zeros(len(samples), *most, dtype=torch.bool)
    for row, x in enumerate(samples):
        corner = tuple(slice(n) for n in x.shape[1:])
        padded[(row, slice(None), *corner)], mask[(row, *corner)] = x, True
    close(packed, alone(), 1e-11)
    close(net(padded, mask), alone(), 1e-11)
    parameters = list(net.parameters())
    close_grads(packed, alone(), parameters, 1e-5)
    close_grads(net(padded, mask), alone(), parameters, 1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_a_network_with_an_empty_sample_stays_finite(causal):
    net = network(3, causal)
    x, mask = torch.randn(2, 2, 4, 6, 5).double(), torch.ones(2, 4, 6, 5, dtype=torch.bool)
    mask[1] = False
    y = net(x, mask)
    torch.testing.assert_close(y[:1], net(x[:1]))
    torch.testing.assert_close(y[1], net.head.bias)  # the mean over no token
    for g in torch.autograd.grad(y.square().sum(), list(net.parameters())):
        assert g.isfinite().all()


def test_stochastic_depth_drops_whole_samples():
    net = network(2, False, drop_path_rate=0.9).train()
    net.tpe = None
    samples = [torch.randn(2, 4, 4).double()] * 40
    x = net.forward_features(net.pack(samples)).unpack()
    kinds = {tuple(sample.flatten()[:4].tolist()) for sample in x}
    assert 1 < len(kinds) < 40  # some dropped, some not, and those that are dropped are alike


def test_a_mixer_that_knows_no_packs_says_so():
    class Plain(nn.Module):
        def forward(self, x, *, mask=None, causal=False):
            return x

    net = NDLightNet(1, 1, 2, patch_size=1, embed_dim=8, depth=1, mixer=lambda dim: Plain())
    with pytest.raises(TypeError, match="layout"):
        net(net.pack([torch.randn(1, 5)]))
