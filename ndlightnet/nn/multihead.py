"""Drop-in replacement for torch.nn.MultiheadAttention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ndlightnet.layout.abstract import check_integers
from ndlightnet.nn.initial import Device, Initialized
from ndlightnet.ops import causal_attention, norm_gate, read, summarize
from ndlightnet.ops.dtypes import check_floats, check_not_wider, check_tensors

EXPECTED = (
    "expected None or the causal mask, as LightNet has one memory for all queries, which cannot "
    "hide different keys from different queries (key_padding_mask hides padding). Its shape:"
)


class _NoFastPath:
    """Stand-in for a weight: torch's fast paths skip objects that override torch functions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"{func}: MultiheadAttention of ndlightnet has no in_proj_weight")


class MultiheadAttention(Initialized):
    """LightNet attention with the constructor and the call of `torch.nn.MultiheadAttention`.

    `encoder_layer.self_attn = MultiheadAttention(d, h, batch_first=True)` makes a `torch.nn.TransformerEncoderLayer`
    linear in the length. Trained softmax weights do not carry over, as this is another function of q, k and v: train or
    fine-tune after the replacement.

    Differences from torch: `attn_mask` must be the causal mask or hide nothing, because a memory that all queries share
    cannot hide different keys from different queries. The values of a mask are checked; a compiled graph checks them on
    the device, and computes both causal and full attention and selects one, unless `is_causal=True`. `dropout` acts on
    the gated output, as the computation has no attention weights. `add_bias_kv` and `add_zero_attn` are refused. As in
    torch, no position code is added. The weights of `need_weights=True` are exact and signed, sum to no particular
    number, and cost O(length^2): pass `need_weights=False` where you do not use them.
    """

    # TransformerEncoderLayer's inference fast path would run softmax on our weights, and
    # TransformerEncoder would pass nested tensors instead of padding: these switch both off
    _qkv_same_embed_dim = False
    in_proj_weight = _NoFastPath()
    in_proj_bias = None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if add_bias_kv or add_zero_attn:
            raise ValueError("add_bias_kv and add_zero_attn have no meaning for LightNet: expected False")
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"num_heads={num_heads}: expected a divisor of embed_dim={embed_dim}")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        check_integers(1, kdim=self.kdim, vdim=self.vdim)
        self.dropout, self.batch_first = dropout, batch_first

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias, device=device, dtype=dtype)

        self.q_proj = linear(embed_dim, embed_dim)
        self.k_proj = linear(self.kdim, embed_dim)
        self.v_proj = linear(self.vdim, embed_dim)
        self.gate = nn.Sequential(linear(embed_dim, self.head_dim), linear(self.head_dim, embed_dim))
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6, device=device, dtype=dtype)
        self.out_proj = linear(embed_dim, embed_dim)

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
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and, if wanted, the weights (batch, target, source), per head (batch, heads, target,
        source) with average_attn_weights=False. Shapes as in torch: (length, batch, dim), (batch, length, dim) with
        batch_first, or unbatched (length, dim). key_padding_mask (batch, source): bool, True = padding, or float, added
        to the keys' logits (-inf = padding).
        attn_mask (target, source): bool, True = hidden, or float, -inf = hidden; or (batch x heads, target, source):
        padding, equal for all heads and queries of a sample.

        Raises ValueError for nested tensors, masks of another type or shape, an attn_mask that is neither causal nor
        empty nor padding, and, as torch does, for is_causal without an attn_mask.
        """
        check_floats(query=query, key=key, value=value)
        check_not_wider(self, query=query, key=key, value=value)
        if query.is_nested:
            raise ValueError(
                "query is a nested tensor: expected a padded one and key_padding_mask; set "
                "use_nested_tensor=False of a TransformerEncoder that makes nested ones"
            )
        widths = {"embed_dim": (query, "query"), "kdim": (key, "key"), "vdim": (value, "value")}
        for width, (x, name) in widths.items():
            if x.ndim not in (2, 3) or x.ndim != query.ndim or x.shape[-1] != getattr(self, width):
                raise ValueError(
                    f"{name} {tuple(x.shape)}: expected 2 or 3 axes, as query's, the last of "
                    f"{width}={getattr(self, width)}"
                )
        samples = 0 if self.batch_first else 1
        if query.ndim == 3 and query.shape[samples] != key.shape[samples]:
            raise ValueError(f"key {tuple(key.shape)}: expected the batch of query {tuple(query.shape)}")
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(f"value {tuple(value.shape)}: expected the length and batch of key {tuple(key.shape)}")
        check_masks(key_padding_mask, attn_mask, is_causal)
        unbatched = query.ndim == 2
        if unbatched:
            query, key, value = (x[None] for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        if key_padding_mask is not None and key_padding_mask.shape != key.shape[:2]:
            raise ValueError(
                f"key_padding_mask {tuple(key_padding_mask.shape[unbatched:])}: expected "
                f"{tuple(key.shape[unbatched:2])}, the keys'"
            )
        target, source = query.shape[1], key.shape[1]
        if attn_mask is not None and attn_mask.ndim == 3 and not is_causal:
            hidden = hidden_keys(attn_mask, len(query), self.num_heads, target, source)
            key_padding_mask, attn_mask = hide(key_padding_mask, hidden), None
        causal = is_causal_mask(attn_mask, is_causal, target, source)

        def heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (self.num_heads, self.head_dim))

        q, k, v = heads(self.q_proj(query)), heads(self.k_proj(key)), heads(self.v_proj(value))
        mask = None
        if key_padding_mask is not None:
            if key_padding_mask.dtype == torch.bool:
                mask = ~key_padding_mask
            else:
                mask = key_padding_mask > -torch.inf
                bias = torch.where(mask, key_padding_mask, 0).to(k.dtype)
                k = k + bias[..., None, None]

        def attend(v: Tensor) -> Tensor:
            if causal is True:
                return causal_attention(q, k, v, mask=mask)[0]
            y = read(q, summarize(k, v, mask=mask))
            if causal is False:
                return y
            return torch.where(causal, causal_attention(q, k, v, mask=mask)[0], y)

        norm = self.norm
        y = norm_gate(attend(v).flatten(2), self.gate(query), norm.weight, norm.bias, norm.eps)
        out = self.out_proj(nn.functional.dropout(y, self.dropout, self.training))
        weights = None
        if need_weights:  # with unit vectors as values the output is the weights
            n = k.shape[1]
            eye = torch.eye(n, dtype=v.dtype, device=v.device)[None, :, None]
            weights = attend(eye.expand(k.shape[0], n, self.num_heads, n)).transpose(1, 2)
            weights = weights.mean(1) if average_attn_weights else weights
        if unbatched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    if TYPE_CHECKING:  # what an editor knows of a call; of a Module's it knows nothing

        def __call__(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            key_padding_mask: Tensor | None = None,
            need_weights: bool = True,
            attn_mask: Tensor | None = None,
            average_attn_weights: bool = True,
            is_causal: bool = False,
        ) -> tuple[Tensor, Tensor | None]: ...


def check_masks(key_padding_mask: Any, attn_mask: Any, is_causal: bool) -> None:
    for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
        if mask is None:
            continue
        check_tensors(**{name: mask})
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise ValueError(f"{name} {mask.dtype}: expected bool, True = hidden, or floats")
    if is_causal and attn_mask is None:
        raise ValueError(
            "attn_mask=None with is_causal=True: expected the causal mask beside it, such as "
            "torch.nn.Transformer.generate_square_subsequent_mask(length)"
        )


def is_causal_mask(attn_mask: Tensor | None, is_causal: bool, target: int, source: int) -> bool | Tensor:
    """Return whether the mask is the causal one; in a compiled graph, a bool Tensor () where this depends on its
    values. Refuse a mask that is neither causal nor empty; a compiled graph does so when it runs."""
    if attn_mask is None:
        return False
    if attn_mask.shape != (target, source) or (is_causal and target != source):
        raise ValueError(f"attn_mask {tuple(attn_mask.shape)}: {EXPECTED} ({target}, {source})")
    hidden = attn_mask if attn_mask.dtype == torch.bool else attn_mask == -torch.inf
    causal, empty = (hidden == torch.ones_like(hidden).triu(1)).all(), ~hidden.any()
    if target != source:
        causal = torch.zeros_like(causal)
    allowed = (causal if is_causal else causal | empty) & (hidden | (attn_mask == 0)).all()
    if torch.compiler.is_compiling():  # values cannot be branched on
        torch._assert_async(allowed, f"attn_mask: {EXPECTED} (target, source)")
        return target == source and (is_causal or causal)
    if not allowed:
        raise ValueError(f"attn_mask {tuple(attn_mask.shape)}: {EXPECTED} ({target}, {source})")
    return bool(causal)


def hidden_keys(attn_mask: Tensor, batch: int, heads: int, target: int, source: int) -> Tensor:
    """Return a mask (batch x heads, target, source), as torch takes it, as bool (batch, source),
    True = hidden. Refuse one that hides different keys from different queries or heads; a compiled
    graph does so when it runs. Floats hide with -inf or with the least number of their dtype."""
    shape, expected = tuple(attn_mask.shape), f"{EXPECTED} ({target}, {source})"
    if shape != (batch * heads, target, source):
        raise ValueError(
            f"attn_mask {shape}: {expected}, or padding of shape ({batch * heads}, {target}, "
            f"{source}), equal for all heads and queries"
        )
    floats = attn_mask.dtype != torch.bool
    hidden = attn_mask <= torch.finfo(attn_mask.dtype).min if floats else attn_mask
    rows = hidden.reshape(batch, heads * target, source)
    allowed = (rows == rows[:, :1]).all()
    if floats:
        allowed = allowed & (hidden | (attn_mask == 0)).all()
    if torch.compiler.is_compiling():  # values cannot be branched on
        torch._assert_async(allowed, f"attn_mask: {EXPECTED} (target, source), or padding")
    elif not allowed:
        raise ValueError(f"attn_mask {shape}: {expected}, or padding equal for all heads")
    return rows[:, 0]


def hide(key_padding_mask: Tensor | None, hidden: Tensor) -> Tensor:
    """Return a padding mask of torch, bool or floats, that also hides `hidden`."""
    if key_padding_mask is None or key_padding_mask.dtype == torch.bool:
        return hidden if key_padding_mask is None else key_padding_mask | hidden
    return key_padding_mask.masked_fill(hidden, -torch.inf)
