"""torch.nn.MultiheadAttention, as in torch's TransformerEncoder and TransformerDecoder."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from ndlightnet.integrations.replace import WEIGHTS_DROPOUT, Options, Projections, Refusal, Replacement, around, thirds
from ndlightnet.integrations.tokens import TokenMixer, require
from ndlightnet.nn.mixers.base import reads_context
from ndlightnet.nn.multihead import MultiheadAttention, check_masks, hidden_keys, hide, is_causal_mask


class MixerAttention(nn.Module):
    """Any mixer with the call of `torch.nn.MultiheadAttention`: self-attention, and attention to another source if the
    mixer has a cross form. Masks as in ndlightnet.MultiheadAttention, but padding masks of floats must be 0 and -inf.

    A layer reads another source if it was made with `cross`, or if key differs from query in shape, dtype or values.
    Values are compared if the two are different objects, as after `clone()`; a compiled graph then compares them on the
    device, and computes both forms if the mixer has both. key and value must be equal."""

    # as in ndlightnet.MultiheadAttention: keep torch's fast paths away, which ask for these weights
    _qkv_same_embed_dim = False
    in_proj_weight = MultiheadAttention.in_proj_weight
    in_proj_bias = None
    out_proj = SimpleNamespace(weight=in_proj_weight, bias=None)

    def __init__(
        self, mixer: TokenMixer, embed_dim: int, num_heads: int, batch_first: bool, cross: bool = False
    ) -> None:
        super().__init__()
        self.mixer, self.batch_first, self.cross = mixer, batch_first, cross
        self.embed_dim, self.num_heads = embed_dim, num_heads

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Map tokens as torch does: (length, batch, dim), (batch, length, dim) with batch_first, or
        (length, dim). Return them and None, as there are no weights.

        Raises ValueError for nested tensors, masks that ndlightnet.MultiheadAttention refuses, a
        value that is not key, another source if the mixer reads none, and a causal mask over it.
        """
        if query.is_nested:
            raise ValueError("query is a nested tensor: expected a padded one and key_padding_mask")
        check_masks(key_padding_mask, attn_mask, is_causal)
        require(_equal(key, value), "key and value differ: expected one source, as a mixer reads one")
        alone: bool | Tensor = not self.cross and _equal(key, query)
        unbatched = query.ndim == 2
        if unbatched:
            query, key = query[None], key[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key = query.transpose(0, 1), key.transpose(0, 1)
        target, source = query.shape[1], key.shape[1]
        if attn_mask is not None and attn_mask.ndim == 3 and not is_causal:
            hidden = hidden_keys(attn_mask, len(query), self.num_heads, target, source)
            key_padding_mask, attn_mask = hide(key_padding_mask, hidden), None
        mask = _keep(key_padding_mask)
        causal = is_causal_mask(attn_mask, is_causal, target, source)
        mixer = self.mixer.mixer
        if not reads_context(mixer):
            require(alone, f"key differs from query, and {type(mixer).__name__} reads query only")
            alone = True
        if alone is not True and causal is not False:
            allowed = torch.as_tensor(alone) | ~torch.as_tensor(causal)
            require(allowed, "attn_mask is causal and key differs from query: expected no mask")

        def mix(alone: bool | Tensor, causal: bool | Tensor) -> Tensor:
            if isinstance(alone, Tensor):  # a compiled graph does not know yet
                return torch.where(alone, mix(True, causal), mix(False, False))
            if alone and isinstance(causal, Tensor):
                return torch.where(causal, mix(True, True), mix(True, False))
            y: Tensor = self.mixer(query, mask, alone and causal, None if alone else key)
            return y

        y = mix(alone, causal)
        if unbatched:
            return y[0], None
        return y if self.batch_first else y.transpose(0, 1), None


def _equal(a: Tensor, b: Tensor) -> bool | Tensor:
    """Return whether two tensors have the same dtype, shape and values, NaN being equal to NaN; in
    a compiled graph a bool Tensor () where this depends on the values."""
    if a is b:
        return True
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    same = ((a == b) | ((a != a) & (b != b))).all()
    return same if torch.compiler.is_compiling() else bool(same)


def _keep(mask: Tensor | None) -> Tensor | None:
    """Return torch's padding mask, True or -inf = padding, with True = data."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return ~mask
    keep = mask == 0
    allowed = (keep | (mask == -torch.inf)).all()
    require(allowed, f"key_padding_mask {tuple(mask.shape)}: expected bool, or 0 and -inf")
    return keep


def known(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention)


def replacement(name: str, module: nn.Module, model: nn.Module, options: Options) -> Replacement | Refusal:
    assert isinstance(module, nn.MultiheadAttention)
    if type(module) is not nn.MultiheadAttention:
        return Refusal("a subclass of torch's, whose function may be another one")
    if module.bias_k is not None or module.add_zero_attn:
        return Refusal("add_bias_kv and add_zero_attn have no meaning for LightNet")
    dim, heads, batch_first = module.embed_dim, module.num_heads, module.batch_first
    old = _projections(module)
    if options.mixer is None and options.grid is None:
        sources = {"kdim": module.kdim, "vdim": module.vdim}
        bias = module.out_proj.bias is not None
        new = MultiheadAttention(dim, heads, module.dropout, bias, **sources, batch_first=batch_first)
        return Replacement(new, f"MultiheadAttention{options.begin(new, old)}")
    if (module.kdim, module.vdim) != (dim, dim):
        return Refusal(f"kdim={module.kdim}, vdim={module.vdim}, and a mixer reads embed_dim={dim}")
    # in torch's decoder layers, and in SigLIP's pooling heads, where a learned query reads
    cross = name.endswith("multihead_attn") or hasattr(next(around(name, model)), "probe")
    tokens = options.tokens(dim, heads, **{"grid": None, "context_dim": dim} if cross else {})
    if cross and not reads_context(tokens.mixer):
        return Refusal(f"it reads another source, and {type(tokens.mixer).__name__} cannot")
    new_layer = MixerAttention(tokens, dim, heads, batch_first, cross)
    return options.replacement(new_layer, tokens, old, WEIGHTS_DROPOUT if module.dropout else "")


def _projections(module: nn.MultiheadAttention) -> Projections:
    """Return weights and biases of q, k, v and o."""
    out = {"o": (module.out_proj.weight, module.out_proj.bias)}
    if module.in_proj_weight is not None:
        return thirds(module.in_proj_weight, module.in_proj_bias) | out
    weights = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    return dict(zip("qkv", zip(weights, biases, strict=True), strict=True)) | out
