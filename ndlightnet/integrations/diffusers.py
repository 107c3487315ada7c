"""LightNet attention in diffusers: an attention processor, and the attention backend "lightnet".

`unet.set_attn_processor(LightNetAttnProcessor())` is for models whose layers are diffusers' `Attention` (UNets, DiT,
PixArt, ...). Newer models compute queries, keys and values in processors of their own and hand them to a backend (Flux,
Wan, QwenImage, ...): importing this module registers one, which `model.set_attention_backend("lightnet")` selects for
all such models of the process, and `layer.set_attention_backend("lightnet")` for one layer.

    y[t] = sum_c SiLU(q[t])[c] * sum_s softmax_s(k[s, c]) v[s]      s: the tokens of the source

The projections of the model stay. Weights trained with softmax attention do not carry over, as this
is another function of q, k and v: train or fine-tune. A processor has no parameters, so its output
has neither the norm nor the gate of `LightNetAttention`. A scale is ignored: there are no scores.
"""

from __future__ import annotations

from typing import Any

from diffusers.models import attention_dispatch
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

from ndlightnet.integrations.tokens import padding
from ndlightnet.ops import lightnet_attention

NAME = "lightnet"


class LightNetAttnProcessor:
    """LightNet attention with the call of diffusers' `AttnProcessor2_0`, self and cross.

    Padding masks are (batch, 1, keys), (batch, keys) or (batch, heads, 1, keys), bool with True = data, or biases of 0
    and -10000 or less, as diffusers makes them. Masks that differ from query to query or from head to head, and layers
    that join two streams (`added_kv_proj_dim`), raise ValueError.
    """

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        if reason := refused(attn):
            raise ValueError(f"LightNetAttnProcessor: {reason}")
        x, residual = hidden_states, hidden_states
        if attn.spatial_norm is not None:
            x = attn.spatial_norm(x, temb)
        image = x.shape[2:] if x.ndim == 4 else None
        x = x.flatten(2).transpose(1, 2) if image else x
        if attn.group_norm is not None:
            x = attn.group_norm(x.transpose(1, 2)).transpose(1, 2)
        source = x if encoder_hidden_states is None else encoder_hidden_states
        if encoder_hidden_states is not None and attn.norm_cross:
            source = attn.norm_encoder_hidden_states(source)
        dim = attn.inner_dim // attn.heads

        def heads(projected: Tensor, norm: nn.Module | None) -> Tensor:
            split = projected.unflatten(-1, (-1, dim))
            # before heads and tokens change places, as norms are over the channels
            return split if norm is None else norm(split)

        q, k = heads(attn.to_q(x), attn.norm_q), heads(attn.to_k(source), attn.norm_k)
        v = heads(attn.to_v(source), None)
        mask = padding(attention_mask, k.shape[0], k.shape[1], attn.heads)
        y = attend(q, k, v, mask)
        y = attn.to_out[1](attn.to_out[0](y.flatten(2)))
        y = y.transpose(1, 2).unflatten(2, image) if image else y
        y = y + residual if attn.residual_connection else y
        return y / attn.rescale_output_factor


def refused(attn: Any) -> str:
    """Return why a layer cannot take LightNetAttnProcessor; "" if it can."""
    if not isinstance(attn, Attention):
        return f"{type(attn).__name__} has a processor of its own: use the backend {NAME!r}"
    if attn.added_kv_proj_dim is not None or attn.to_out is None:
        return "the layer joins two streams of tokens (added_kv_proj_dim, pre_only)"
    if attn.is_causal:
        return "the layer is causal (is_causal), which the call of a processor does not say"
    return ""


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
    """Attention of heads (batch, length, heads, dim); key heads may be fewer."""
    keys = None if mask is None else mask[:, None, None]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = lightnet_attention(q, k, v, keys, is_causal=causal, enable_gqa=True)
    return y.transpose(1, 2)


def backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """Compute LightNet attention for diffusers' `dispatch_attention_fn`: query (batch, length,
    heads, dim), key and value (batch, keys, heads, dim). attn_mask: padding only, as `padding`."""
    if _parallel_config is not None:
        raise ValueError(f"the backend {NAME!r} has no context parallelism: expected none")
    mask = padding(attn_mask, key.shape[0], key.shape[1], query.shape[2], "attn_mask")
    return nn.functional.dropout(attend(query, key, value, mask, is_causal), dropout_p)


def _register() -> None:
    """Add the backend. diffusers names backends by an enumeration, which nothing public extends."""
    names = attention_dispatch.AttentionBackendName
    if NAME in names._value2member_map_:
        return
    member = str.__new__(names, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    names._member_map_[member._name_] = member
    names._value2member_map_[NAME] = member
    names._member_names_.append(member._name_)
    attention_dispatch._AttentionBackendRegistry.register(member)(backend)


_register()
