"""Mirrored copies and folds as one network."""

import pytest
import torch
from torch import nn

from ndlightnet.inference import Ensemble, Mirrored, predict_labels, predict_volume


def conv(seed, dims=3, out=4):
    torch.manual_seed(seed)
    return (nn.Conv2d if dims == 2 else nn.Conv3d)(2, out, 3, padding=1)


@pytest.mark.parametrize("axes", [(), (0,), (2,), (2, 0), (0, 1, 2)])
def test_mirrored_is_the_mean_over_all_subsets(axes):
    """A mirrored copy of a convolution is the convolution with a mirrored kernel, so that the mean
    is the convolution with the mean kernel."""
    net, x = conv(0).double(), torch.randn(2, 2, 5, 6, 7, dtype=torch.float64)
    kernel = net.weight.detach()
    for axis in axes:
        kernel = (kernel + kernel.flip(2 + axis)) / 2
    expected = nn.functional.conv3d(x, kernel, net.bias, padding=1)
    with torch.no_grad():
        actual = Mirrored(net, axes)(x)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_ensemble_is_the_mean_of_its_networks():
    nets, x = [conv(seed) for seed in range(3)], torch.randn(1, 2, 4, 5, 6)
    ensemble = Ensemble(nets)
    torch.testing.assert_close(ensemble(x), torch.stack([net(x) for net in nets]).mean(0))
    assert len(list(ensemble.parameters())) == 6
    ensemble(x).sum().backward()
    assert all(net.weight.grad is not None for net in nets)


def test_an_input_that_is_handed_through_stays_as_it_is():
    x = torch.randn(1, 3, 5)
    for net in (Ensemble([nn.Identity()] * 3), Mirrored(nn.Identity(), [0])):
        before = x.clone()
        torch.testing.assert_close(net(x), before)
        assert torch.equal(x, before)


def test_channels_pass_through():
    both = Mirrored(Ensemble([conv(0), conv(1)]), [0])
    assert (both.in_channels, both.out_channels) == (2, 4)
    assert not hasattr(Mirrored(nn.Identity(), [0]), "out_channels")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_networks_for_predictions(dtype):
    net, image = Mirrored(Ensemble([conv(seed, dims=2).to(dtype) for seed in (0, 1)]), [0, 1]), torch.randn(2, 17, 12)
    logits = predict_volume(net, image[None].to(dtype))[0]
    assert net(image[None].to(dtype)).dtype == dtype
    assert torch.equal(predict_labels(net, image), logits.argmax(0).to(torch.uint8))


def test_arguments_that_do_not_fit():
    for axes in ([0, 0], [-1]):
        with pytest.raises(ValueError, match=r"axes=.*expected different axes"):
            Mirrored(nn.Identity(), axes)
    with pytest.raises(ValueError, match="at least one network"):
        Ensemble([])
    with pytest.raises(ValueError, match=r"out_channels \[4, 5\], expected one for all"):
        Ensemble([conv(0), conv(1, out=5)])
