"""The features of a backbone for other networks and for fine-tuning: features of inner blocks, the
groups of parameters that layer decay needs, other patches and other channels. Names and arguments
are timm's; all work on any number of axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet.layout import Boxed, Grid, Layout, Packed, per_axis
from ndlightnet.models.hub import Pretrained
from ndlightnet.models.large import Large
from ndlightnet.nn.patch import PatchEmbed, Patchify
from ndlightnet.ops.dtypes import check_not_wider
from ndlightnet.parallel import Exchange, Shard, Slab, activated, refuse_shards
from ndlightnet.parallel.turns import Sweeper

FORMS = ("NCHW", "NHWC", "NLC")
# layers that take the channels of the input, of NDLightNet and of both kinds of NDLightUNet
FIRST = ("embed.proj", "embed.first.0", "down.0.proj", "convs.0.0.conv1", "convs.0.0.skip")


class Backbone(Pretrained, Large):
    """Base class of NDLightNet: what other libraries ask of a backbone."""

    dims: int
    embed_dim: int
    per_token: bool
    embed: nn.Module
    blocks: nn.ModuleList
    norm: nn.Module
    _model_args: dict[str, Any]
    _traits: dict[str, Any]

    def _embedded(self, x: Any, mask: Tensor | None) -> tuple[Tensor, Tensor | None, Layout]:
        raise NotImplementedError

    def _check_boxed(self, boxed: Boxed, mask: Tensor | None) -> None:
        """Check boxes that the network gets instead of samples."""
        refuse_shards("boxes")
        net: Any = self
        x, layout, patch = boxed.values, boxed.layout, getattr(net.embed, "patch", ())
        cells = tuple(n * p for n, p in zip(layout.shape, patch, strict=False))
        if tuple(x.shape[1:]) != (net.in_chans, *cells) or layout.ndim != self.dims:
            raise ValueError(
                f"boxes of cells {tuple(x.shape[1:])}: expected (in_chans={net.in_chans}, *cells) "
                f"of {layout.shape} tokens of {patch}"
            )
        check_not_wider(net, boxes=x)
        if mask is not None or net.causal:
            what = "mask" if mask is not None else "causal=True"
            raise ValueError(f"{what}: expected none with boxes, which are read as a whole")

    @property
    def bytes_per_cell(self) -> float:  # type: ignore[override]
        # a block's activations: about 20 numbers of 4 bytes for each channel of a token
        return 80 * self.embed_dim / math.prod(self.slab_multiples)

    def sweep(self, sweeper: Sweeper, volume: list[Any]) -> Tensor:
        net: Any = self

        def embedded(exchange: Exchange, x: Tensor) -> Tensor:
            with activated(Shard(exchange, sweeper.axis, sweeper.sizes)):
                return self._embedded(x, None)[0]

        def layout(exchange: Exchange) -> Slab:
            cells = sweeper.slab(exchange, spaces[exchange.rank])
            return cells.strided(self.slab_multiples)

        def through(block: Any, exchange: Exchange, x: Tensor) -> Tensor:
            return self._through(block, x, None, layout(exchange))

        def last(exchange: Exchange, x: Tensor) -> Tensor:
            there, x = layout(exchange), self.norm(x)
            return there.unflatten(x) if self.per_token else there.pool(x)

        spaces = [x.shape[2:] for x in volume]
        tokens = sweeper.apply(embedded, volume)
        for block in self.blocks:
            tokens = sweeper.apply(partial(through, block), tokens, drop=True)
        found = sweeper.apply(last, tokens, drop=True)
        features = torch.cat(found, 1 + sweeper.axis) if self.per_token else found[0]
        head: Tensor = net.head(net.head_drop(features.to(sweeper.device)))
        return sweeper.then(head).cpu()

    def _check_packed(self, packed: Packed, mask: Tensor | None) -> None:
        """Check packed samples that the network gets."""
        net: Any = self
        net._check_stem("packed samples")
        x, layout = packed.values, packed.layout
        width = (net.embed.proj.in_features,) if isinstance(net.embed, Patchify) else ()
        if tuple(x.shape) != (layout.length, *width) or layout.ndim != net.dims:
            raise ValueError(
                f"packed samples {tuple(x.shape)} with {layout.ndim} axes: expected "
                f"{(layout.length, *width)} with {net.dims}; pack with the network's patch_size"
            )
        check_not_wider(net, values=x)
        if mask is not None:
            raise ValueError("mask: expected none with packed samples, which have no padding")

    def _through(self, block: Any, x: Tensor, mask: Tensor | None, layout: Layout) -> Tensor:
        raise NotImplementedError

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        raise NotImplementedError

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """What each block returns: its name `module`, channels `num_chs` and `reduction`, cells per
        token along an axis (the most of any axis)."""
        reduction = max(self.embed.patch) if isinstance(self.embed, PatchEmbed) else 1
        return [
            {"module": f"blocks.{i}", "num_chs": self.embed_dim, "reduction": reduction}
            for i in range(len(self.blocks))
        ]

    @property
    def global_pool(self) -> str:
        """timm's name of what lies before the head: "avg", the mean over tokens, or "", nothing."""
        return "" if self.per_token else "avg"

    def forward_intermediates(
        self,
        x: Any,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        mask: Tensor | None = None,
    ) -> Any:
        """Return (features, intermediates): those of `forward_features`, and a list of the features
        after some blocks, from the first to the last.

        Args:
            x: as in `forward_features`; of a pack all features are Packed.
            indices: the blocks, negative ones counted from the last; an int: the last n; None: all.
            norm: apply the last norm to the intermediates.
            stop_early: leave out the blocks after the last of `indices`, in both results.
            output_fmt: of the intermediates: "NCHW" (batch, embed_dim, *grid), "NHWC" (batch,
                *grid, embed_dim) or "NLC" (batch, length, embed_dim), on any number of axes.
            intermediates_only: return the list alone.
            mask: bool (batch, *space), False = padding.
        """
        if output_fmt not in FORMS:
            raise ValueError(f"output_fmt={output_fmt!r}: expected one of {FORMS}")
        if norm and not isinstance(self.norm, nn.LayerNorm):
            raise ValueError("norm=True: expected a network whose norm is not pruned")
        taken = self._block_indices(indices)
        tokens, token_mask, layout = self._embedded(x, mask)
        maps = []
        for i, block in enumerate(self.blocks):
            tokens = self._through(block, tokens, token_mask, layout)
            if i in taken:
                maps.append(shaped(self.norm(tokens) if norm else tokens, layout, output_fmt))
            if stop_early and i == max(taken):
                break
        if intermediates_only:
            return maps
        return shaped(self.norm(tokens), layout, "NHWC"), maps

    def get_intermediate_layers(
        self,
        x: Any,
        n: int | Sequence[int] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        mask: Tensor | None = None,
    ) -> list[Any]:
        """Return the features after the last n blocks, or after the blocks n, as a list of (batch,
        length, embed_dim), with `reshape` (batch, embed_dim, *grid). There are no prefix tokens:
        `return_prefix_tokens` changes nothing, as in timm."""
        maps: list[Any] = self.forward_intermediates(
            x, n, norm, output_fmt="NCHW" if reshape else "NLC", intermediates_only=True, stop_early=True, mask=mask
        )
        return maps

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the blocks after the last of `indices`, and with the options the norm and the
        head. Return the indices as counted from the first block."""
        taken = self._block_indices(indices)
        self.blocks = self.blocks[: max(taken) + 1]
        if prune_norm:
            self.norm = nn.Identity()
            self.record(norm=False)
        mixer = self.config.get("mixer")
        last: Any = self.blocks[-1]
        self.record(depth=len(self.blocks), drop_path_rate=last.drop_path.p)
        if isinstance(mixer, list):
            self.record(mixer=mixer[: len(self.blocks)])
        if prune_head:
            self.reset_classifier(0)
        return taken

    def _block_indices(self, indices: Any) -> list[int]:
        """Return indices counted from the first block, in the order given. indices: an integer of
        any type, a sequence of them, or None."""
        blocks = len(self.blocks)
        if indices is None:
            return list(range(blocks))
        if isinstance(indices, Integral):
            count = int(indices)
            if not 0 < count <= blocks:
                raise ValueError(f"indices={indices}: expected 1 to {blocks}, the number of blocks")
            return list(range(blocks - count, blocks))
        if not indices or any(not -blocks <= i < blocks for i in indices):
            raise ValueError(
                f"indices={indices!r}: expected one or more of -{blocks} to {blocks - 1}, there are {blocks} blocks"
            )
        return [i % blocks for i in indices]

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return regular expressions of parameter names in timm's form, for layer decay: the stem
        (embedding and MD-TPE), each block, the norm with the last block; the head is the rest.
        coarse: no change, there are no stages of several blocks."""
        return {"stem": r"^(?:embed|tpe)\.", "blocks": [(r"^blocks\.(\d+)\.", None), (r"^norm\.", (99999,))]}

    @torch.no_grad()
    def set_input_size(
        self, img_size: int | Sequence[int] | None = None, patch_size: int | Sequence[int] | None = None
    ) -> None:
        """Change the patch size, and resample the embedding's weights to it.

        img_size: checked, and changes nothing: inputs may have any size.
        patch_size: new cells per token. The new weights are those whose tokens of a linearly
            resized patch are closest to the old tokens of the patch: equal if the patch grows.
        """
        if not isinstance(self.embed, Patchify):
            raise ValueError(
                "set_input_size: expected a network whose patches are one linear map, not of words "
                "and not with stem_blocks"
            )
        size = None if img_size is None else per_axis("img_size", img_size, self.dims)
        old, new = self.embed.patch, self.embed.patch
        if patch_size is not None:
            new = per_axis("patch_size", patch_size, self.dims)
        if "_model_args" in vars(self):  # made by timm: what its `save_for_hf` saves
            self._model_args = {**self._model_args, "patch_size": new}
            self._traits = {**self._traits, "img_size": size or self._traits["img_size"]}
        if new == old:
            return
        proj = self.embed.proj
        weight = proj.weight.double().unflatten(1, (*old, -1))
        for axis, (before, after) in enumerate(zip(old, new, strict=True), start=1):
            inverse = torch.linalg.pinv(_resize(before, after)).to(weight)
            weight = torch.tensordot(weight, inverse, ([axis], [1])).movedim(-1, axis)
        weight = weight.flatten(1).to(proj.weight)
        proj.in_features = weight.shape[1]
        proj.weight = nn.Parameter(weight, proj.weight.requires_grad)
        self.embed.patch = new
        self.record(patch_size=new)


