"""Networks of MONAI and torchvision with our constructors and calls, to be trained with the same recipe.

Those of MONAI take any size: the input is padded with zeros to a multiple of their strides, and the
output is cropped. In training, a network with deep supervision returns a list of logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import monai.networks.nets.dynunet
import monai.networks.nets.segresnet
import monai.networks.nets.swin_unetr
import torch
import torchvision.models
from torch import Tensor, nn

from ndlightnet.layout import per_axis


class _Peer(nn.Module):
    """Base class. net: MONAI's network. multiple: what it divides the size of each axis by."""

    def __init__(self, net: nn.Module, inputs: int, outputs: int, multiple: Sequence[int]) -> None:
        super().__init__()
        self.net, self.in_channels, self.out_channels = net, inputs, outputs
        self.multiple = tuple(multiple)

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        """(batch, in_channels, *space) -> (batch, out_channels, *space), or a list of these."""
        space = x.shape[2:]
        lacking = [-n % m for n, m in zip(space, self.multiple, strict=True)]
        if all(n + lack <= m for n, lack, m in zip(space, lacking, self.multiple, strict=True)):
            lacking[0] += self.multiple[0]  # MONAI's instance norm refuses a single cell
        x = nn.functional.pad(x, [n for lack in reversed(lacking) for n in (0, lack)])
        inside: Any = (..., *(slice(n) for n in space))
        y: Tensor = self.net(x)
        if y.ndim == x.ndim:
            return y[inside]
        return [level[inside] for level in y.unbind(1)]  # MONAI resizes all to the first's size


def _steps(strides: Sequence[int | Sequence[int]], dims: int) -> list[tuple[int, ...]]:
    return [per_axis("strides", s if isinstance(s, int) else tuple(s), dims) for s in strides]


class DynUNet(_Peer):
    """nnU-Net's network: plain convolutions, instance norm, deep supervision. Widths are 32, 64 and
    so on, up to 320; strides as in NDLightUNet."""

    def __init__(
        self,
        dims: int,
        in_channels: int,
        out_channels: int,
        strides: Sequence[int | Sequence[int]] = (2, 2, 2),
        deep_supervision: bool = True,
    ) -> None:
        steps = _steps(strides, dims)
        if len(steps) < 2:
            raise ValueError(f"strides={strides!r}: expected 2 or more for MONAI's DynUNet")
        levels = range(len(steps) + 1)
        supervision: Any = {"deep_supervision": deep_supervision, "deep_supr_num": len(steps) - 1}
        sizes: Any = {"kernel_size": [3 for _ in levels], "filters": [min(320, 32 << level) for level in levels]}
        net = monai.networks.nets.dynunet.DynUNet(
            dims, in_channels, out_channels, strides=[1, *steps], upsample_kernel_size=steps, **sizes, **supervision
        )
        super().__init__(net, in_channels, out_channels, [math.prod(axis) for axis in zip(*steps, strict=True)])


class SegResNet(_Peer):
    """MONAI's SegResNet with its default depths."""

    def __init__(self, dims: int, in_channels: int, out_channels: int, init_filters: int = 32) -> None:
        net = monai.networks.nets.segresnet.SegResNet(
            dims, init_filters, in_channels, out_channels, blocks_down=(1, 2, 2, 4), blocks_up=(1, 1, 1)
        )
        super().__init__(net, in_channels, out_channels, [8] * dims)


class SwinUNETR(_Peer):
    """MONAI's SwinUNETR, with 24 features by default."""

    def __init__(self, dims: int, in_channels: int, out_channels: int, feature_size: int = 24) -> None:
        net = monai.networks.nets.swin_unetr.SwinUNETR(
            in_channels, out_channels, feature_size=feature_size, spatial_dims=dims
        )
        super().__init__(net, in_channels, out_channels, [32] * dims)


class TorchvisionVideo(nn.Module):
    """A network of torchvision.models.video for clips (batch, in_chans, frames, size, size).

    Args:
        name: r3d_18, mc3_18, r2plus1d_18, or mvit_v1_b, mvit_v2_s for clips of 16 frames, which are
            enlarged to the 224 x 224 pixels that they take.
        num_classes: outputs.
        in_chans: channels of the clips; other than 3: the first convolution is a new one.
        weights: file of weights as torchvision publishes them (Kinetics-400), but for the output;
            default: drawn at random.
    """

    def __init__(self, name: str, num_classes: int, in_chans: int = 3, weights: str | None = None) -> None:
        super().__init__()
        self.in_chans, self.num_classes = in_chans, num_classes
        self.side = 224 if name.startswith("mvit") else None
        self.net: Any = torchvision.models.get_model(name, num_classes=num_classes)
        if weights is not None:
            saved = torch.load(weights, map_location="cpu", weights_only=True)
            new = self.net.state_dict()
            last = [key for key in saved if new.get(key, saved[key]).shape != saved[key].shape]
            self.net.load_state_dict({**saved, **{key: new[key] for key in last}})
        if in_chans != 3:
            _widen(self.net, in_chans)

    def forward(self, x: Tensor) -> Tensor:
        if self.side is not None:
            x = nn.functional.interpolate(x, (x.shape[2], self.side, self.side), mode="trilinear")
        if x.is_cuda:  # cuDNN is fastest like this
            x = x.contiguous(memory_format=torch.channels_last_3d)
        out: Tensor = self.net(x)
        return out


def _widen(net: nn.Module, in_chans: int) -> None:
    """Replace the first convolution by a new one for `in_chans` channels."""
    name, old = next((n, m) for n, m in net.named_modules() if isinstance(m, nn.Conv3d))
    conv3d: Any = nn.Conv3d  # the sizes of another convolution are tuples of any length to mypy
    new = conv3d(in_chans, old.out_channels, old.kernel_size, old.stride, old.padding, bias=old.bias is not None)
    parent, _, key = name.rpartition(".")
    setattr(net.get_submodule(parent), key, new)
