"""Attention layers of diffusers, for replace_attention.

Without a mixer a layer gets the LightNet processor of `integrations/diffusers.py`, or its backend where the model's own
processors compute queries and keys, and keeps its projections. A given mixer replaces self-attention as a whole.
"""

from __future__ import annotations

import copy
from typing import Any

from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0, SlicedAttnProcessor
from torch import Tensor, nn

from ndlightnet.integrations.diffusers import NAME, LightNetAttnProcessor, refused
from ndlightnet.integrations.replace import ALREADY, Options, Refusal, Replacement, projections
from ndlightnet.integrations.tokens import HiddenStatesMixer

PLAIN = (AttnProcessor, AttnProcessor2_0, SlicedAttnProcessor)  # compute one and the same function


class SelfAttentionMixer(HiddenStatesMixer):
    """A mixer with the call of diffusers' `Attention`, whose second argument is another source: it is refused."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Any:
        options["encoder_hidden_states"] = encoder_hidden_states
        return super().forward(hidden_states, attention_mask, **options)


def known(module: nn.Module) -> bool:
    return isinstance(module, Attention | AttentionModuleMixin)


def replacement(name: str, module: nn.Module, model: nn.Module, options: Options) -> Replacement | Refusal:
    processor: Any = getattr(module, "processor", None)
    if isinstance(processor, LightNetAttnProcessor):
        return Refusal(ALREADY)
    plain = type(module) is Attention and type(processor) in PLAIN
    if options.mixer is not None:
        return _mixer(module, plain, options)
    if plain:
        if reason := refused(module):
            return Refusal(reason)
        new = _copy(module, LightNetAttnProcessor())
        return Replacement(new, "LightNetAttnProcessor, with its weights, without norm and gate")
    if not hasattr(processor, "_attention_backend"):
        return Refusal(f"its processor {type(processor).__name__} computes attention by itself")
    switched = copy.copy(processor)
    switched._attention_backend = NAME
    new = _copy(module, switched)
    kind = type(processor).__name__
    return Replacement(new, f"{kind} with the backend {NAME!r}, with its weights, without norm and gate")


def _mixer(module: Any, plain: bool, options: Options) -> Replacement | Refusal:
    if not plain:
        return Refusal("a processor of its own computes queries and keys, and a mixer does, too")
    options_beyond = ("group_norm", "spatial_norm", "norm_q", "norm_k", "norm_cross", "added_kv_proj_dim")
    present = [name for name in options_beyond if getattr(module, name) is not None]
    if present or module.is_causal or module.residual_connection:
        return Refusal(f"it has {', '.join(present) or 'a mask or residual of its own'}")
    if module.is_cross_attention:
        return Refusal("it reads another source: expected mixer=None, which gives it LightNet")
    dim = module.query_dim
    if module.out_dim != dim or module.rescale_output_factor != 1:
        return Refusal(f"it maps {dim} channels to {module.out_dim}")
    tokens = options.tokens(dim, module.heads, bias=module.use_bias)
    old = projections(q=module.to_q, k=module.to_k, v=module.to_v, o=module.to_out[0])
    return options.replacement(SelfAttentionMixer(tokens), tokens, old, "dropout" if module.dropout else "")


def _copy(module: Any, processor: Any) -> Any:
    """Return a copy of a layer that shares its parameters and has another processor."""
    new = copy.copy(module)
    new.__dict__ = {**module.__dict__, "_modules": dict(module._modules)}
    new.set_processor(processor)
    return new
