"""NDLightUNet: dense prediction. LightNet blocks in the encoder, skips to a convolutional
decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ndlightnet.nn.block import Block, init_weights
from ndlightnet.nn.mixers import LightNetAttention
from ndlightnet.nn.position import MDTPE


def _conv(kind: str, dims: int) -> type[nn.Module]:
    """torch's convolution for this number of axes: `Conv3d`, `ConvTranspose2d`, ..."""
    found: type[nn.Module] | None = getattr(nn, f"{kind}{dims}d", None)
    if found is None:
        raise ValueError(f"dims={dims}: expected 1, 2 or 3, torch has no {kind} for more axes")
    return found


class ConvBlock(nn.Module):
    """Two 3-wide convolutions with a residual. Group norm, because it also works on a single
    cell."""

    def __init__(self, dims: int, inputs: int, outputs: int) -> None:
        super().__init__()
        conv = _conv("Conv", dims)
        groups = max(g for g in range(1, max(1, outputs // 8) + 1) if outputs % g == 0)
        self.body = nn.Sequential(
            conv(inputs, outputs, 3, padding=1, bias=False),
            nn.GroupNorm(groups, outputs),
            nn.SiLU(),
            conv(outputs, outputs, 3, padding=1, bias=False),
            nn.GroupNorm(groups, outputs),
        )
        self.skip = nn.Identity() if inputs == outputs else conv(inputs, outputs, 1, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.body(x) + self.skip(x))
        return out


class Stage(nn.Module):
    """LightNet blocks on a feature map `(batch, channels, *space)`: position once, then the
    blocks."""

    def __init__(
        self, dims: int, dim: int, depth: int, mixer: Callable[[int], nn.Module],
        mlp_ratio: float, tpe: bool, drop_path: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tpe = MDTPE(dims, dim) if tpe and depth else None
        self.blocks = nn.ModuleList(Block(dim, mixer, mlp_ratio, drop_path) for _ in range(depth))
        self.grad_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.movedim(1, -1)
        if self.tpe is not None:
            tokens = self.tpe(tokens)
        for block in self.blocks:
            if self.grad_checkpointing and self.training:
                tokens = checkpoint(block, tokens, use_reentrant=False)
            else:
                tokens = block(tokens)
        return tokens.movedim(-1, 1)


class NDLightUNet(nn.Module):
    """A U-Net whose encoder mixes with LightNet: `(batch, in_channels, *space)` -> `(batch,
    out_channels, *space)`.

    Args:
        dims: number of axes, 1 to 3 (as far as torch has convolutions).
        in_channels, out_channels: channels of the input; classes of the output (logits).
        widths: channels per level; each level halves the resolution (sizes rounded up).
        depths: LightNet blocks per level; 0 leaves a level to its convolutions.
        mixer, mlp_ratio, tpe: as in NDLightNet. drop_path_rate: stochastic depth of every block.

    Any size of input is taken: odd sizes are padded by one cell where they are halved, and cropped
    back.
    """

    def __init__(
        self,
        dims: int,
        in_channels: int = 1,
        out_channels: int = 2,
        *,
        widths: Sequence[int] = (32, 64, 128, 256),
        depths: Sequence[int] = (0, 1, 2, 2),
        mixer: Callable[[int], nn.Module] = LightNetAttention,
        mlp_ratio: float = 8 / 3,
        tpe: bool = True,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if len(widths) != len(depths) or not widths:
            raise ValueError(
                f"widths={widths!r}, depths={depths!r}: expected one of each per level"
            )
        self.dims, self.in_channels, self.out_channels = dims, in_channels, out_channels
        conv, up = _conv("Conv", dims), _conv("ConvTranspose", dims)
        self.down, self.convs, self.stages = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        self.up, self.decoders = nn.ModuleList(), nn.ModuleList()
        for level, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            before = widths[level - 1] if level else in_channels
            self.down.append(conv(before, width, 2, stride=2) if level else nn.Identity())
            self.convs.append(ConvBlock(dims, width if level else in_channels, width))
            self.stages.append(Stage(dims, width, depth, mixer, mlp_ratio, tpe, drop_path_rate))
            if level:
                self.up.append(up(width, before, 2, stride=2))
                self.decoders.append(ConvBlock(dims, 2 * before, before))
        self.head = conv(widths[0], out_channels, 1)
        self.stages.apply(init_weights)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the LightNet blocks in the backward pass instead of storing what is in them."""
        for stage in self.stages:
            stage.grad_checkpointing = enable  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != self.dims + 2 or x.shape[1] != self.in_channels:
            raise ValueError(
                f"input of shape {tuple(x.shape)}: expected (batch, {self.in_channels}, *space) "
                f"with {self.dims} axes"
            )
        skips: list[Tensor] = []
        for level, (down, convs, stage) in enumerate(
            zip(self.down, self.convs, self.stages, strict=True)
        ):
            if level:
                odd = [amount for size in reversed(x.shape[2:]) for amount in (0, size % 2)]
                x = down(nn.functional.pad(x, odd))
            x = stage(convs(x))
            skips.append(x)
        x = skips.pop()
        for up, decoder in zip(reversed(self.up), reversed(self.decoders), strict=True):
            skip = skips.pop()
            x = up(x)
            for axis, size in enumerate(skip.shape[2:], start=2):
                x = x.narrow(axis, 0, size)
            x = decoder(torch.cat([x, skip], dim=1))
        out: Tensor = self.head(x)
        return out
