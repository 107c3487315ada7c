"""Attention layers of Hugging Face transformers, for replace_attention.

Layers that map hidden states to hidden states, with a padding mask at most, become a mixer: those
of ViT, VideoMAE, BERT and other encoders. Layers that take a cache, positions from outside or
another source (Llama, BART) cannot; with LightNet as the mixer, their model gets the attention
implementation of `integrations/transformers.py` instead, which needs none of the layer's knowledge.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ndlightnet.integrations.replace import WEIGHTS_DROPOUT, Options, Refusal, Replacement, around, projections, tuned
from ndlightnet.integrations.tokens import HiddenStatesMixer
from ndlightnet.integrations.transformers import HARMLESS, NAME

# names of the projections to q, k, v and o, in the order of transformers' models
PROJECTIONS = {
    "q": ("q_proj", "query", "q_lin", "q"),
    "k": ("k_proj", "key", "k_lin", "k"),
    "v": ("v_proj", "value", "v_lin", "v"),
    "o": ("o_proj", "out_proj", "out_lin", "o"),
}
JOINT = ("qkv", "qkv_proj", "Wqkv", "c_attn", "query_key_value")  # to q, k and v at once
SIMPLE = (nn.Linear, nn.Dropout, nn.Identity)
PLAIN = {"self", "hidden_states", "attention_mask", "output_attentions", "kwargs"}
CACHE = {"cache", "past_key_values", "past_key_value"}  # from transformers 5.24 on, and before
# encoders of grids: number of tokens in front of the grid
PREFIX = {
    "ViTAttention": 1,
    "DeiTAttention": 2,
    "BeitAttention": 1,
    "CLIPAttention": 1,
    "SiglipAttention": 0,
    "VideoMAESelfAttention": 0,
}
# models of texts whose layers say that they are not causal, and get the mask from their model. One
# that is not in this list is refused by EncoderMixer, at its first call.
CAUSAL_TEXTS = {
    f"{model}_text_model"
    for model in ("aimv2", "clip", "clipseg", "metaclip_2", "owlv2", "owlvit", "videoprism", "xclip")
}


class EncoderMixer(HiddenStatesMixer):
    """A mixer with the call of an encoder's self-attention in transformers. There are no attention weights."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, None]:
        return super().forward(hidden_states, attention_mask, **options), None


def known(module: nn.Module) -> bool:
    kind = type(module)
    ours = kind.__module__.startswith("transformers.models.") and "Attention" in kind.__name__
    queries = _projection(module, "q") is not None or any(hasattr(module, x) for x in JOINT)
    return ours and hasattr(module, "config") and queries


def replacement(name: str, module: nn.Module, model: nn.Module, options: Options) -> Replacement | Refusal:
    if beyond := _beyond(module):
        return Refusal(f"it has {beyond}, which LightNet attention cannot have")
    reason = _reason(module, _is_causal(module))
    if reason and options.mixer is not None:
        return Refusal(f"{reason}, and a mixer has no such thing")
    if options.mixer is None and (wrapped := tuned(module)):
        reason = f"peft wraps its {', '.join(wrapped)}"
    if reason:
        return _implementation(name, module, model, reason)
    config: Any = module.config
    old = {name: layer for name in "qkvo" if (layer := _projection(module, name)) is not None}
    prefix, grid = options.prefix, options.grid
    network_grid, masked = _grid(module), any("PreTraining" in type(outer).__name__ for outer in around(name, model))
    if network_grid is not None and not masked:  # the tokens of masked pretraining fill no grid
        grid, prefix = grid or network_grid, PREFIX[type(module).__name__]  # another grid: of images of another size
        if reason := options.contradiction(grid, prefix):
            return Refusal(reason)
    tokens = options.tokens(
        old["q"].in_features,
        _heads(module),
        grid=grid,
        prefix=prefix,
        sequence=hasattr(config, "vocab_size") and not hasattr(config, "image_size"),
        bias=old["q"].bias is not None,
    )
    dropped = any(getattr(config, x, None) for x in ("attention_probs_dropout_prob", "attention_dropout"))
    layer = EncoderMixer(tokens, HARMLESS)
    return options.replacement(layer, tokens, projections(**old), WEIGHTS_DROPOUT if dropped else "")


