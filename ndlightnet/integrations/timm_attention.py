"""timm's Attention, as in its vision transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from timm.models.vision_transformer import Attention as TimmAttention  # type: ignore[attr-defined]
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ndlightnet.integrations.replace import Options, Refusal, Replacement, around, projections, thirds
from ndlightnet.integrations.tokens import GridSource, TokenMixer
from ndlightnet.nn.mixers.base import Named
from ndlightnet.ops.lightnet.sdpa import padding_of

BIAS = "it adds a bias to each pair of tokens, and LightNet has no scores of pairs"
SHIFTS = "shifted windows hide different keys from different queries, and " + BIAS
ROTARY = "its angles come from outside, and a mixer has a position code of its own"
REFUSED = {
    "timm.models.swin_transformer.WindowAttention": SHIFTS,
    "timm.models.swin_transformer_v2.WindowAttention": SHIFTS,
    "timm.models.vision_transformer_relpos.RelPosAttention": BIAS,
    "timm.models.beit.Attention": BIAS,
    "timm.models.eva.EvaAttention": ROTARY,
    "timm.layers.attention.AttentionRope": ROTARY,
}


class PatchGrid:
    """Grid of the patches of a timm network now: `set_input_size` may change it."""

    def __init__(self, embed: nn.Module) -> None:
        self.embed = embed

    def __call__(self) -> tuple[int, ...]:
        rows, columns = self.embed.grid_size  # type: ignore[misc]
        return int(rows), int(columns)


class Attention(nn.Module):
    """A mixer with the constructor and the call of timm's `Attention`.

    `timm.create_model("vit_tiny_patch16_224", attn_layer=Attention)` builds a network with LightNet attention over all
    tokens; `replace_attention` also tells the layers the grid of the tokens, and is better for that.

    attn_head_dim and dim_out may only be None or what follows from dim. qk_norm, scale_norm, gated and norm_layer are
    not used, as LightNet attention has a norm and a gate of its own; nor is attn_drop, as there are no weights to drop.

    Args:
        mixer, grid, prefix, layer: as in TokenMixer; the others: those of timm's.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        attn_head_dim: int | None = None,
        dim_out: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        gated: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        mixer: Named | None = None,
        grid: GridSource | None = None,
        prefix: int = 0,
        layer: int = 0,
    ) -> None:
        super().__init__()
        if reason := _reason(dim, num_heads * attn_head_dim if attn_head_dim else dim, dim_out or dim):
            raise ValueError(reason)
        bias = qkv_bias or proj_bias
        self.tokens = TokenMixer(dim, num_heads, mixer, grid=grid, prefix=prefix, layer=layer, bias=bias)
        self.proj_drop = nn.Dropout(proj_drop)
        self.to(device, dtype)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Map tokens (batch, length, dim) to the same shape. attn_mask: bool (batch, 1, 1, length),
        True = data. is_causal: of layers without a grid."""
        mask = padding_of(attn_mask, *x.shape[:2])
        out: Tensor = self.proj_drop(self.tokens(x, mask, is_causal))
        return out


def _reason(dim: int, inner: int, outputs: int) -> str:
    """Return why a layer with heads of `inner` channels together has no counterpart; empty if it has one."""
    if inner == dim == outputs:
        return ""
    return f"its heads have {inner} channels and its output {outputs}: expected dim={dim}"


def known(module: nn.Module) -> bool:
    return isinstance(module, TimmAttention) or _path(module) in REFUSED


def _path(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def replacement(name: str, module: nn.Module, model: nn.Module, options: Options) -> Replacement | Refusal:
    if _path(module) in REFUSED:
        return Refusal(REFUSED[_path(module)])
    if type(module) is not TimmAttention:
        return Refusal("a subclass of timm's Attention, whose function may be another one")
    if any(type(outer).__name__ == "NaFlexVit" for outer in around(name, model)):
        return Refusal("NaFlexVit hides different keys from different queries (symmetric masks)")
    old: Any = module
    dim = old.qkv.in_features
    if reason := _reason(dim, old.qkv.out_features // 3, old.proj.out_features):
        return Refusal(reason)
    grid: GridSource | None = options.grid
    network_grid, prefix = _grid(name, model)
    if network_grid is None:
        prefix = options.prefix
    elif reason := options.contradiction(network_grid(), prefix):
        return Refusal(reason)
    else:
        grid = network_grid
    biases: Any = {"qkv_bias": old.qkv.bias is not None, "proj_bias": old.proj.bias is not None}
    place: Any = {"mixer": options.mixer, "grid": grid, "prefix": prefix, "layer": options.layer}
    new = Attention(dim, old.num_heads, **biases, proj_drop=old.proj_drop.p, **place)
    weights = thirds(old.qkv.weight, old.qkv.bias) | projections(o=old.proj)
    return options.replacement(new, new.tokens, weights, *_lost(old))


def _grid(name: str, model: nn.Module) -> tuple[PatchGrid | None, int]:
    """Return the grid of the tokens, if it is the same for all inputs, and the number of tokens in front of it."""
    for outer in around(name, model):
        if isinstance(outer, VisionTransformer):
            embed = outer.patch_embed
            varies = outer.dynamic_img_size or not getattr(embed, "strict_img_size", True)
            drops = not isinstance(outer.patch_drop, nn.Identity)
            if varies or drops or getattr(embed, "grid_size", None) is None:
                break
            return PatchGrid(embed), outer.num_prefix_tokens
    return None, 0


def _lost(module: Any) -> Iterator[str]:
    if module.attn_drop.p:
        yield f"attn_drop={module.attn_drop.p}"
    for name in ("q_norm", "k_norm", "norm", "gate"):
        if not isinstance(getattr(module, name, None), nn.Identity | None):
            yield name
