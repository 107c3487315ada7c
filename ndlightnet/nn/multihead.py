"""A drop-in for torch.nn.MultiheadAttention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ndlightnet.ops import causal_attention, norm_gate, read, summarize


class MultiheadAttention(nn.Module):
    """LightNet attention behind the constructor and the call of `torch.nn.MultiheadAttention`.

    `encoder_layer.self_attn = MultiheadAttention(d, h, batch_first=True)` makes a
    `torch.nn.TransformerEncoderLayer` linear in the length. Trained softmax weights do not carry
    over: this is another function of q, k and v; train it, or fine-tune, from where you put it.

    What differs: `attn_mask` may be None or the causal mask, nothing else, because a memory that
    all queries share cannot hide different keys from different queries. `dropout` acts on the gated
    output, as there are no attention weights in the computation. `add_bias_kv` and `add_zero_attn`
    are refused. No position code is added, as in torch. The weights of `need_weights=True` are
    exact, signed, sum to no particular number, and cost O(length^2): pass `need_weights=False`
    where you do not look at them.
    """

    # TransformerEncoderLayer's inference fast path would run softmax on our weights: these switch
    # it off
    _qkv_same_embed_dim = False
    in_proj_weight = None
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if add_bias_kv or add_zero_attn:
            raise ValueError(
                "add_bias_kv and add_zero_attn have no meaning for LightNet: expected False"
            )
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"num_heads={num_heads}: expected a divisor of embed_dim={embed_dim}")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.dropout, self.batch_first = dropout, batch_first

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias, device=device, dtype=dtype)

        self.q_proj = linear(embed_dim, embed_dim)
        self.k_proj = linear(self.kdim, embed_dim)
        self.v_proj = linear(self.vdim, embed_dim)
        self.gate = nn.Sequential(
            linear(embed_dim, self.head_dim), linear(self.head_dim, embed_dim)
        )
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
        """Shapes as in torch: (length, batch, dim), (batch, length, dim) with batch_first, or
        unbatched (length, dim). key_padding_mask (batch, source): bool, True = padding, or float,
        added to the keys' logits (-inf = padding). Returns the output and, if wanted, the weights
        (batch, target, source), per head (batch, heads, target, source) with
        average_attn_weights=False."""
        unbatched = query.ndim == 2
        if unbatched:
            query, key, value = (x[None] for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        causal = _is_causal(attn_mask, is_causal, query.shape[1], key.shape[1])
        if causal and query.shape[1] != key.shape[1]:
            raise ValueError(
                f"is_causal with {query.shape[1]} queries on {key.shape[1]} keys: expected as many"
            )

        def heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (self.num_heads, self.head_dim))

        q, k, v = heads(self.q_proj(query)), heads(self.k_proj(key)), heads(self.v_proj(value))
        keep = None
        if key_padding_mask is not None:
            if key_padding_mask.dtype == torch.bool:
                keep = ~key_padding_mask
            else:
                keep = key_padding_mask > -torch.inf
                bias = torch.where(keep, key_padding_mask, 0).to(k.dtype)
                k = k + bias[..., None, None]

        def attend(v: Tensor) -> Tensor:
            if causal:
                return causal_attention(q, k, v, mask=keep)[0]
            return read(q, summarize(k, v, mask=keep))

        norm = self.norm
        y = norm_gate(attend(v).flatten(2), self.gate(query), norm.weight, norm.bias, norm.eps)
        out = self.out_proj(nn.functional.dropout(y, self.dropout, self.training))
        weights = None
        if need_weights:  # attending to the unit vectors gives the weights themselves
            n = k.shape[1]
            eye = torch.eye(n, dtype=v.dtype, device=v.device)[None, :, None]
            weights = attend(eye.expand(k.shape[0], n, self.num_heads, n)).transpose(1, 2)
            weights = weights.mean(1) if average_attn_weights else weights
        if unbatched:
            return out[0], None if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights


def _is_causal(attn_mask: Tensor | None, is_causal: bool, target: int, source: int) -> bool:
    """Whether the mask is the causal one; a mask that is neither that nor empty is refused."""
    # Looking at a mask waits for the GPU and breaks a compiled graph: there the flag is believed.
    if attn_mask is None or (is_causal and torch.compiler.is_compiling()):
        return is_causal
    hidden = attn_mask if attn_mask.dtype == torch.bool else attn_mask == -torch.inf
    plain = attn_mask.dtype == torch.bool or bool((attn_mask[~hidden] == 0).all())
    if plain and not is_causal and not bool(hidden.any()):
        return False
    expected = torch.ones(target, source, dtype=torch.bool, device=attn_mask.device).triu(1)
    if attn_mask.shape == expected.shape and plain and bool((hidden == expected).all()):
        return True
    raise ValueError(
        f"attn_mask {tuple(attn_mask.shape)}: expected None or the causal mask "
        f"({target}, {source}). LightNet keeps one memory for all queries, so it cannot hide "
        "different keys from different queries; use key_padding_mask for padding"
    )
