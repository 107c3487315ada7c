"""NDLightDiT: a diffusion transformer on any number of axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ndlightnet.layout import Grid, uncut_patches
from ndlightnet.layout.abstract import check_integers, check_not_empty
from ndlightnet.models.config import recorded
from ndlightnet.models.hub import Pretrained
from ndlightnet.nn.adaptive import AdaptiveBlock, Modulation, PrefixBlock, TimeEmbedding, modulate
from ndlightnet.nn.block import init_network
from ndlightnet.nn.embedding import Embedding, Patchify
from ndlightnet.nn.initial import Device
from ndlightnet.nn.mixers import LightNetAttention
from ndlightnet.nn.mixers.base import Factories, layer_factories
from ndlightnet.nn.position import TPE, build_tpe
from ndlightnet.ops.dtypes import check_floats, check_not_wider, check_tensors
from ndlightnet.parallel import refuse_shards

# width and number of blocks, as in the paper of DiT (arXiv 2212.09748)
DIT_SIZES: dict[str, tuple[int, int]] = {"S": (384, 12), "B": (768, 12), "L": (1024, 24), "XL": (1152, 28)}


class NDLightDiT(Pretrained):
    """Diffusion transformer: noisy cells, their time and their class -> what a sampler asks for (velocity or noise).
    Patches -> MD-TPE -> blocks -> patches, on any number of axes; initially the output is 0.

    Args:
        dims: number of axes of the input (1 signals, 2 images, 3 videos and volumes, ...).
        in_chans: channels of the input and of the output.
        num_classes: classes that can be asked for; 0: none, the network is unconditional.
        size: "S", "B", "L" or "XL": the defaults of `embed_dim` and `depth`, in DIT_SIZES.
        patch_size: cells per token, an int or one per axis.
        embed_dim, depth: width and number of blocks.
        condition: how blocks depend on time and class: "adaln" by adaptive norms, as in DiT; "tokens" by a token of
            each in front of the grid, for LightNet attention only, with 1.5 times as many blocks.
        mixer, tpe, tpe_states: as in NDLightNet.
        device, dtype: as in NDLightNet.

    In training a sample's class is replaced by "no class" with probability 0.1, `class_dropout`, so that sampling may
    be guided (classifier-free guidance).

    Inputs may have any size, in every call: sizes that the patch does not divide are padded at the end, and the output
    is cropped.

    Depths and widths are DiT's. With patches of 2 x 2 cells of 4 channels and 1,000 classes the four sizes
    have 33.2, 131, 459 and 677 million parameters, 0.94, 0.47, 0.31 and 0.31 % more than DiT's, which include a
    variance in the output: an output gate, local mixing and MD-TPE are added, and the gated MLP has no biases.
    `tpe_states` is a quarter of NDLightNet's for that.

    LightNet's paper does not say how its networks are conditioned. It prints 18, 18, 36 and 42 layers and 33, 131, 470
    and 680 million parameters (Table 11), too few for adaptive norms in each layer; condition="tokens" with
    `published_mixer` has as many layers and 33.5, 130.9, 460.1 and 678.3 million.
    """

    head_of: ClassVar = {"num_classes": "class_embed."}
    class_dropout = 0.1

    @recorded
    def __init__(
        self,
        dims: int,
        in_chans: int = 3,
        num_classes: int = 0,
        *,
        size: Literal["S", "B", "L", "XL"] = "S",
        patch_size: int | Sequence[int] = 2,
        embed_dim: int | None = None,
        depth: int | None = None,
        condition: Literal["adaln", "tokens"] = "adaln",
        mixer: Factories = LightNetAttention,
        tpe: TPE = True,
        tpe_states: int = 32,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if size not in DIT_SIZES:
            raise ValueError(f"size={size!r}: expected 'S', 'B', 'L' or 'XL'")
        if condition not in ("adaln", "tokens"):
            raise ValueError(f"condition={condition!r}: expected 'adaln' or 'tokens'")
        width, blocks = DIT_SIZES[size]
        blocks = blocks if condition == "adaln" else blocks * 3 // 2
        width = width if embed_dim is None else embed_dim
        blocks = blocks if depth is None else depth
        check_integers(1, dims=dims, in_chans=in_chans, embed_dim=width, depth=blocks)
        check_integers(0, num_classes=num_classes)
        factories = layer_factories("mixer", mixer, blocks, dims)
        self.dims, self.in_chans, self.num_classes = dims, in_chans, num_classes
        self.embed_dim = width
        self.embed = Patchify(dims, in_chans, patch_size, width)
        self.tpe = build_tpe(tpe, dims, width, tpe_states)
        self.time_embed = TimeEmbedding(width)
        self.class_embed = Embedding(num_classes + 1, width, "y") if num_classes else None
        adaptive = condition == "adaln"
        block = AdaptiveBlock if adaptive else PrefixBlock
        self.blocks = nn.ModuleList(block(width, factory) for factory in factories)
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=not adaptive)
        self.modulation = Modulation(width, 2) if adaptive else None
        self.unembed = nn.Linear(width, math.prod(self.embed.patch) * in_chans)
        self.grad_checkpointing = False
        init_network(self)
        self._zero()

    def _zero(self) -> None:
        for module in self.modules():
            if isinstance(module, Modulation):
                module.zero_weights()
        nn.init.zeros_(self.unembed.weight)
        nn.init.zeros_(self.unembed.bias)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._zero()

    @property
    def pipeline_tag(self) -> str | None:
        return "unconditional-image-generation" if self.dims == 2 and not self.num_classes else None

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the blocks in the backward pass instead of storing their activations."""
        self.grad_checkpointing = enable

    def forward(self, x: Tensor, t: Tensor | float, y: Tensor | None = None) -> Tensor:
        """Map noisy cells (batch, in_chans, *space) to the same shape.

        t: times, floats (batch,) or one for all samples, 0 (no noise) to 1000 (noise only). y:
        classes, int64 (batch,); `num_classes` is "no class", as None is for all samples.
        Raises ValueError for other shapes and dtypes, and for classes with num_classes=0.
        """
        refuse_shards("NDLightDiT")
        self._check(x, y)
        weight = self.unembed.weight
        tokens = self.embed(x)
        grid = Grid.of(tokens)
        # the residual stream stays in the parameters' precision under autocast
        tokens, dtype = grid.flatten(tokens), weight.dtype
        tokens = tokens.to(dtype) if self.tpe is None else self.tpe(tokens, layout=grid, dtype=dtype)
        conditions = self._conditions(t, y, len(x), x.device)
        if self.modulation is None:
            tokens = torch.cat([conditions.to(tokens.dtype), tokens], 1)
        condition = conditions.sum(1)
        for block in self.blocks:
            if self.grad_checkpointing and self.training:
                tokens = checkpoint(block, tokens, condition, grid, use_reentrant=False)
            else:
                tokens = block(tokens, condition, grid)
        tokens = self.norm(tokens[:, -grid.length :])
        patches = self.unembed(tokens if self.modulation is None else modulate(tokens, *self.modulation(condition)))
        cells = uncut_patches(grid.unflatten(patches), self.embed.patch)
        for axis, size in enumerate(x.shape[2:], start=1):
            cells = cells.narrow(axis, 0, size)
        return cells.movedim(-1, 1).contiguous()

    if TYPE_CHECKING:  # what an editor knows of a call; of a Module's it knows nothing

        def __call__(self, x: Tensor, t: Tensor | float, y: Tensor | None = None) -> Tensor: ...

    def _conditions(self, t: Tensor | float, y: Tensor | None, batch: int, device: torch.device) -> Tensor:
        """Return the embedded times and, if the network knows classes, classes: (batch, 1 or 2, embed_dim)."""
        times = torch.as_tensor(t, device=device)
        if times.shape not in ((), (batch,)):
            raise ValueError(f"t {tuple(times.shape)}: expected one time or ({batch},)")
        time: Tensor = self.time_embed(times.expand(batch))
        if self.class_embed is None:
            return time[:, None]
        if y is None:
            y = torch.full((batch,), self.num_classes, device=device)
        elif self.training and self.class_dropout:
            dropped = torch.rand(batch, device=device) < self.class_dropout
            y = y.masked_fill(dropped, self.num_classes)
        return torch.stack([time, self.class_embed(y)], 1)

    def _check(self, x: Tensor, y: Tensor | None) -> None:
        check_floats(input=x)
        check_not_wider(self, input=x)
        if x.ndim != self.dims + 2 or x.shape[1] != self.in_chans:
            raise ValueError(
                f"input {tuple(x.shape)}: expected floats (batch, in_chans={self.in_chans}, "
                f"*space) with {self.dims} axes"
            )
        check_not_empty(x.shape[2:], x)
        if y is None:
            return
        check_tensors(y=y)
        if not self.num_classes:
            raise ValueError("y with num_classes=0: expected None, the network knows no classes")
        if y.shape != (len(x),) or y.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"y {tuple(y.shape)} {y.dtype}: expected classes ({len(x)},) int64, each from 0 to "
                f"{self.num_classes} (no class)"
            )
