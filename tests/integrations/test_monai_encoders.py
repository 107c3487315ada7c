"""MONAI's UNETR and FlexibleUNet with our encoders. What UNETR reads, and sliding windows, are the door
`monai` of tests/doors."""

import pytest
import torch

pytest.importorskip("monai")
from monai.networks.nets.flexible_unet import FlexibleUNet
from monai.networks.nets.unetr import UNETR

from ndlightnet import NDLightNet
from ndlightnet.integrations.monai_encoders import NDLightUNetEncoder, UNETREncoder


def unetr(dims):
    net = UNETR(
        in_channels=2,
        out_channels=3,
        img_size=32,
        feature_size=4,
        hidden_size=24,
        mlp_dim=8,
        num_heads=2,
        spatial_dims=dims,
    )
    backbone = NDLightNet(dims, in_channels=2, patch_size=16, embed_dim=24, depth=12, tpe_states=4)
    net.vit = UNETREncoder(backbone)
    return net, torch.randn(1, 2, *[32] * dims)


@pytest.mark.slow
def test_unetr_trains_with_it():
    torch.manual_seed(0)
    net, x = unetr(2)
    target = (x[:, 0] > 0).long()
    optimiser = torch.optim.AdamW(net.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), target)
        loss.backward()
        assert all(p.grad is not None and p.grad.any() for p in net.vit.parameters())
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_a_network_that_unetr_cannot_read_is_refused():
    few = NDLightNet(2, patch_size=16, embed_dim=24, depth=9, tpe_states=4)
    words = NDLightNet(1, vocab_size=9, embed_dim=24, depth=12, tpe_states=4)
    with pytest.raises(ValueError, match="vocab_size=None and 9 blocks"):
        UNETREncoder(few)
    with pytest.raises(ValueError, match="vocab_size=9 and 12 blocks"):
        UNETREncoder(words)


@pytest.mark.parametrize("dims, space", [(2, (32, 64)), (2, (38, 48)), (3, (32, 34, 32))])
def test_flexible_unet_decodes_our_features(dims, space):
    net = FlexibleUNet(
        in_channels=2, out_channels=3, backbone="ndlightunet-s", spatial_dims=dims, decoder_channels=(8, 8, 8, 8, 4)
    ).eval()
    x = torch.randn(2, 2, *space)
    with torch.no_grad():
        features, inner = net.encoder(x), net.encoder.net.encode(x)
        assert len(features) == 5
        for level, (feature, y) in enumerate(zip(features, inner[1:], strict=True), start=1):
            floor = [n >> level for n in space]
            assert torch.equal(feature, y[(..., *map(slice, floor))])
        expected = net.segmentation_head(net.decoder(features, 4))
        y = net(x)
    assert y.shape == (2, 3, *space) and torch.equal(y, expected)
    at = NDLightUNetEncoder.get_encoder_names().index("ndlightunet-s")
    channels = NDLightUNetEncoder.num_channels_per_output()[at]
    assert tuple(f.shape[1] for f in features) == channels
    assert not [n for n, _ in net.encoder.named_parameters() if "head" in n or "decode" in n]


def test_sizes_that_flexible_unet_cannot_join_are_refused():
    net = NDLightUNetEncoder("S", 2, 2)
    for space in ((33, 32), (32, 30)):
        with pytest.raises(ValueError, match="expected even sizes of 32 or more"):
            net(torch.randn(1, 2, *space))


def test_flexible_unet_has_no_weights_of_ours():
    with pytest.raises(ValueError, match="pretrained=True: expected False"):
        FlexibleUNet(1, 2, backbone="ndlightunet-m", pretrained=True)


def test_an_encoder_without_its_decoder_is_not_saved(tmp_path):
    net = NDLightUNetEncoder("S", 2).net
    with pytest.raises(ValueError, match=r"changed to \{'decoder': False\}.*save its state_dict"):
        net.save_pretrained(tmp_path)
