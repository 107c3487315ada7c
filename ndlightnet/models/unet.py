"""NDLightUNet: dense prediction. Convolutions and LightNet blocks in the encoder, skips to a
convolutional decoder; on any number of axes with convolutions that are separable.

Features are (batch, channels, *space) between torch's convolutions and (batch, *space, channels)
between separable ones: their `channel_axis` is 1 or -1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, islice, pairwise
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ndlightnet.layout import per_axis
from ndlightnet.layout.abstract import check_integers, check_not_empty, exporting
from ndlightnet.models.config import accept_other_names, recorded
from ndlightnet.models.hub import Pretrained
from ndlightnet.models.large import Large
from ndlightnet.nn.block import init_network
from ndlightnet.nn.convolutional import Convolutional
from ndlightnet.nn.initial import Device, reset
from ndlightnet.nn.layers import GridLayer, Layers, Stage
from ndlightnet.nn.mixers import LightNetAttention
from ndlightnet.nn.mixers.base import Factories, layer_factories
from ndlightnet.nn.position import TPE
from ndlightnet.nn.separable import Separable
from ndlightnet.ops.dtypes import check_floats, check_not_wider
from ndlightnet.parallel import Exchange, Slab, layout_of
from ndlightnet.parallel.turns import Layer, Sweeper

Size = Literal["hybrid", "S", "M", "L"]
MOST = 320  # channels of a level by default


class Preset(NamedTuple):
    """width: channels of the first level, doubled from level to level, up to MOST. convs, depths: as
    in Level; the last number holds for all coarser levels. add: whether the decoder adds the
    encoder's feature maps to its own, or concatenates them."""

    width: int
    convs: tuple[int, ...]
    depths: tuple[int, ...]
    add: bool


SIZES: dict[Size, Preset] = {
    "hybrid": Preset(32, (1, 1, 0), (0, 0, 4), add=True),
    "S": Preset(24, (1, 1), (0, 1, 1), add=False),
    "M": Preset(32, (1, 1, 2), (0, 1, 2), add=False),
    "L": Preset(40, (1, 2, 3), (0, 2, 4), add=False),
}


class Level(NamedTuple):
    """A level of the encoder. width: channels. convs, depth: convolution blocks and LightNet blocks.
    stride: by how much it is coarser than the level before along each axis; None for the first."""

    width: int
    convs: int
    depth: int
    stride: tuple[int, ...] | None


def make_levels(
    dims: int,
    preset: Preset,
    strides: Sequence[int | Sequence[int]] | None = None,
    widths: Sequence[int] | None = None,
    convs: Sequence[int] | None = None,
    depths: Sequence[int] | None = None,
    causal: bool = False,
) -> list[Level]:
    """Return the levels of a U-Net, those of the preset where an argument of NDLightUNet is None.
    Raises ValueError for lists of other lengths, and numbers that are too small."""
    if strides is None:
        halved = (1, *[2] * (dims - 1)) if causal else 2
        strides = [halved] * (3 if widths is None else len(widths) - 1)
    if not isinstance(strides, Sequence):
        raise ValueError(
            f"strides={strides!r}: expected a list with, for each level after the first, an int or {dims} of them"
        )
    steps = [per_axis("strides", step, dims) for step in strides]
    if causal and any(step[0] > 1 for step in steps):
        raise ValueError(f"strides={strides!r}: expected 1 along the first axis if causal=True")
    count = len(steps) + 1
    numbers = {
        "widths": [min(MOST, preset.width << level) for level in range(count)] if widths is None else widths,
        "convs": _stretched(preset.convs, count) if convs is None else convs,
        "depths": _stretched(preset.depths, count) if depths is None else depths,
    }
    for name, values in numbers.items():
        least = int(name == "widths")
        integers = isinstance(values, Sequence) and all(isinstance(n, Integral) for n in values)
        if not integers or len(values) != count or min(values) < least:
            raise ValueError(
                f"{name}={values!r}: expected {count} numbers from {least} on, one more than strides={strides!r}"
            )
    if numbers["convs"][0] < 1:
        raise ValueError(f"convs={convs!r}: expected 1 or more at the first level")
    return [Level(*level) for level in zip(*numbers.values(), [None, *steps], strict=True)]


