"""NDLightNet: one backbone for text, images, videos and volumes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, overload

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ndlightnet.layout import Boxed, Grid, Layout, Packed, pack, per_axis
from ndlightnet.layout.abstract import check_integers, check_not_empty
from ndlightnet.models.config import accept_other_names, recorded
from ndlightnet.models.hub import Pretrained
from ndlightnet.models.large import Large
from ndlightnet.models.stream import Stream, StreamState
from ndlightnet.nn.block import Block, init_network, init_weights
from ndlightnet.nn.embedding import Embedding, PatchEmbed, Patchify
from ndlightnet.nn.initial import Device, Space
from ndlightnet.nn.mixers import LightNetAttention, published_mixer
from ndlightnet.nn.mixers.base import Factories, layer_factories
from ndlightnet.nn.position import TPE, build_tpe
from ndlightnet.nn.projections import exact_norm, fuses, hooked
from ndlightnet.nn.stem import ConvStem
from ndlightnet.ops.dtypes import check_not_wider, check_tensors
from ndlightnet.parallel import (
    Exchange,
    Shard,
    Slab,
    activated,
    layout_of,
    layout_of_pack,
    layout_of_tokens,
    refuse_shards,
)
from ndlightnet.parallel.turns import Sweeper

FORMS = ("NCHW", "NHWC", "NLC")  # of features, for any number of axes


class NDLightNet(Pretrained, Large):
    """Backbone: patches (or words) -> MD-TPE -> blocks -> norm -> head, on any number of axes.

    Args:
        dims: number of axes of the input (1 signals and text, 2 images, 3 videos and volumes, ...).
        in_chans: channels of the input.
        num_classes: outputs of the head, 0 for none; with `vocab_size` the default is a language model (one output
            per word of the vocabulary at every token).
        patch_size: cells per token, an int or one per axis; default: about 256 cells a patch.
        embed_dim, depth: width and number of blocks.
        stem_blocks: a patch becomes a token by residual convolutions, so many blocks of them at each halving, as
            ConvStem says; patch sizes are powers of 2. 0: by one linear map.
        mixer: a name of ndlightnet.nn.mixers, such as "GLA", {name: arguments}, a function of the width that returns
            a mixer, or a list of one for each layer; for text, text_mixer. If its signature names `dims`, `layer` or
            `causal`, it is called with the number of axes, the index of the layer or the argument below, too.
        tpe: MD-TPE after the embedding: its sum is added to the tokens, each axis scanned forward and backward (except
            the first one if causal); "published": the paper's form, in their place and forward only. tpe_states: its
            states per axis.
        drop_rate: dropout before the head. drop_path_rate: stochastic depth, growing to this in the last block.
        dropout: of the embedded tokens and of what each mixer and MLP adds to them, as in language models.
        causal: along the first axis: a token sees its frame (a step of that axis, `patch_size` long) and those before
            it; with one axis, the tokens up to itself. See `stream`.
        vocab_size: input is token numbers `(batch, length)` instead of cells `(batch, channels, *space)`.
        tied: the head of a language model has the weights of its embedding.
        device, dtype: where the network is built, and what it is converted to; not options of YAML.

    MONAI's names spatial_dims, in_channels and out_channels are accepted for dims, in_chans and num_classes, as
    keywords in Python.

    Inputs may have any size, in every call: sizes that the patch does not divide are padded at the end. So may those
    of an exported network (not causal, two tokens or more along each axis) whose `dynamic_shapes` are
    `torch.export.Dim.DYNAMIC` (`({2: Dim.DYNAMIC, 3: Dim.DYNAMIC},)` for an image), with limits or without, or
    `Dim.AUTO`; a batch of any size needs an example of two samples or more. A named `Dim("height")` does not work:
    torch cannot solve for it.

    Methods and arguments for features, layer decay and other heads, patches and channels are timm's.
    """

    adapts_channels = True
    usual: ClassVar = {"global_pool": "avg", "norm": True}
    head_of: ClassVar = {"num_classes": "head."}
    embed: Any
    tpe: Any
    blocks: Any
    norm: Any
    head: Any
    _model_args: dict[str, Any]
    _traits: dict[str, Any]

    @accept_other_names
    @recorded
    def __init__(
        self,
        dims: int,
        in_chans: int = 3,
        num_classes: int | None = None,
        *,
        patch_size: int | Sequence[int] | None = None,
        embed_dim: int = 384,
        depth: int = 12,
        stem_blocks: int = 0,
        mixer: Factories = LightNetAttention,
        tpe: TPE = True,
        tpe_states: int = 128,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        dropout: float = 0.0,
        causal: bool = False,
        vocab_size: int | None = None,
        tied: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_integers(1, dims=dims, embed_dim=embed_dim, depth=depth)
        if num_classes is not None:
            check_integers(0, num_classes=num_classes)
        if vocab_size is None:
            check_integers(1, in_chans=in_chans)
        else:
            check_integers(1, vocab_size=vocab_size)
        check_integers(0, stem_blocks=stem_blocks)
        if stem_blocks and (causal or vocab_size):
            argument = "causal=True" if causal else f"vocab_size={vocab_size}"
            reason = "convolutions see later frames and read cells"
            raise ValueError(f"stem_blocks={stem_blocks} with {argument}: expected 0, {reason}")
        if dims > 1 and vocab_size:
            raise ValueError(f"dims={dims} with vocab_size={vocab_size}: expected dims=1")
        factories = layer_factories("mixer", mixer, depth, dims, causal=causal)
        self.dims, self.in_chans = dims, in_chans
        self.embed_dim = self.num_features = embed_dim
        self.causal, self.vocab_size = causal, vocab_size
        self.per_token = vocab_size is not None and num_classes is None
        self.num_classes = num_classes if num_classes is not None else (vocab_size or 1000)
        if vocab_size is not None:
            self.embed = Embedding(vocab_size, embed_dim, "input")
        else:
            if patch_size is None:
                patch_size = max(1, round(256 ** (1 / dims)))
            shape = dims, in_chans, patch_size, embed_dim
            self.embed = ConvStem(*shape, stem_blocks) if stem_blocks else Patchify(*shape)
        self.tpe = build_tpe(tpe, dims, embed_dim, tpe_states, causal=causal)
        self.embed_drop = nn.Dropout(dropout) if dropout else nn.Identity()
        rates = [drop_path_rate * i / max(1, depth - 1) for i in range(depth)]
        self.blocks = nn.ModuleList(
            Block(embed_dim, factory, rate, dropout) for factory, rate in zip(factories, rates, strict=True)
        )
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.head_drop = nn.Dropout(drop_rate)
        self.grad_checkpointing = False
        self.tied = self.per_token and tied
        self.head = nn.Identity()
        if self.tied:  # on meta, as nothing is to be drawn for it
            self.head = nn.Linear(embed_dim, self.num_classes, bias=False, device="meta")
            self._tie()
        elif self.num_classes:
            self.head = nn.Linear(embed_dim, self.num_classes)
        self.register_load_state_dict_post_hook(_tie_again)
        init_network(self)

    def _tie(self) -> None:
        if self.tied:
            self.head.weight = self.embed.weight

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self._tie()  # again, as `to_empty` makes two tensors of one on meta
        return self

    @property
    def _predicts_words(self) -> bool:
        return self.per_token and self.num_classes == self.vocab_size

    @property
    def pipeline_tag(self) -> str | None:
        if self.vocab_size is not None:
            if not self._predicts_words:
                return "text-classification"
            return "text-generation" if self.causal else "fill-mask"
        if self.dims != 2:
            return None
        return "image-classification" if self.num_classes else "image-feature-extraction"

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a new one for `num_classes` classes (0: none), with global_pool="avg" on the mean over
        tokens, with "" on every token, with None on the same as before; a language model then classifies the mean."""
        check_integers(0, num_classes=num_classes)
        if global_pool is None:
            global_pool = "" if self.per_token and not (self._predicts_words and num_classes) else "avg"
        if global_pool not in ("avg", ""):
            raise ValueError(f"global_pool={global_pool!r}: expected 'avg', '' or None")
        self.num_classes, self.per_token, self.tied = num_classes, global_pool == "", False
        self.head = nn.Linear(self.embed_dim, num_classes) if num_classes else nn.Identity()
        self.head.apply(init_weights).to(self._weight)
        self.record(num_classes=num_classes, global_pool=global_pool)

    @property
    def _weight(self) -> Tensor:
        """A weight with the device and dtype of the residual stream; the norm may be pruned."""
        norm = self.norm if isinstance(self.norm, nn.LayerNorm) else self.blocks[0].norm1
        return norm.weight

    @torch.no_grad()
    def set_input_size(
        self, img_size: int | Sequence[int] | None = None, patch_size: int | Sequence[int] | None = None
    ) -> None:
        """Change the patch size, and resample the embedding's weights to it.

        img_size: checked, and changes nothing: inputs may have any size. patch_size: new cells per token. The new
        weights are those whose tokens of a linearly resized patch are closest to the old tokens of the patch: equal
        if the patch grows.
        """
        if not isinstance(self.embed, Patchify):
            raise ValueError("set_input_size: expected a network of patches, not of words and not with stem_blocks")
        size = None if img_size is None else per_axis("img_size", img_size, self.dims)
        new = self.embed.patch if patch_size is None else per_axis("patch_size", patch_size, self.dims)
        if "_model_args" in vars(self):  # made by timm: what its `save_for_hf` saves
            self._model_args = {**self._model_args, "patch_size": new}
            self._traits = {**self._traits, "img_size": size or self._traits["img_size"]}
        if new == self.embed.patch:
            return
        self.embed.resize(new)
        self.record(patch_size=new)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the blocks in the backward pass instead of storing their activations."""
        self.grad_checkpointing = enable

    def token_mask(self, mask: Tensor | None) -> Tensor | None:
        """Map a mask of cells (batch, *space) to tokens (batch, *grid): True with any real cell."""
        return self.embed.cut_mask(mask) if mask is not None and isinstance(self.embed, Patchify) else mask

    def pack(self, samples: Iterable[Tensor]) -> Packed:
        """Pack samples (in_chans, *space), or words (length,), of any sizes into one batch without padding, for
        `forward`. See ndlightnet.pack, which a DataLoader can use without the network.
        """
        self._check_stem("pack")
        samples = list(samples.unbind() if isinstance(samples, Tensor) else samples)
        cells = self.vocab_size is None
        form = f"(in_chans={self.in_chans}, *space) with {self.dims} axes" if cells else "words (length,)"
        for i, x in enumerate(samples):
            if isinstance(x, Tensor) and (x.ndim != self.dims + cells or (cells and x.shape[0] != self.in_chans)):
                raise ValueError(f"samples[{i}] {tuple(x.shape)}: expected {form}")
        return pack(samples, self.embed.patch if isinstance(self.embed, Patchify) else None)

    @overload
    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor: ...
    @overload
    def forward_features(self, x: Packed, mask: Tensor | None = None) -> Packed: ...
    @overload
    def forward_features(self, x: Boxed) -> Tensor: ...
    @overload
    def forward_features(self, x: Tensor | Packed, mask: Tensor | None = None) -> Any: ...
    def forward_features(self, x: Any, mask: Tensor | None = None) -> Any:
        """Map cells (batch, in_chans, *space) or token numbers (batch, length) to features (batch, *grid, embed_dim),
        packed samples to Packed features (length, embed_dim), Boxed cells to those of each box (samples * count,
        *box, embed_dim).

        mask: bool (batch, *space), False = padding, which no other token sees.
        """
        tokens, token_mask, layout = self._embedded(x, mask)
        branch = None
        for block in self.blocks:
            if self._adds_later(block, tokens):
                tokens, branch = block(tokens, token_mask, self.causal, layout, branch, apart=True)
            else:
                tokens = tokens if branch is None else tokens + branch
                tokens, branch = self._through(block, tokens, token_mask, layout), None
        tokens = tokens if branch is None else tokens + branch
        return shaped(exact_norm(tokens, self.norm), layout, "NHWC")

    def _adds_later(self, block: Any, x: Tensor) -> bool:
        """Return whether the norm of the next block may add what a block adds to x: nobody else asks for the sum."""
        return type(block) is Block and fuses(x, block.norm1) and not (self.grad_checkpointing or hooked(block))

    def _embedded(self, x: Any, mask: Tensor | None) -> tuple[Tensor, Tensor | None, Layout]:
        """Return the tokens (batch, length, dim) of an input after the embedding and MD-TPE, their mask (batch,
        length) and layout."""
        layout: Layout
        if isinstance(x, Packed):
            self._check_packed(x, mask)
            embed = self.embed.proj if isinstance(self.embed, Patchify) else self.embed
            layout, tokens = layout_of_pack(x.values, x.layout), embed(x.values[None])
        elif isinstance(x, Boxed):
            self._check_boxed(x, mask)
            layout, tokens = x.layout, x.layout.flatten(self.embed(x.values))
        else:
            self._check(x, mask)
            cells = layout_of(x, x.ndim - self.dims)  # first: all processes refuse what one must
            if not self.per_token:  # else no tokens give no outputs; a mean needs one
                check_not_empty(x.shape[-self.dims :], x)
            if mask is not None and self.vocab_size is None:
                x = x.masked_fill(~mask[:, None], 0)
            x, mask = self.embed(x), self.token_mask(mask)
            layout = cells.strided(self.slab_multiples) if cells.shared else Grid.of(x)
            tokens, mask = layout.flatten(x), layout.flatten_mask(mask)
        # the residual stream stays in the parameters' precision under autocast
        dtype = self._weight.dtype
        tokens = tokens.to(dtype) if self.tpe is None else self.tpe(tokens, mask, layout, dtype)
        return self.embed_drop(tokens), mask, layout

    def _through(self, block: Any, x: Tensor, mask: Tensor | None, layout: Layout) -> Any:
        if self.grad_checkpointing and self.training:
            return checkpoint(block, x, mask, self.causal, layout, use_reentrant=False)
        return block(x, mask, self.causal, layout)

    def _check_packed(self, packed: Packed, mask: Tensor | None) -> None:
        self._check_stem("packed samples")
        x, layout = packed.values, packed.layout
        width = (self.embed.proj.in_features,) if isinstance(self.embed, Patchify) else ()
        if tuple(x.shape) != (layout.length, *width) or layout.ndim != self.dims:
            patch = getattr(self.embed, "patch", None)
            how = f"with the network's patch_size={patch}, of in_chans={self.in_chans}" if width else "words"
            expected = f"{(layout.length, *width)} with {self.dims}; pack {how}"
            raise ValueError(f"packed samples {tuple(x.shape)} with {layout.ndim} axes: expected {expected}")
        check_not_wider(self, values=x)
        if mask is not None:
            raise ValueError("mask: expected none with packed samples, which have no padding")

    def _check_boxed(self, boxed: Boxed, mask: Tensor | None) -> None:
        refuse_shards("boxes")
        x, layout, patch = boxed.values, boxed.layout, getattr(self.embed, "patch", ())
        cells = tuple(n * p for n, p in zip(layout.shape, patch, strict=False))
        if tuple(x.shape[1:]) != (self.in_chans, *cells) or layout.ndim != self.dims:
            expected = f"(in_chans={self.in_chans}, *cells) of {layout.shape} tokens of {patch}"
            raise ValueError(f"boxes of cells {tuple(x.shape[1:])}: expected {expected}")
        check_not_wider(self, boxes=x)
        if mask is not None or self.causal:
            what = "mask" if mask is not None else "causal=True"
            raise ValueError(f"{what}: expected none with boxes, which are read as a whole")

    @property
    def slab_multiples(self) -> tuple[int, ...]:  # type: ignore[override]
        self._check_stem("shard_grid and predict_large")
        return getattr(self.embed, "patch", (1,) * self.dims)

    def _check_stem(self, what: str) -> None:
        if isinstance(self.embed, ConvStem):
            raise ValueError(f"{what}: expected none with stem_blocks, which mix cells")

    def _check(self, x: Tensor, mask: Tensor | None = None) -> None:
        check_tensors(input=x)
        if self.vocab_size is not None:
            good = x.ndim == 2 and x.dtype in (torch.int64, torch.int32)
            expected = "token numbers (batch, length), integers: int64 or int32"
        else:
            good = x.ndim == self.dims + 2 and x.shape[1] == self.in_chans and x.is_floating_point()
            expected = f"floats (batch, in_chans={self.in_chans}, *space) with {self.dims} axes"
        if not good:
            raise ValueError(f"input {tuple(x.shape)} {x.dtype}: expected {expected}")
        check_not_wider(self, input=x)
        patch = self.embed.patch if isinstance(self.embed, PatchEmbed) else ()
        # of a causal network only the space: a stream gives few frames at a time
        axes = list(zip(x.shape[2:], patch, strict=False))[self.causal :]
        # not in a graph, which takes any size
        if axes and not torch.compiler.is_compiling() and all(n < p for n, p in axes):
            problem = f"input {tuple(x.shape)}: smaller than patch_size={patch}, so it is one token, padded with zeros"
            warnings.warn(f"{problem}; expected a smaller patch_size", stacklevel=4)
        cells = (x.shape[0], *x.shape[-self.dims :])
        if mask is not None:
            check_tensors(mask=mask)
            self._check_stem("mask")
        if mask is not None and (mask.dtype != torch.bool or tuple(mask.shape) != cells):
            raise ValueError(f"mask {tuple(mask.shape)} {mask.dtype}: expected bool {cells}")

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """What each block returns: its name `module`, channels `num_chs` and `reduction`, cells per token along an
        axis (the most of any axis)."""
        reduction = max(self.embed.patch) if isinstance(self.embed, PatchEmbed) else 1
        each = {"num_chs": self.embed_dim, "reduction": reduction}
        return [{"module": f"blocks.{i}", **each} for i in range(len(self.blocks))]

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
        """Return (features, intermediates): those of `forward_features`, and a list of the features after some
        blocks, from the first to the last.

        Args:
            x: as in `forward_features`; of a pack all features are Packed.
            indices: the blocks, negative ones counted from the last; an int: the last n; None: all.
            norm: apply the last norm to the intermediates.
            stop_early: leave out the blocks after the last of `indices`, in both results.
            output_fmt: of the intermediates: "NCHW" (batch, embed_dim, *grid), "NHWC" (batch, *grid, embed_dim) or
                "NLC" (batch, length, embed_dim), on any number of axes.
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
                maps.append(shaped(exact_norm(tokens, self.norm) if norm else tokens, layout, output_fmt))
            if stop_early and i == max(taken):
                break
        if intermediates_only:
            return maps
        return shaped(exact_norm(tokens, self.norm), layout, "NHWC"), maps

    def get_intermediate_layers(
        self,
        x: Any,
        n: int | Sequence[int] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        mask: Tensor | None = None,
    ) -> list[Any]:
        """Return the features after the last n blocks, or after the blocks n, as a list of (batch, length,
        embed_dim), with `reshape` (batch, embed_dim, *grid). There are no prefix tokens: `return_prefix_tokens`
        changes nothing, as in timm."""
        form = "NCHW" if reshape else "NLC"
        return self.forward_intermediates(x, n, norm, True, form, intermediates_only=True, mask=mask)  # type: ignore

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the blocks after the last of `indices`, and with the options the norm and the head. Return the
        indices as counted from the first block."""
        taken = self._block_indices(indices)
        self.blocks = self.blocks[: max(taken) + 1]
        if prune_norm:
            self.norm = nn.Identity()
            self.record(norm=False)
        mixer = self.config.get("mixer")
        self.record(depth=len(self.blocks), drop_path_rate=self.blocks[-1].drop_path.p)
        if isinstance(mixer, list):
            self.record(mixer=mixer[: len(self.blocks)])
        if prune_head:
            self.reset_classifier(0)
        return taken

    def _block_indices(self, indices: Any) -> list[int]:
        """Return indices counted from the first block, in the order given. indices: an integer of any type, a
        sequence of them, or None."""
        blocks = len(self.blocks)
        if indices is None:
            return list(range(blocks))
        if isinstance(indices, Integral):
            if int(indices) not in range(1, blocks + 1):
                raise ValueError(f"indices={indices}: expected 1 to {blocks}, the number of blocks")
            return list(range(blocks - int(indices), blocks))
        if not indices or any(not -blocks <= i < blocks for i in indices):
            raise ValueError(f"indices={indices!r}: expected some of -{blocks} to {blocks - 1}, of {blocks} blocks")
        return [i % blocks for i in indices]

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return regular expressions of parameter names in timm's form, for layer decay: the stem (embedding and
        MD-TPE), each block, the norm with the last block; the head is the rest. coarse: no change, there are no
        stages of several blocks."""
        return {"stem": r"^(?:embed|tpe)\.", "blocks": [(r"^blocks\.(\d+)\.", None), (r"^norm\.", (99999,))]}

    def forward_head(self, features: Any, pre_logits: bool = False, *, mask: Tensor | None = None) -> Tensor:
        """Map features (batch, *grid, embed_dim) to (batch, num_classes), by the mean over (real) tokens; those of a
        language model to (batch, length, vocab_size), or (length, vocab_size) of packed samples. mask: of cells, as
        in `forward_features`."""
        layout: Layout
        if isinstance(features, Packed):
            layout, features = features.layout, features.values
        else:
            layout = Grid.of(features) if self.per_token else layout_of_tokens(features)
        if not self.per_token:
            mask = layout.flatten_mask(self.token_mask(mask))
            features = layout.pool(layout.tokens(features), mask)
        features = self.head_drop(features)
        return features if pre_logits else self.head(features)

    def forward(self, x: Tensor | Packed, mask: Tensor | None = None) -> Tensor:
        """Return logits (batch, num_classes) of the mean over tokens, with num_classes=0 that mean (batch, embed_dim);
        of a language model (batch, length, vocab_size), of its packs (length, vocab_size).

        Args:
            x: floats (batch, in_chans, *space) of any size; token numbers (batch, length), int64 or int32; or a pack.
            mask: bool (batch, *space), for token numbers (batch, length), False = padding: each sample gets what it
                gets alone. None: no padding. Packs take none.

        Raises ValueError for other shapes and dtypes, TypeError for what is no tensor.
        """
        if isinstance(x, Boxed):
            raise ValueError("boxes: expected whole samples, or forward_features of the boxes")
        return self.forward_head(self.forward_features(x, mask), mask=mask)

    if TYPE_CHECKING:  # what an editor knows of a call; of a Module's it knows nothing

        def __call__(self, x: Tensor | Packed, mask: Tensor | None = None) -> Tensor: ...

    @property
    def bytes_per_cell(self) -> float:  # type: ignore[override]
        # a block's activations: about 20 numbers of 4 bytes for each channel of a token
        return 80 * self.embed_dim / math.prod(self.slab_multiples)

    def sweep(self, sweeper: Sweeper, volume: list[Any]) -> Tensor:
        spaces = [x.shape[2:] for x in volume]

        def embedded(exchange: Exchange, x: Tensor) -> Tensor:
            with activated(Shard(exchange, sweeper.axis, sweeper.sizes)):
                return self._embedded(x, None)[0]

        def layout(exchange: Exchange) -> Slab:
            return sweeper.slab(exchange, spaces[exchange.rank]).strided(self.slab_multiples)

        def through(block: Any, exchange: Exchange, x: Tensor) -> Tensor:
            return self._through(block, x, None, layout(exchange))

        def last(exchange: Exchange, x: Tensor) -> Tensor:
            slab, x = layout(exchange), exact_norm(x, self.norm)
            return slab.unflatten(x) if self.per_token else slab.pool(x)

        tokens = sweeper.apply(embedded, volume)
        for block in self.blocks:
            tokens = sweeper.apply(partial(through, block), tokens, drop=True)
        slabs = sweeper.apply(last, tokens, drop=True)
        features = torch.cat(slabs, 1 + sweeper.axis) if self.per_token else slabs[0]
        return sweeper.then(self.head(self.head_drop(features.to(sweeper.device)))).cpu()

    def init_state(self, batch: int) -> StreamState:
        """Return the state before the first frame, for `advance`."""
        if not self.causal:
            raise ValueError("causal=False: expected a causal network, it sees no later frame")
        weight = self._weight
        count = torch.zeros(batch, dtype=torch.int64, device=weight.device)
        for block in self.blocks:
            block.init_state(0)  # raises where a mixer cannot advance frame by frame
        exact = torch.promote_types(weight.dtype, torch.float32)
        total = torch.zeros(batch, self.embed_dim, dtype=exact, device=weight.device)
        return StreamState(count, 0, None, None, None, (), total, count)

    def advance(self, x: Tensor, state: StreamState) -> tuple[Tensor, StreamState]:
        """Map the next frames (batch, in_chans, frames, *space), or tokens (batch, length), to the features of the
        tokens that they complete, (batch, frames of tokens, *grid, embed_dim).

        From `init_state` on, in chunks of any size, the features are those of `forward_features`; frames that do not
        fill a patch wait for the next frames. The state does not grow.
        """
        self._check(x, None)
        chunk = layout_of(x, x.ndim - self.dims)
        if x.shape[0] != state.frames.shape[0]:
            raise ValueError(f"input of {x.shape[0]} samples, a state of {state.frames.shape[0]}")
        if self.vocab_size is None:
            x, state = state.fill_patches(x, self.embed.patch[0])
        # the residual stream stays in the parameters' precision under autocast
        x = self.embed(x).to(self._weight.dtype)
        if x.shape[1] == 0:
            return x, state
        if state.space is None:
            space = tuple(x.shape[2:-1])
            state = state._replace(space=space, **self.frame_states(x.shape[0], space, x.device))
        layout = chunk.strided(self.slab_multiples, tuple(x.shape[1:-1]))  # frames that waited are as the chunk's
        tpe, layers = state.tpe, []
        if self.tpe is not None:
            x, tpe = self.tpe.advance(x, tpe, layout)
        x = self.embed_drop(x)
        for block, memory in zip(self.blocks, state.layers, strict=True):
            x, memory = block.advance(x, memory, state.frames, layout)
            layers.append(memory)
        x = exact_norm(x, self.norm)
        total = state.total + layout.total(layout.sums(x.flatten(1, -2).to(state.total.dtype)))
        tokens, frames = state.tokens + layout.whole.length, state.frames + x.shape[1]
        return x, state._replace(frames=frames, tpe=tpe, layers=tuple(layers), total=total, tokens=tokens)

    def frame_states(self, batch: int, space: Space, device: torch.device) -> dict[str, Any]:
        """Return what of a stream's state depends on a frame's shape, before the first frame."""
        tpe = None if self.tpe is None else self.tpe.init_state(batch, space, device)
        return {"tpe": tpe, "layers": tuple(block.init_state(batch, device, space) for block in self.blocks)}

    def stream(self, batch_size: int = 1, *, cuda_graph: bool = True) -> Stream:
        """Return a Stream, which takes frames as they come and predicts from all frames so far.

        `stream = model.eval().stream()`, then `logits = stream(frames)` with any number of frames, at any time: equal
        to `model` on all frames at once. See Stream.
        """
        return Stream(self, batch_size, cuda_graph=cuda_graph)


def _tie_again(net: NDLightNet, _: Any) -> None:
    """Tie the weights after `load_state_dict(assign=True)`, which makes two parameters of one."""
    net._tie()


def shaped(x: Tensor, layout: Layout, form: str) -> Any:
    """Shape tokens (batch, length, dim) as one of FORMS; those of a pack are Packed."""
    if layout.packed:  # samples of different shapes have no tensor of one shape
        return Packed(layout.unflatten(x), layout)  # type: ignore[arg-type]
    if form == "NLC":
        return x
    x = layout.unflatten(x)
    return x.movedim(-1, 1).contiguous() if form == "NCHW" else x  # other networks' heads use `view`


# the three sizes of the paper; not partial of partial, whose arguments mypy does not check
ndlightnet_tiny = partial(NDLightNet, depth=12, mixer=published_mixer, tpe="published", embed_dim=192)
ndlightnet_small = partial(NDLightNet, depth=12, mixer=published_mixer, tpe="published", embed_dim=384)
ndlightnet_base = partial(NDLightNet, depth=12, mixer=published_mixer, tpe="published", embed_dim=768)
