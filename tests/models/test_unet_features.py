"""NDLightUNet's encoder and decoder by themselves."""

from functools import partial

import pytest
import torch

from ndlightnet import NDLightUNet

CASES = {
    "1 axis": (partial(NDLightUNet, 1), (13,)),
    "2 axes": (partial(NDLightUNet, 2), (9, 14)),
    "3 axes, strides": (partial(NDLightUNet, 3, strides=[(1, 2, 2), (3, 2, 1)]), (7, 5, 6)),
    "2 axes, separable": (partial(NDLightUNet, 2, separable=True), (9, 14)),
    "4 axes": (partial(NDLightUNet, 4), (3, 5, 4, 2)),
    "causal": (partial(NDLightUNet, 3, causal=True), (3, 5, 6)),
}
every_case = pytest.mark.parametrize("name", CASES)


def tiny(name, **options):
    make, space = CASES[name]
    net = make(in_channels=2, out_channels=3, widths=(8, 16, 24), depths=(0, 1, 1), **options)
    return net, torch.randn(2, 2, *space)


@every_case
def test_decode_of_encode_is_forward(name):
    net, x = tiny(name)
    net.eval()
    with torch.no_grad():
        expected, features = net(x), net.encode(x)
        space = x.shape[2:]
        for y, width, step in zip(features, net.widths, [(1,) * net.dims, *net.strides], strict=True):
            space = tuple(-(-n // s) for n, s in zip(space, step, strict=True))
            assert y.shape == (2, width, *space)
        copies = [y.clone() for y in features]
        for given in (features, tuple(features), [y.clone() for y in features]):
            assert torch.equal(net.decode(given), expected)
        assert len(features) == 3 and all(map(torch.equal, features, copies))


@pytest.mark.parametrize("name", ["2 axes", "4 axes"])
def test_deep_supervision_decodes_to_all_levels(name):
    net, x = tiny(name, deep_supervision=True)
    expected, outputs = net(x), net.decode(net.encode(x))
    assert len(outputs) == 2 and all(map(torch.equal, outputs, expected))
    assert isinstance(net.eval().decode(net.encode(x)), torch.Tensor)


def test_gradients_pass_through_both(close_grads):
    net, x = tiny("2 axes")
    close_grads(net.decode(net.encode(x)), net(x), list(net.parameters()), 1e-5)


def test_feature_maps_of_another_shape_are_named():
    net, x = tiny("2 axes")
    features = net.encode(x)
    with pytest.raises(ValueError, match="2 feature maps: expected 3"):
        net.decode(features[1:])
    with pytest.raises(ValueError, match=r"features\[1\] \(2, 16, 5, 6\): expected \(2, 16, 5, 7"):
        net.decode([features[0], features[1][..., :6], features[2]])
    with pytest.raises(ValueError, match=r"features\[0\] \(2, 8, 9\)"):
        net.decode([features[0][..., 0], *features[1:]])
    with pytest.raises(ValueError, match=r"input of shape"):
        net.encode(x[:, :1])
