"""ConvStem maps cells to tokens by residual convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet.nn import slabs
from ndlightnet.nn.embedding import PatchEmbed
from ndlightnet.nn.initial import Initialized

FASTEST = {4: torch.channels_last, 5: torch.channels_last_3d}  # layouts, by the number of axes


def torch_layer(kind: str, dims: int, argument: str) -> Any:
    """Return torch's layer for this number of axes: `Conv3d`, `ConvTranspose2d`, ... (those of `slabs`). ValueError
    if there is none names the `argument` that asks for it."""
    name = f"{kind}{dims}d"
    layer = getattr(slabs, name, None) or getattr(nn, name, None)
    if layer is None:
        raise ValueError(f"dims={dims} with {argument}: expected 1, 2 or 3, torch has no {kind} for more axes")
    return layer


class ResidualBlock(Initialized):
    """The basic block of a ResNet (He et al., 2015, arXiv 1512.03385), on any number of axes that
    torch has convolutions for: ReLU(skip(x) + BN(conv(ReLU(BN(conv(x)))))), kernels of 3. The first
    convolution has the stride; skip is a convolution of kernel 1 where the shape changes."""

    def __init__(self, dims: int, inputs: int, outputs: int, stride: Sequence[int]) -> None:
        super().__init__()
        conv, norm = (torch_layer(kind, dims, "stem_blocks") for kind in ("Conv", "BatchNorm"))
        self.conv1 = conv(inputs, outputs, 3, tuple(stride), padding=1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = conv(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = norm(outputs)
        self.skip: nn.Module = nn.Identity()
        if inputs != outputs or max(stride) > 1:
            self.skip = nn.Sequential(conv(inputs, outputs, 1, tuple(stride), bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (y + self.skip(x)).relu()


class ConvStem(PatchEmbed):
    """Map `(batch, channels, *space)` to tokens `(batch, *grid, dim)` by residual convolutions.

    The first convolution and each stage but the first halve the axes whose patch is not yet reached, axes of smaller
    patches last; grid = ceil(size / patch). A stage has `blocks` residual blocks, and twice the channels of the one
    before, `dim` in the last. With patches of (4, 8, 8), dim=256 and blocks=2 this is R3D-18 (Tran et al., 2018, arXiv
    1711.11248) without its last stage; with (8, 8), but for its pooling, ResNet-18.

    Args:
        dims: number of axes, 1 to 3.
        in_chans: channels of the input.
        patch_size: cells per token along each axis, powers of 2.
        dim: channels of a token, a multiple of 2 ** (halvings - 1).
        blocks: residual blocks in a stage.
    """

    def __init__(self, dims: int, in_chans: int, patch_size: int | Sequence[int], dim: int, blocks: int) -> None:
        super().__init__(dims, patch_size)
        halvings = [size.bit_length() - 1 for size in self.patch]
        if any(size != 1 << n for size, n in zip(self.patch, halvings, strict=True)):
            raise ValueError(f"patch_size={self.patch}: expected powers of 2 for convolutions")
        stages = max(1, *halvings)
        if dim % (1 << (stages - 1)):
            raise ValueError(
                f"embed_dim={dim}: expected a multiple of {1 << (stages - 1)}, as channels double {stages - 1} times"
            )
        strides = [[1 + (n >= stages - stage) for n in halvings] for stage in range(stages)]
        widths = [dim >> (stages - 1 - stage) for stage in range(stages)]
        kernel = [7 if stride == 2 else 3 for stride in strides[0]]
        conv, norm = (torch_layer(kind, dims, "stem_blocks") for kind in ("Conv", "BatchNorm"))
        self.first = nn.Sequential(
            conv(in_chans, widths[0], kernel, strides[0], [k // 2 for k in kernel], bias=False),
            norm(widths[0]),
            nn.ReLU(),
        )
        self.stages = nn.Sequential()
        for stage, width in enumerate(widths):
            before, stride = (widths[stage - 1], strides[stage]) if stage else (width, [1] * dims)
            for block in range(blocks):
                shape = (width, [1] * dims) if block else (before, stride)
                self.stages.append(ResidualBlock(dims, shape[0], width, shape[1]))
        self.reset_own()

    def reset_own(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.modules.conv._ConvNd):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.ndim in FASTEST:  # cuDNN's convolutions in bf16
            x = x.contiguous(memory_format=FASTEST[x.ndim])
        out: Tensor = self.stages(self.first(x))
        return out.movedim(1, -1)
