"""segmentation_models_pytorch with NDLightNet: DPT, which takes the features of several blocks; its
Unet needs an encoder of several strides."""

import pytest
import torch

smp = pytest.importorskip("segmentation_models_pytorch")
import ndlightnet.integrations.timm  # noqa: E402, F401

SMALL = {"embed_dim": 32, "tpe_states": 8, "decoder_readout": "ignore", "decoder_intermediate_channels": (8, 8, 8, 8)}


def dpt(**options):
    return smp.DPT(
        encoder_name="tu-ndlightnet_tiny_local",
        encoder_weights=None,
        classes=3,
        decoder_fusion_channels=8,
        **SMALL | options,
    )


# the door `smp` has fewer levels, and blocks by their indices
@pytest.mark.parametrize("readout", ["ignore", "add"])
@pytest.mark.filterwarnings("ignore:Encoder does not have prefix tokens")
def test_dpt_decodes_the_features_of_the_blocks(readout):
    net = dpt(in_channels=2, dynamic_img_size=True, decoder_readout=readout).eval()
    x = torch.randn(2, 2, 64, 32)
    with torch.no_grad():
        maps = net.encoder.model.forward_intermediates(x, [2, 5, 8, 11], intermediates_only=True)
        expected = net.segmentation_head(net.decoder(maps, [None] * 4))
        assert torch.equal(net(x), expected) and expected.shape == (2, 3, 64, 32)
    assert net.encoder.output_strides == [16] * 4 and net.encoder.out_channels == [32] * 4
    assert not net.encoder.is_fixed_input_size


def test_a_unet_of_one_stride_is_refused():
    with pytest.raises(ValueError, match="Unsupported model downsampling pattern"):
        smp.Unet("tu-ndlightnet_tiny", encoder_weights=None)
