"""Convolutional networks that stand beside ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet import NDLightNet


class SmallImageResNet18(nn.Module):
    """torchvision's ResNet-18 with the stem that is usual for images of 32 x 32: a convolution of
    3 x 3 without stride, and no pooling. Its features lie channels last, which is fastest."""

    def __init__(self, num_classes: int = 10) -> None:
        from torchvision.models import resnet18

        super().__init__()
        self.net = resnet18(num_classes=num_classes)
        self.net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.net.maxpool = nn.Identity()
        self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x.contiguous(memory_format=torch.channels_last))
        return out


class Stemmed(nn.Module):
    """NDLightNet behind the stem and the first two stages of SmallImageResNet18, which take images
    (batch, 3, h, w) to 128 channels of half their size. arguments: of NDLightNet."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        resnet = SmallImageResNet18().net
        self.stem = nn.Sequential(resnet.conv1, resnet.bn1, resnet.relu, resnet.layer1, resnet.layer2)
        self.net = NDLightNet(2, 128, **arguments)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @property
    def blocks(self) -> nn.ModuleList:
        return self.net.blocks

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(self.stem(x.contiguous(memory_format=torch.channels_last)))
        return out