def _projection(module: nn.Module, letter: str) -> Any:
    for name in PROJECTIONS[letter]:
        layer = getattr(module, name, None)
        if isinstance(getattr(layer, "base_layer", layer), nn.Linear):  # or peft's around it
            return layer
    return None


def _heads(module: Any) -> int:
    heads = getattr(module, "num_attention_heads", getattr(module, "num_heads", None))
    return int(module.config.num_attention_heads if heads is None else heads)


def _grid(module: Any) -> tuple[int, ...] | None:
    """Return the grid of patches that the configuration of ViT, VideoMAE and others describes."""
    if type(module).__name__ not in PREFIX or not hasattr(module.config, "image_size"):
        return None  # CLIP and SigLIP read texts by the same class
    image, patch = module.config.image_size, module.config.patch_size
    sizes = (x if isinstance(x, list | tuple) else (x, x) for x in (image, patch))
    grid = tuple(a // b for a, b in zip(*sizes, strict=True))
    if hasattr(module.config, "num_frames"):
        grid = (module.config.num_frames // module.config.tubelet_size, *grid)
    return grid


def _is_causal(module: Any) -> bool:
    decodes = getattr(module.config, "is_decoder", None)
    if decodes or getattr(module, "is_causal", False):
        return True
    return decodes is None and getattr(module.config, "model_type", "") in CAUSAL_TEXTS


def _reason(module: Any, causal: bool) -> str:
    """Return why no mixer can stand in for a layer: what it takes or has that a mixer has not."""
    takes = set(inspect.signature(type(module).forward).parameters)
    if more := sorted(takes - PLAIN - (set() if causal else CACHE)):
        return f"it takes {', '.join(more)}"
    if causal:
        return "it is causal"
    names = [x for x, child in module.named_children() if not isinstance(getattr(child, "base_layer", child), SIMPLE)]
    if names := [*names, *(x for x, _ in module.named_parameters(recurse=False))]:
        return f"it has {', '.join(names)}"
    query = _projection(module, "q")
    if query is None:
        return f"it has {next(x for x in JOINT if hasattr(module, x))}"
    if _projection(module, "o") is None and query.out_features != query.in_features:
        return f"it maps {query.in_features} channels to {query.out_features}"
    return ""


def _beyond(module: Any) -> str:
    """Return what a layer does to its scores, which LightNet attention does not have."""
    members = (*module.named_children(), *module.named_parameters(recurse=False))
    names = {*inspect.signature(type(module).forward).parameters, *(name for name, _ in members)}
    flags = ("use_relative_position_bias", "use_shared_relative_position_bias")
    if any("relative" in name or "position_bias" in name for name in names) or any(
        getattr(module.config, flag, False) for flag in flags
    ):
        return "a bias on its scores"
    if getattr(module.config, "attn_logit_softcapping", None):
        return "a soft cap on its scores"
    if "chunked_attention" in (getattr(module.config, "layer_types", None) or ()):
        return "attention in chunks, or other layers of its model have it"
    return "sinks" if hasattr(module, "sinks") else ""


def _implementation(name: str, module: Any, model: nn.Module, reason: str) -> Replacement | Refusal:
    """Set LightNet as the attention implementation of the model that a layer is part of."""
    owners = [
        outer for outer in around(name, model) if isinstance(outer, PreTrainedModel) and outer.config is module.config
    ]
    if not owners or not owners[-1]._can_set_attn_implementation():
        return Refusal(f"{reason}, and its model does not use transformers' AttentionInterface")
    what = f"attention implementation {NAME!r} of its model, with its weights, without norm and gate, as {reason}"
    return Replacement(module, what, switch=(owners[-1], partial(owners[-1].set_attn_implementation, NAME)))
