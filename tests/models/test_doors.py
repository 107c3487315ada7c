"""What a stranger hits in the first ten minutes: wrong inputs named, and the names of timm."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from ndlightnet import NDLightNet, NDLightUNet, SoftmaxAttention, ops


def small(dims: int = 2, **options) -> NDLightNet:
    return NDLightNet(dims, 3, 5, patch_size=2, embed_dim=16, depth=2, **options)


@pytest.mark.parametrize(
    ("x", "mask", "named"),
    [
        (torch.randn(2, 1, 4, 4), None, "in_chans=3"),
        (torch.randn(2, 3, 4), None, "2 axes"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), None, "floats"),
        (torch.randn(2, 3, 4, 4), torch.ones(2, 4, 4), "mask"),
        (torch.randn(2, 3, 4, 4), torch.ones(2, 1, 4, 4, dtype=torch.bool), "mask"),
    ],
)
def test_wrong_inputs_are_named(x, mask, named):
    with pytest.raises(ValueError, match=named):
        small()(x, mask)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="mixer=SoftmaxAttention"):
        small(mixer=SoftmaxAttention(16))
    for ratio in (0, -1.0):
        with pytest.raises(ValueError, match=f"mlp_ratio={ratio}: expected more than 0"):
            small(mlp_ratio=ratio)
    with pytest.raises(ValueError, match="tpe_bidirectional"):
        NDLightNet(1, causal=True, tpe_bidirectional=True)
    with pytest.raises(ValueError, match="integers"):
        NDLightNet(1, vocab_size=7, embed_dim=16, depth=1)(torch.randn(2, 5))


def test_tokens_of_length_zero():
    model = NDLightNet(1, vocab_size=7, embed_dim=16, depth=1, causal=True)
    assert model(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0, 7)
    assert small()(torch.randn(0, 3, 4, 4)).shape == (0, 5)


def test_the_papers_one_way_position_code_sees_no_later_token():
    model = small(mixer=lambda dim: nn.Identity(), tpe_bidirectional=False)
    assert model.tpe.coef.shape == (2, 16, 128)
    x = torch.randn(1, 4, 4, 16, requires_grad=True)
    model.tpe(x)[0, 1, 2].sum().backward()
    seen = x.grad[0].abs().sum(-1) > 0
    expected = torch.zeros(4, 4, dtype=torch.bool)
    expected[:2, 2] = expected[1, :3] = True
    assert torch.equal(seen, expected)


def test_timm_names():
    model = small()
    assert model.num_features == 16 and model.get_classifier() is model.head
    model.reset_classifier(9)
    features = model.forward_features(torch.randn(2, 3, 4, 4))
    assert model.forward_head(features).shape == (2, 9)
    assert model.forward_head(features, True).shape == (2, 16)
    fixed = {name for name, _ in model.named_parameters() if "log_factor" in name or "tpe" in name}
    assert model.no_weight_decay() == fixed


def test_a_causal_softmax_with_padding_sees_neither_padding_nor_later_tokens():
    mixer, x = SoftmaxAttention(16), torch.randn(1, 5, 16, requires_grad=True)
    mask = torch.tensor([[True, False, True, True, True]])
    mixer(x, mask=mask, causal=True)[0, 2].sum().backward()
    assert (x.grad[0].abs().sum(-1) > 0).tolist() == [True, False, True, False, False]
    x = torch.randn(1, 3, 2, 16, requires_grad=True)
    mask = torch.tensor([[[True, False], [True, True], [True, True]]])
    mixer(x, mask=mask, causal=True)[0, 1, 0].sum().backward()
    expected = [[True, False], [True, True], [False, False]]
    assert (x.grad[0].abs().sum(-1) > 0).tolist() == expected


@pytest.mark.parametrize(
    "name, value",
    [
        ("dtype", "float32"),
        ("dims", 2.0),
        ("in_chans", 0),
        ("in_channels", -1),
        ("num_classes", -3),
        ("out_channels", 2.0),
    ],
)
def test_bad_arguments_of_both_networks_are_named(name, value):
    for kind, more in ((NDLightNet, {"depth": 1}), (NDLightUNet, {"widths": (4, 8)})):
        with pytest.raises(ValueError, match=rf"={value!r}: expected (an int|a torch.dtype)"):
            kind(**{"dims": 2, **more, name: value})


@pytest.mark.parametrize("name", ["embed_dim", "depth", "patch_size", "vocab_size"])
@pytest.mark.parametrize("value", [4.0, 0, "4"])
def test_what_is_no_count_is_named(name, value):
    with pytest.raises(ValueError, match=rf"^{name}={value!r}: expected an int >= 1"):
        NDLightNet(1, **{"embed_dim": 16, "depth": 1, name: value})


def test_numbers_of_numpy_are_numbers():
    two = np.int64(2)
    net = NDLightNet(two, patch_size=two, embed_dim=np.int64(16), depth=two, num_classes=two)
    x = torch.randn(1, 3, 4, 4)
    assert net.embed.patch == (2, 2) and net(x).shape == (1, 2)
    assert len(net.forward_intermediates(x, np.int64(1), intermediates_only=True)) == 1
    json.dumps(net.config)


def test_nan_in_the_padding_does_not_reach_the_axis_scan():
    x, mask = torch.randn(1, 5, 4), torch.tensor([[True, True, True, False, False]])
    x[:, 3:] = torch.nan
    y = ops.axis_scan(x, torch.randn(1, 4, 3), -torch.rand(1, 3), mask=mask)
    assert y[:, :3].isfinite().all()
