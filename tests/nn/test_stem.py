"""ConvStem: residual convolutions whose tokens are those of patches."""

import pytest
import torch
from torch import nn
from torchvision.models import resnet18
from torchvision.models.video import r3d_18

from ndlightnet import NDLightNet
from ndlightnet.models.weights import adapt_in_chans
from ndlightnet.nn import ConvStem

# Not 5 to 7 along the first of three axes: there, on a CPU, torch 2.14's gradient of a weight of 7
# cells with stride 2 is wrong (oneDNN).
SIZES = {1: (13,), 2: (9, 14), 3: (9, 5, 6)}
every_dims = pytest.mark.parametrize("dims", SIZES)


def tiny(dims, **options):
    options = {"patch_size": 4, "embed_dim": 16, "depth": 1, "stem_blocks": 1, "num_classes": 3} | options
    return NDLightNet(dims, 2, **options)


@every_dims
def test_tokens_are_as_many_as_patches(dims):
    model = tiny(dims).eval()
    for space in (SIZES[dims], (4,) * dims, (5,) * dims, (8,) * dims):
        features = model.forward_features(torch.randn(2, 2, *space))
        assert features.shape == (2, *(-(-n // 4) for n in space), 16)
        assert features.isfinite().all()


def test_the_axes_of_smaller_patches_are_halved_last():
    stem = ConvStem(3, 2, (2, 8, 1), 32, 2)
    first, _, _ = stem.first
    assert (first.stride, first.kernel_size, first.padding) == ((1, 2, 1), (3, 7, 3), (1, 3, 1))
    blocks = list(stem.stages)
    assert [block.conv1.stride for block in blocks] == [
        (1, 1, 1),
        (1, 1, 1),
        (1, 2, 1),
        (1, 1, 1),
        (2, 2, 1),
        (1, 1, 1),
    ]
    assert [block.conv2.out_channels for block in blocks] == [8, 8, 16, 16, 32, 32]
    assert stem(torch.randn(1, 2, 6, 16, 5)).shape == (1, 3, 2, 5, 32)
    assert ConvStem(2, 3, 1, 8, 1)(torch.randn(1, 3, 5, 4)).shape == (1, 5, 4, 8)


def _like(stem, *layers):
    """Copy the weights of torchvision's layers, in order, into the stem."""
    theirs = [p for layer in layers for p in layer.state_dict().items()]
    # theirs: conv, norm, conv, norm; ours: conv1, norm1, conv2, norm2; buffers as well
    ours = stem.state_dict()
    assert [x.shape for x in ours.values()] == [x.shape for _, x in theirs]
    stem.load_state_dict({name: value for name, (_, value) in zip(ours, theirs, strict=True)})


def test_it_is_r3d_18_without_its_last_stage(close):
    net, stem = r3d_18().eval(), ConvStem(3, 3, (4, 8, 8), 256, 2).eval()
    _like(stem, net.stem, net.layer1, net.layer2, net.layer3)
    x = torch.randn(1, 3, 8, 32, 24)
    expected = net.layer3(net.layer2(net.layer1(net.stem(x)))).movedim(1, -1)
    close(stem(x), expected, 1e-5)


def test_it_is_resnet_18_without_pooling_and_last_stage(close):
    net, stem = resnet18().eval(), ConvStem(2, 3, 8, 256, 2).eval()
    _like(stem, nn.ModuleList([net.conv1, net.bn1]), net.layer1, net.layer2, net.layer3)
    x = torch.randn(1, 3, 32, 24)
    y = net.relu(net.bn1(net.conv1(x)))
    close(stem(x), net.layer3(net.layer2(net.layer1(y))).movedim(1, -1), 1e-5)


def test_convolutions_begin_as_in_a_resnet():
    torch.manual_seed(0)
    block = ConvStem(3, 3, 2, 64, 1).stages[0]
    spread = (2 / (64 * 27)) ** 0.5  # He et al., 2015, by the outputs
    assert block.conv2.weight.std().item() == pytest.approx(spread, rel=0.05)


def test_other_channels_and_features():
    model = tiny(2)
    assert model.feature_info[0] == {"module": "blocks.0", "num_chs": 16, "reduction": 4}
    wide = tiny(2)
    grey = NDLightNet(2, 1, patch_size=4, embed_dim=16, depth=1, stem_blocks=1, num_classes=3)
    grey.load_state_dict(adapt_in_chans(wide.state_dict(), grey))
    assert torch.equal(grey.embed.first[0].weight, wide.embed.first[0].weight.sum(1, keepdim=True))
    x = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(grey.eval()(x), wide.eval()(x.expand(-1, 2, -1, -1)))
