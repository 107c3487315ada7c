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
    """NDLightNet behind a convolutional stem, which takes images (batch, 3, h, w) to features of
    half their size: 3 x 3 convolutions, the last one residual. arguments: of NDLightNet."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.rise = nn.Sequential(_convolution(3, 64), _convolution(64, 128, 2))
        self.residual = _convolution(128, 128)
        self.net = NDLightNet(2, 128, **arguments)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @property
    def blocks(self) -> nn.ModuleList:
        return self.net.blocks

    def forward(self, x: Tensor) -> Tensor:
        x = self.rise(x.contiguous(memory_format=torch.channels_last))
        out: Tensor = self.net(x + self.residual(x))
        return out


def _convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.GELU()
    )
