"""MONAI's SABlock, CrossAttentionBlock and SpatialAttentionBlock, and whole Swin blocks."""

from __future__ import annotations

from typing import Any

import torch
from monai.networks.blocks import selfattention, spatialattention
from monai.networks.blocks.crossattention import CrossAttentionBlock as MonaiCross
from monai.networks.nets import swin_unetr, unetr, vit, vitautoenc
from torch import Tensor, nn

from ndlightnet.integrations.replace import (
    WEIGHTS_DROPOUT,
    Options,
    Projections,
    Refusal,
    Replacement,
    around,
    projections,
    thirds,
)
from ndlightnet.integrations.tokens import GridSource, Shape, TokenMixer, make_mixer
from ndlightnet.nn.mixers.base import Named, reads_context
from ndlightnet.ops.lightnet.sdpa import padding_of


class SABlock(nn.Module):
    """A mixer with the constructor and the call of MONAI's `SABlock`.

    dropout_rate acts on the output; there are no weights to drop. save_attn, rel_pos_embedding, include_fc=False and
    heads that do not have hidden_size channels together are refused. attention_dtype, use_combined_linear and
    use_flash_attention change nothing: statistics are float32 or wider.

    Args:
        mixer, grid, prefix, layer: as in TokenMixer; the others: those of MONAI's.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        dropout_rate: float = 0.0,
        qkv_bias: bool = False,
        save_attn: bool = False,
        dim_head: int | None = None,
        hidden_input_size: int | None = None,
        causal: bool = False,
        sequence_length: int | None = None,
        rel_pos_embedding: str | None = None,
        input_size: Shape | None = None,
        attention_dtype: torch.dtype | None = None,
        include_fc: bool = True,
        use_combined_linear: bool = True,
        use_flash_attention: bool = False,
        *,
        mixer: Named | None = None,
        grid: GridSource | None = None,
        prefix: int = 0,
        layer: int = 0,
    ) -> None:
        super().__init__()
        dim, inner = hidden_input_size or hidden_size, num_heads * dim_head if dim_head else hidden_size
        if reason := _reason(dim, inner, save_attn, rel_pos_embedding, include_fc):
            raise ValueError(reason)
        self.causal, grid = causal, None if causal else grid
        self.tokens = TokenMixer(dim, num_heads, mixer, grid=grid, prefix=prefix, causal=causal, layer=layer)
        self.drop_output = nn.Dropout(dropout_rate)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Map tokens (batch, length, dim) to the same shape. attn_mask: (batch, length), 0 or False = padding."""
        if attn_mask is not None and attn_mask.ndim == 2:
            attn_mask = (attn_mask != 0)[:, None, None]
        mask = padding_of(attn_mask, *x.shape[:2])
        out: Tensor = self.drop_output(self.tokens(x, mask, self.causal))
        return out


class CrossAttentionBlock(nn.Module):
    """A mixer with the constructor and the call of MONAI's `CrossAttentionBlock`; what it refuses
    is what SABlock does, and causal=True. A `mixer` needs a cross form."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        dropout_rate: float = 0.0,
        hidden_input_size: int | None = None,
        context_input_size: int | None = None,
        dim_head: int | None = None,
        qkv_bias: bool = False,
        save_attn: bool = False,
        causal: bool = False,
        sequence_length: int | None = None,
        rel_pos_embedding: str | None = None,
        input_size: Shape | None = None,
        attention_dtype: torch.dtype | None = None,
        use_flash_attention: bool = False,
        *,
        mixer: Named | None = None,
        layer: int = 0,
    ) -> None:
        super().__init__()
        dim, inner = hidden_input_size or hidden_size, num_heads * dim_head if dim_head else hidden_size
        if reason := _reason(dim, inner, save_attn, rel_pos_embedding, causal=causal):
            raise ValueError(reason)
        source = context_input_size or hidden_size
        if mixer is not None and source != dim:
            raise ValueError(f"its source has {source} channels, and a mixer reads {dim}")
        self.tokens = TokenMixer(dim, num_heads, mixer, layer=layer, context_dim=source)
        if not reads_context(self.tokens.mixer):
            raise ValueError(f"it reads another source, and {_name(self.tokens.mixer)} cannot")
        self.drop_output = nn.Dropout(dropout_rate)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Map tokens (batch, length, dim) to the same shape; they read a context (batch, source,
        channels), or themselves."""
        out: Tensor = self.drop_output(self.tokens(x, context=x if context is None else context))
        return out


class SpatialAttentionBlock(spatialattention.SpatialAttentionBlock):
    """MONAI's `SpatialAttentionBlock` with a mixer on the grid of its input, of any size."""

    def __init__(self, *args: Any, mixer: Named | None = None, layer: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        dim, heads = self.norm.num_channels, self.attn.num_heads
        self.attn: Any = make_mixer(dim, heads, mixer, dims=self.spatial_dims, layer=layer)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, *space) to the same shape."""
        return x + self.attn(self.norm(x).movedim(1, -1)).movedim(-1, 1)


class SwinTransformerBlock(swin_unetr.SwinTransformerBlock):
    """MONAI's `SwinTransformerBlock` with a mixer on the whole grid in place of attention in
    windows: at linear cost no windows are needed, nor shifts and their masks."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window_size: Shape,
        *args: Any,
        mixer: Named | None = None,
        layer: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(dim, num_heads, window_size, *args, **options)
        self.proj_drop = self.attn.proj_drop
        self.attn: Any = make_mixer(dim, num_heads, mixer, dims=len(window_size), layer=layer)

    def forward_part1(self, x: Tensor, mask_matrix: Tensor | None) -> Tensor:
        """Mix (batch, *grid, dim); the mask is that of shifted windows and is not used."""
        out: Tensor = self.proj_drop(self.attn(self.norm1(x)))
        return out


