"""MONAI's UNETR and FlexibleUNet with our encoders. What UNETR reads, and sliding windows, are the door
`monai` of tests/doors."""

import pytest
import torch

pytest.importorskip("monai")
from monai.networks.nets.flexible_unet import FlexibleUNet
from monai.networks.nets.unetr import UNETR

from ndlightnet import NDLightNet
from ndlightnet.integrations.monai_encoders import NDLightUNetEncoder, UNETREncoder


def test_gradients_reach_all_of_an_encoder():
    sizes = {"img_size": 32, "feature_size": 4, "hidden_size": 24, "mlp_dim": 8, "num_heads": 2, "spatial_dims": 2}
    net = UNETR(in_channels=2, out_channels=3, **sizes)
    backbone = NDLightNet(2, in_channels=2, patch_size=16, embed_dim=24, depth=12, tpe_states=4)
    net.vit = UNETREncoder(backbone)
    net(torch.randn(1, 2, 32, 32)).square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in net.vit.parameters())


def test_a_network_that_unetr_cannot_read_is_refused():
    few = NDLightNet(2, patch_size=16, embed_dim=24, depth=9, tpe_states=4)
    words = NDLightNet(1, vocab_size=9, embed_dim=24, depth=12, tpe_states=4)
    for net, message in ((few, "vocab_size=None and 9 blocks"), (words, "vocab_size=9 and 12 blocks")):
        with pytest.raises(ValueError, match=message):
            UNETREncoder(net)


@pytest.mark.parametrize("dims, space", [(2, (38, 48)), (3, (32, 34, 32))])
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


def test_what_flexible_unet_cannot_join_is_refused(tmp_path):
    net = NDLightUNetEncoder("S", 2, 2)
    for space in ((33, 32), (32, 30)):
        with pytest.raises(ValueError, match="expected even sizes of 32 or more"):
            net(torch.randn(1, 2, *space))
    with pytest.raises(ValueError, match="pretrained=True: expected False"):
        FlexibleUNet(1, 2, backbone="ndlightunet-m", pretrained=True)
    with pytest.raises(ValueError, match=r"changed to \{'decoder': False\}.*save its state_dict"):
        net.net.save_pretrained(tmp_path)