def _resize(old: int, new: int) -> Tensor:
    """Return the matrix (old, new), float64, that resizes rows of `old` cells to `new` by linear
    interpolation, with averaging where they shrink."""
    eye = torch.eye(old, dtype=torch.float64)[None, None]
    return nn.functional.interpolate(eye, (old, new), mode="bilinear", antialias=True)[0, 0]


def shaped(x: Tensor, layout: Layout, form: str) -> Any:
    """Shape tokens (batch, length, dim) as one of FORMS; those of a pack are Packed."""
    if not isinstance(layout, Grid):  # samples of different shapes have no tensor of one shape
        return Packed(layout.unflatten(x), layout)  # type: ignore[arg-type]
    if form == "NLC":
        return x
    x = layout.unflatten(x)
    # other networks' heads use `view`
    return x.movedim(-1, 1).contiguous() if form == "NCHW" else x


def adapt_in_chans(state: Mapping[str, Tensor], net: nn.Module) -> dict[str, Tensor]:
    """Return a state dict of NDLightNet or NDLightUNet with its first layer changed to the number
    of input channels of `net`, for `load_state_dict`. One channel: the sum over the old ones;
    more or fewer: the old ones repeated, or the first of them, times old / new, as in timm."""
    adapted = dict(state)
    for layer in FIRST:
        name = f"{layer}.weight"
        weight = net.state_dict().get(name)
        if weight is None or name not in state or state[name].shape == weight.shape:
            continue
        parent = net.get_submodule(layer.rpartition(".")[0])
        cells = math.prod(getattr(parent, "patch", ()))
        old = state[name]
        if old.ndim != weight.ndim or len(old) != len(weight) or old.shape[1] % cells:
            continue  # another network: `load_state_dict` names what does not fit
        # (outputs, cells, channels, kernel): the channels of a linear map of patches come last
        old = old.reshape(len(old), cells, -1, *old.shape[2:])
        before, after = old.shape[2], weight.shape[1] // cells
        if after == 1:
            new = old.sum(2, keepdim=True)
        else:
            index = torch.arange(after, device=old.device) % before
            new = old.index_select(2, index) * (before / after)
        adapted[name] = new.reshape(len(old), cells * after, *old.shape[3:])
    return adapted