def _stretched(values: Sequence[int], count: int) -> list[int]:
    return [values[min(level, len(values) - 1)] for level in range(count)]


class NDLightUNet(Pretrained, Large):
    """A U-Net whose encoder mixes with LightNet: `(batch, in_channels, *space)` -> `(batch, out_channels, *space)`.

    Args:
        dims: number of axes.
        in_channels, out_channels: channels of the input; classes of the output (logits).
        size: the defaults of `widths`, `convs` and `depths`, in SIZES. "hybrid": two levels of convolutions, then
            levels of LightNet blocks alone, and a decoder that adds the encoder's feature maps to its own; "S", "M" and
            "L": convolutions at all levels, LightNet blocks too after the first, and a decoder that concatenates both.
            Default: "M"; "hybrid" for three axes and three levels or more, from torch's convolutions, if none of these
            three is given.
        strides: by how much each level after the first is coarser than the one before, one number or one for each axis;
            sizes are rounded up. Default: 2 (1 along the first axis if causal) for each level of `widths` after the
            first, or for three levels.
        widths: channels per level. convs: convolution blocks of the encoder per level, one or more in the first.
        depths: LightNet blocks per level; 0: convolutions only.
        mixer, tpe: as in NDLightNet; `mixer` counts layers from the first level to the last. drop_path_rate: stochastic
            depth of every block.
        deep_supervision: in training the output is a list: the logits, then those of the coarser levels of the decoder,
            each on the grid of that level.
        separable: build it from separable blocks (local mixing, then a gated MLP) and linear maps of patches, with
            layer norm in place of instance norm, rather than from torch's convolutions. Default: where torch has none
            (dims > 3), and for a causal network.
        causal: no output depends on a later step of the first axis (time). Separable networks with strides of 1 along
            it only.
        device, dtype: as in NDLightNet.

    The names spatial_dims, in_chans and num_classes are accepted for dims, in_channels and out_channels, as keywords in
    Python.

    Inputs may have any size: where strides do not divide it, it is padded before, cropped after. That holds for an
    exported network as well, with sizes as in NDLightNet and two cells or more along each axis of the coarsest level.

    There are no masks: padding would count in norms, convolutions and attention. Where samples have different sizes,
    give them one at a time, or crops of one size, and leave what pads a crop out of the loss.
    """

    adapts_channels = True
    usual: ClassVar = {"decoder": True}  # False in MONAI's networks, see NDLightUNetEncoder
    head_of: ClassVar = {"out_channels": "heads."}

    @accept_other_names
    @recorded
    def __init__(
        self,
        dims: int,
        in_channels: int = 1,
        out_channels: int = 2,
        *,
        size: Size | None = None,
        strides: Sequence[int | Sequence[int]] | None = None,
        widths: Sequence[int] | None = None,
        convs: Sequence[int] | None = None,
        depths: Sequence[int] | None = None,
        mixer: Factories = LightNetAttention,
        tpe: TPE = True,
        drop_path_rate: float = 0.0,
        deep_supervision: bool = False,
        separable: bool | None = None,
        causal: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_integers(1, dims=dims, in_channels=in_channels, out_channels=out_channels)
        separable = dims > 3 or causal if separable is None else separable
        if size is None:
            preset_levels = widths is None and convs is None and depths is None
            shallow = isinstance(strides, Sequence) and len(strides) < 2  # "hybrid" would have no LightNet block
            size = "hybrid" if dims == 3 and preset_levels and not (separable or shallow) else "M"
        if size not in SIZES:
            raise ValueError(f"size={size!r}: expected 'hybrid', 'S', 'M' or 'L'")
        if causal and not separable:
            raise ValueError("causal=True with separable=False: expected separable blocks")
        levels = make_levels(dims, SIZES[size], strides, widths, convs, depths, causal)
        self.dims, self.in_channels, self.out_channels = dims, in_channels, out_channels
        self.strides: list[Any] = [level.stride for level in levels[1:]]
        self.widths = tuple(level.width for level in levels)
        self.add, self.deep_supervision = SIZES[size].add, deep_supervision
        self.separable, self.causal = separable, causal
        factories = iter(layer_factories("mixer", mixer, sum(level.depth for level in levels), dims, causal=causal))
        layers: Any = Separable(dims, causal) if separable else Convolutional(dims)
        axis = self.channel_axis = layers.channel_axis
        self.down, self.convs, self.stages = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for inputs, level in zip((in_channels, *self.widths), levels, strict=False):
            down, blocks = layers.level(inputs, level.width, level.stride, level.convs)
            self.down.append(down)
            self.convs.append(Layers(*blocks))
            mixers = list(islice(factories, level.depth))
            self.stages.append(Stage(dims, level.width, mixers, tpe, drop_path_rate, axis, causal))
        self.up = nn.ModuleList(layers.up(low.width, high.width, low.stride) for high, low in pairwise(levels))
        inputs = 1 if self.add else 2  # of a decoder's level, in widths
        self.decoders = nn.ModuleList(layers.decoder(inputs * width, width) for width in self.widths[:-1])
        heads = max(1, len(levels) - 1) if deep_supervision else 1
        self.heads = nn.ModuleList(layers.head(width, out_channels) for width in self.widths[:heads])
        init_network(self.stages)

    def reset_parameters(self) -> None:
        """Initialise all parameters as the constructor does."""
        levels = zip(self.down, self.convs, self.stages, strict=True)
        reset(*[layer for level in levels for layer in level], self.up, self.decoders, self.heads)
        init_network(self.stages)

    @property
    def pipeline_tag(self) -> str | None:
        return "image-segmentation" if self.dims in (2, 3) else None

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute all blocks in the backward pass instead of storing their activations."""
        for module in self.modules():
            if isinstance(module, GridLayer):
                module.grad_checkpointing = enable

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        layouts = self._layouts(x)
        return self._decode(self._encode(x, layouts), layouts)

    def _layouts(self, x: Tensor) -> list[Any]:
        """Return the layouts of all levels within `shard_grid`, else None for each."""
        layout = layout_of(x, 2)
        return self._slabs(layout) if layout.shared else [None] * len(self.widths)

    def _slabs(self, layout: Any) -> list[Any]:
        """Return the layouts of a slab at all levels."""
        return list(accumulate(self.strides, Slab.strided, initial=layout))

    def encode(self, x: Tensor) -> list[Tensor]:
        """Return the feature maps of the encoder (batch, width, *grid), from the input's grid to
        the coarsest; each next grid is ceil(size / stride)."""
        return [y.movedim(self.channel_axis, 1) for y in self._encode(x, self._layouts(x))]

    def decode(self, features: Sequence[Tensor]) -> Tensor | list[Tensor]:
        """Map the feature maps of `encode` to what the network returns."""
        features = list(features)
        if len(features) != len(self.widths):
            raise ValueError(f"{len(features)} feature maps: expected {len(self.widths)}, one for each level")
        batch, space = features[0].shape[0], tuple(features[0].shape[2:])
        steps = [(1,) * self.dims, *self.strides]
        for level, (y, width, step) in enumerate(zip(features, self.widths, steps, strict=True)):
            space = tuple(-(-size // by) for size, by in zip(space, step, strict=False))
            if y.ndim != self.dims + 2 or tuple(y.shape) != (batch, width, *space):
                raise ValueError(f"features[{level}] {tuple(y.shape)}: expected {(batch, width, *space)}")
        layouts = self._layouts(features[0])
        return self._decode([y.movedim(1, self.channel_axis) for y in features], layouts)

    def _encode(self, x: Tensor, layouts: list[Any]) -> list[Tensor]:
        """Return the feature maps of the encoder, in the form of the layers."""
        self._check(x)
        skips: list[Tensor] = []
        steps = [None, *self.strides]
        levels = zip(steps, self.down, self.convs, self.stages, layouts, strict=True)
        for step, down, convs, stage, layout in levels:
            x = stage(convs(self._lowered(x, step, down), layout), layout)
            skips.append(x)
        return skips

    def _check(self, x: Tensor) -> None:
        check_floats(input=x)
        check_not_wider(self, input=x)
        if x.ndim != self.dims + 2 or x.shape[1] != self.in_channels:
            raise ValueError(
                f"input of shape {tuple(x.shape)}: expected (batch, {self.in_channels}, *space) with {self.dims} axes"
            )
        check_not_empty(x.shape[2:], x)

    def _lowered(self, x: Tensor, step: Any, down: nn.Module) -> Tensor:
        """Return the input of a level: downsampled, after padding to whole strides."""
        lowered: Tensor = down(_padded(x, step) if step and not self.separable else x)
        return lowered

    def _raised(self, x: Tensor, skip: Tensor, level: int, layout: Any) -> Tensor:
        """Return a level of the decoder, from the coarser one and the encoder's feature map."""
        x = _cropped(self.up[level](x), skip, self.channel_axis)
        x = x + skip if self.add else torch.cat([x, skip], self.channel_axis)
        del skip
        return self.decoders[level](x, layout)

    def _decode(self, skips: list[Tensor], layouts: list[Any]) -> Tensor | list[Tensor]:
        """Map the feature maps of `_encode` to the output, and empty the list."""
        outputs: list[Tensor] = []
        x = skips.pop()
        for level in reversed(range(len(self.strides) + 1)):
            if level < len(self.up):
                x = self._raised(x, skips.pop(), level, layouts[level])
            if level < len(self.heads) and (self.training or level == 0):
                outputs.insert(0, self.heads[level](x).movedim(self.channel_axis, 1))
        return outputs if self.deep_supervision and self.training else outputs[0]

    @property
    def slab_multiples(self) -> tuple[int, ...]:  # type: ignore[override]
        ones = (1,) * self.dims
        return tuple(math.prod(along) for along in zip(ones, *self.strides, strict=True))

    @property
    def bytes_per_cell(self) -> float:  # type: ignore[override]
        return 32.0 * self.widths[0]  # about eight maps of the first level, float32

    def sweep(self, sweeper: Sweeper, volume: list[Any]) -> Tensor:
        net: Any = self
        spaces = [x.shape[2:] for x in volume]

        def at(level: int, layer: Any) -> Layer:
            def run(exchange: Exchange, *inputs: Tensor) -> Tensor:
                cells = sweeper.slab(exchange, spaces[exchange.rank])
                return layer(*inputs, self._slabs(cells)[level])

            return run

        def first(level: int, x: Tensor, layout: Slab) -> Tensor:
            x = self._lowered(x, [None, *self.strides][level], net.down[level])
            return Layers(*net.convs[level][:1])(x, layout)

        def last(level: int, x: Tensor, skip: Tensor, layout: Slab) -> Tensor:
            x = self._raised(x, skip, level, layout)
            return x if level else head(x, layout)

        def head(x: Tensor, _: Slab) -> Tensor:
            return sweeper.then(net.heads[0](x).movedim(self.channel_axis, 1))

        x: Any = sweeper.later(at(0, partial(first, 0)), volume)
        skips: list[Any] = []
        for level in range(len(self.widths)):
            if level:
                x = sweeper.apply(at(level, partial(first, level)), x)
            for layer in [*net.convs[level][1:], *net.stages[level].layers()]:
                x = sweeper.apply(at(level, layer), x, drop=True)
            skips.append(x)
        x = skips.pop()
        if not skips:
            x = sweeper.apply(at(0, head), x, drop=True)
        for level in reversed(range(len(skips))):
            x = sweeper.apply(at(level, partial(last, level)), x, skips.pop(), drop=True)
        return sweeper.joined(x)

    if TYPE_CHECKING:  # what an editor knows of a call; a list only in training

        def __call__(self, x: Tensor) -> Any: ...


def _cropped(x: Tensor, like: Tensor, channel_axis: int) -> Tensor:
    """Crop x to the first cells along each axis, as many as `like` has."""
    first = 2 if channel_axis == 1 else 1
    for axis, size in enumerate(like.shape[first : first + like.ndim - 2], start=first):
        # a view that crops nothing is contiguous, and torch.export would assume that for all
        x = x.index_select(axis, torch.arange(size, device=x.device)) if exporting() else x.narrow(axis, 0, size)
    return x


def _padded(x: Tensor, step: Sequence[int]) -> Tensor:
    """Pad x at the end of each axis, such that `step` divides it."""
    pairs = zip(reversed(x.shape[2:]), reversed(step), strict=True)
    missing = [amount for size, by in pairs for amount in (0, -size % by)]
    # torch copies x where nothing is missing, but an exported graph takes any size
    return nn.functional.pad(x, missing) if exporting() or any(missing) else x
