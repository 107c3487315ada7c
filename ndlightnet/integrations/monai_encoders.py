"""NDLightNet and NDLightUNet as the encoders of MONAI's UNETR and FlexibleUNet:

unetr = UNETR(in_channels=1, out_channels=14, img_size=96)
unetr.vit = UNETREncoder(NDLightNet(3, in_channels=1, patch_size=16, embed_dim=768))

import ndlightnet.integrations.monai_encoders
net = FlexibleUNet(in_channels=1, out_channels=14, backbone="ndlightunet-m", spatial_dims=3)
"""

from __future__ import annotations

from typing import Any

from monai.networks.blocks.encoder import BaseEncoder
from monai.networks.nets.flexible_unet import FLEXUNET_BACKBONE
from torch import Tensor, nn

from ndlightnet.models.backbone import NDLightNet
from ndlightnet.models.unet import MOST, SIZES, NDLightUNet, Size

READ = 9  # index of the last of the blocks whose features UNETR reads beside the last one's
STRIDES = 5  # FlexibleUNet's decoder has five levels by default, each of half the size before


class UNETREncoder(nn.Module):
    """An NDLightNet that answers like MONAI's ViT, in its place in a UNETR. It needs UNETR's
    in_channels, patches of 16 and embed_dim=hidden_size; its head is removed."""

    def __init__(self, net: NDLightNet) -> None:
        super().__init__()
        if net.vocab_size is not None or len(net.blocks) <= READ:
            raise ValueError(
                f"net of vocab_size={net.vocab_size} and {len(net.blocks)} blocks: expected a "
                f"network of cells with more than {READ}, UNETR reads blocks 3, 6, {READ} and the "
                "last one"
            )
        net.reset_classifier(0)
        self.net = net

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the features (batch, length, embed_dim) after the norm, and after each block."""
        features, hidden = self.net.forward_intermediates(x, output_fmt="NLC")
        return features.flatten(1, -2), hidden


class NDLightUNetEncoder(nn.Module, BaseEncoder):  # type: ignore[misc]
    """The encoder of an NDLightUNet with strides of 2, which FlexibleUNet knows by the names
    ndlightunet-hybrid, -s, -m and -l: feature maps of 1/2 to 1/32 of the input's size. FlexibleUNet
    needs these rounded down, so that a cell at the end with padding in it is cropped.

    Args:
        size, options: of NDLightUNet.
        pretrained: False, no weights are published.
    """

    def __init__(
        self, size: Size = "M", spatial_dims: int = 3, in_channels: int = 1, pretrained: bool = False, **options: Any
    ) -> None:
        super().__init__()
        if pretrained:
            raise ValueError("pretrained=True: expected False, no weights are published")
        self.net = NDLightUNet(spatial_dims, in_channels, size=size, strides=[2] * STRIDES, **options)
        # the decoder is FlexibleUNet's
        self.net.up = self.net.decoders = self.net.heads = nn.ModuleList()
        self.net.record(decoder=False)

    def forward(self, x: Tensor) -> list[Tensor]:
        space, maps = tuple(x.shape[2:]), []
        if any(size % 2 or size < 2**STRIDES for size in space):
            raise ValueError(f"input of shape {tuple(x.shape)}: expected even sizes of {2**STRIDES} or more")
        for level, y in enumerate(self.net.encode(x)[1:], start=1):
            cells: Any = (..., *(slice(size >> level) for size in space))
            maps.append(y[cells])
        return maps

    @classmethod
    def get_encoder_names(cls) -> list[str]:
        return [f"ndlightunet-{size.lower()}" for size in SIZES]

    @classmethod
    def get_encoder_parameters(cls) -> list[dict[str, Any]]:
        common = {"spatial_dims": 3, "in_channels": 1, "pretrained": False}
        return [{"size": size, **common} for size in SIZES]

    @classmethod
    def num_outputs(cls) -> list[int]:
        return [STRIDES] * len(SIZES)

    @classmethod
    def num_channels_per_output(cls) -> list[tuple[int, ...]]:
        levels = range(1, STRIDES + 1)
        first = [widths for widths, *_ in SIZES.values()]
        return [tuple(min(MOST, width << level) for level in levels) for width in first]


FLEXUNET_BACKBONE.register_class(NDLightUNetEncoder)