KNOWN = (selfattention.SABlock, MonaiCross, spatialattention.SpatialAttentionBlock, swin_unetr.SwinTransformerBlock)


def known(module: nn.Module) -> bool:
    return isinstance(module, KNOWN)


def replacement(name: str, module: nn.Module, model: nn.Module, options: Options) -> Replacement | Refusal:
    old: Any = module  # MONAI has no types
    if type(module) not in KNOWN:
        return Refusal("a subclass of MONAI's, whose function may be another one")
    common: dict[str, Any] = {"mixer": options.mixer, "layer": options.layer}
    if isinstance(module, swin_unetr.SwinTransformerBlock):
        return _swin(old, common, options)
    if isinstance(module, spatialattention.SpatialAttentionBlock):
        return _spatial(old, common, options)
    if reason := _reason_of(old):
        return Refusal(reason)
    sizes = old.hidden_input_size, old.num_heads, old.drop_output.p
    if isinstance(module, MonaiCross):
        try:
            block: Any = CrossAttentionBlock(*sizes, context_input_size=old.context_input_size, **common)
        except ValueError as error:
            return Refusal(str(error))
    else:
        grid, prefix = _grid(name, model)
        if grid is None:
            grid, prefix = options.grid, options.prefix or prefix
        elif reason := options.contradiction(grid, prefix):
            return Refusal(reason)
        block = SABlock(*sizes, causal=old.causal, grid=grid, prefix=prefix, **common)
    without = WEIGHTS_DROPOUT if old.drop_weights.p else ""
    return options.replacement(block, block.tokens, _projections(old), without)


def _swin(old: Any, common: dict[str, Any], options: Options) -> Replacement:
    sizes = old.dim, old.num_heads, old.window_size, old.shift_size
    new = SwinTransformerBlock(*sizes, drop=old.attn.proj_drop.p, use_checkpoint=old.use_checkpoint, **common)
    for child in ("norm1", "norm2", "mlp", "drop_path"):
        setattr(new, child, getattr(old, child))
    qkv = old.attn.qkv
    begun = options.begin(new.attn, thirds(qkv.weight, qkv.bias) | projections(o=old.attn.proj))
    without = (WEIGHTS_DROPOUT,) if old.attn.attn_drop.p else ()
    return Replacement(new, f"{_name(new.attn)} on the whole grid, without windows{begun}", without)


def _spatial(old: Any, common: dict[str, Any], options: Options) -> Replacement | Refusal:
    if reason := _reason_of(old.attn):
        return Refusal(reason)
    sizes = old.spatial_dims, old.norm.num_channels, old.attn.dim_head, old.norm.num_groups
    new = SpatialAttentionBlock(*sizes, **common)
    new.norm = old.norm
    begun = options.begin(new.attn, _projections(old.attn))
    return Replacement(new, f"{_name(new.attn)} on the grid of its input{begun}")


def _reason_of(old: Any) -> str:
    """Return why an attention layer of MONAI has no counterpart; empty if it has one."""
    dim, cross, with_fc = old.hidden_input_size, isinstance(old, MonaiCross), isinstance(old.out_proj, nn.Linear)
    inner = old.out_proj.in_features if with_fc else dim
    return _reason(dim, inner, old.save_attn, old.rel_positional_embedding, with_fc, cross and old.causal)


def _reason(dim: int, inner: int, save_attn: bool, bias: object, include_fc: bool = True, causal: bool = False) -> str:
    """Return why a layer with heads of `inner` channels together has no counterpart. causal: of one that reads another
    source."""
    wrong = {
        f"its heads have {inner} channels, expected those of its input, {dim}": inner != dim,
        "save_attn=True, and there are no weights to save": save_attn,
        "rel_pos_embedding adds a bias to each pair of tokens, and LightNet has no scores of pairs": bias is not None,
        "include_fc=False, and a mixer has an output projection": not include_fc,
        "causal=True, and a source is read as a whole": causal,
    }
    return "; ".join(reason for reason, is_so in wrong.items() if is_so)


def _projections(old: Any) -> Projections:
    if isinstance(getattr(old, "qkv", None), nn.Linear):
        return thirds(old.qkv.weight, old.qkv.bias) | projections(o=old.out_proj)
    return projections(q=old.to_q, k=old.to_k, v=old.to_v, o=old.out_proj)


def _grid(name: str, model: nn.Module) -> tuple[Shape | None, int]:
    """Return the grid of the tokens, if the network knows it, and the number of tokens in front of it."""
    prefix = 0
    for outer in around(name, model):
        if isinstance(outer, vit.ViT):
            prefix = int(hasattr(outer, "cls_token"))
        if isinstance(outer, unetr.UNETR):
            return tuple(outer.feat_size), prefix
        if isinstance(outer, vitautoenc.ViTAutoEnc):
            pairs = zip(outer.img_size, outer.patch_size, strict=True)
            return tuple(size // patch for size, patch in pairs), prefix
    return None, prefix


def _name(mixer: nn.Module) -> str:
    return type(mixer).__name__
