"""LightNet attention with the call of torch's scaled_dot_product_attention."""

from __future__ import annotations

import torch
from torch import Tensor

from ndlightnet.ops.dispatch import Impl
from ndlightnet.ops.dtypes import check_floats, check_tensors
from ndlightnet.ops.lightnet.attention import causal_attention, global_attention, read, summarize


def lightnet_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: None = None,
    enable_gqa: bool = False,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """Return SiLU(query) . softmax(key over tokens)^T value, with the arguments of
    `torch.nn.functional.scaled_dot_product_attention`; linear in both lengths.

    query: (batch, heads, length, dim). key: (batch, heads, source, dim). value: (batch, heads, source, value_dim).
    attn_mask: padding, bool (batch or 1, 1, 1, source), True = data. is_causal: a token reads itself and the tokens
    before it; needs as many queries as keys, and may have an attn_mask as well. enable_gqa: key and value may have
    fewer heads, each for consecutive heads of the query: they are not copied, except in the causal form.

    Returns (batch, heads, length, value_dim) in query's dtype. It is no mean of values: a layer
    norms it (see MultiheadAttention). Where all is padding it is 0.

    Raises ValueError for shapes that do not fit (nothing is broadcast), dtypes that are no floats,
    float64 beside a narrower one, a mask that hides different keys from different queries or heads, and for scale and
    dropout_p, as there are no scores to scale and no weights to drop; TypeError for what is no tensor.
    """
    if scale is not None or dropout_p:
        raise ValueError(
            f"scale={scale}, dropout_p={dropout_p}: expected None and 0, as LightNet attention has "
            "no scores to scale and no weights to drop"
        )
    _check(query, key, value, is_causal, enable_gqa)
    heads, kv_heads = query.shape[1], key.shape[1]
    mask = padding_of(attn_mask, key.shape[0], key.shape[2])
    group = heads // kv_heads if kv_heads else 1
    if is_causal and group > 1:
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    k, v = key.transpose(1, 2), value.transpose(1, 2)
    if is_causal:
        y = causal_attention(query.transpose(1, 2), k, v, mask=mask, impl=impl)[0]
    elif query.shape == key.shape:
        y = global_attention(query.transpose(1, 2), k, v, mask=mask, impl=impl)
    else:  # heads of one group are more queries of one memory
        q = query.unflatten(1, (kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(1, 2)
        y = read(q, summarize(k, v, mask=mask, impl=impl), impl=impl)
        return y.unflatten(1, (group, query.shape[2])).permute(0, 3, 1, 2, 4).flatten(1, 2)
    return y.transpose(1, 2)


def _check(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, enable_gqa: bool) -> None:
    inputs = {"query": query, "key": key, "value": value}
    check_floats(**inputs)
    for name, x in inputs.items():
        if x.is_nested or x.ndim != 4:
            shape = "is a nested tensor" if x.is_nested else f"{tuple(x.shape)}"
            raise ValueError(f"{name} {shape}: expected (batch, heads, length, dim)")
    batch, heads, length, dim = query.shape
    kv_heads, source = key.shape[1:3]
    if (key.shape[0], key.shape[3]) != (batch, dim):
        raise ValueError(
            f"key {tuple(key.shape)}: expected ({batch}, heads, source, {dim}), with the batch and "
            f"dim of query {tuple(query.shape)}"
        )
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"value {tuple(value.shape)}: expected ({batch}, {kv_heads}, {source}, value_dim), with "
            f"the batch, heads and source of key {tuple(key.shape)}"
        )
    if heads != kv_heads and (not enable_gqa or kv_heads == 0 or heads % kv_heads):
        raise ValueError(
            f"query has {heads} heads, key {kv_heads}: expected as many, or with enable_gqa=True a divisor"
        )
    if is_causal and length != source:
        raise ValueError(f"is_causal=True, {length} queries and {source} keys: expected as many")
    dtypes = [x.dtype for x in inputs.values()]
    if torch.float64 in dtypes and len(set(dtypes)) > 1:
        raise ValueError(f"query, key, value {', '.join(map(str, dtypes))}: expected torch.float64 of all or of none")


def padding_of(attn_mask: Tensor | None, batch: int, source: int) -> Tensor | None:
    """Return a padding mask (batch or 1, 1, 1, source) as (batch, source). Raise ValueError for anything else."""
    if attn_mask is None:
        return None
    check_tensors(attn_mask=attn_mask)
    shape, fits = tuple(attn_mask.shape), ((batch, 1, 1, source), (1, 1, 1, source))
    if attn_mask.dtype != torch.bool or shape not in fits:
        why = (
            ""
            if shape in fits
            else ", as LightNet has one memory for all queries, which cannot hide different keys from different queries"
        )
        raise ValueError(
            f"attn_mask {shape} {attn_mask.dtype}: expected bool ({batch}, 1, 1, {source}), True = data{why}"
        )
    return attn_mask[:, 0, 0].expand(batch, source)
