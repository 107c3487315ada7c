"""LightNet attention in Hugging Face transformers: the attention implementation "lightnet".

Importing this module registers it; `model.set_attn_implementation("lightnet")` or
`attn_implementation="lightnet"` in `from_config` and `from_pretrained` then selects it.

    y[t] = sum_c SiLU(q[t])[c] * sum_s softmax_s(k[s, c]) v[s]      s: the tokens that t may see

Weights trained with softmax attention do not carry over, as this is another function of q, k and v:
train or fine-tune. transformers' interface hands over tensors, not a module: there is no room for
parameters, so this output has neither the norm nor the gate of `LightNetAttention`.

scaling is ignored: LightNet has no scores to scale. dropout acts on the output, while training, as
there are no attention weights. Rotary position embeddings act as positions in q and k, but the
result is not a function of their differences. A cache holds keys and values as with other
attention, so a step costs as much as they are long; the memory of `NDLightNet.stream` is constant.

Masks, as 4-D tensors (transformers passes those on unchanged), from `mask`:

  None               nothing is hidden; causal if the layer is, as in transformers' "sdpa"
  bool (b, 1, 1, n)  the keys that all queries see
  int8 (b, 1, r, n)  causal: 1 for keys that are not padding; the queries are the last of these n
                     tokens, and further keys are not yet written. r = 2: sliding window
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from ndlightnet.ops import State, axis_causal_attention, causal_attention, read, summarize

NAME = "lightnet"
ONE_MEMORY = (
    "LightNet has one memory for all queries, which cannot hide different keys from different "
    "queries: expected padding, causal attention or a causal sliding window"
)
# keyword arguments that change nothing in an attention layer's output
HARMLESS = {
    "cache_position", "deterministic", "logits_to_keep", "num_items_in_batch", "output_attentions",
    "output_hidden_states", "output_router_logits", "position_ids", "return_dict", "use_cache",
}  # fmt: skip
# what transformers builds masks of: the name of its function -> what it is called
OVERLAYS = {
    "sliding_window_overlay": "a sliding window",
    "sliding_window_bidirectional_overlay": "a sliding window in both directions",
    "chunked_overlay": "attention in chunks",
    "blockwise_overlay": "blocks of tokens that see each other",
    "packed_sequence_mask_function": "packed sequences (pass an attention_mask if there are none)",
}
CAUSAL, FULL = "causal_mask_function", "bidirectional_mask_function"


# ------------------------------------------------------------------------------------ attention
def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
    sliding_window: int | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute LightNet attention for a layer of transformers: (batch, length, heads, value_dim).

    query (batch, heads, length, dim); key, value (batch, key heads, keys, ·), each key head read by
    heads / key heads query heads. attention_mask: None or a mask of `mask`, see above. Raises
    ValueError for what LightNet cannot express: other masks, position biases, soft caps, sinks.
    """
    given = {name: x for name, x in kwargs.items() if x is not None and name not in HARMLESS}
    if given:
        raise ValueError(
            f"{', '.join(given)}: {type(module).__name__} asks for it and LightNet attention "
            "has no such thing: expected None"
        )
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions=True: LightNet computes no attention weights")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    length = q.shape[1]
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if not causal or length == 1:
            y = _full(q, k, v, None)
        elif k.shape[1] != length:
            raise ValueError(
                f"attention_mask=None with {length} queries and {k.shape[1]} keys in a causal "
                "layer: expected a mask that says where the queries are"
            )
        else:
            y = _causal(q, k, v, None, sliding_window)
    elif attention_mask.dtype == torch.int8:
        rows, n = attention_mask.shape[-2:]
        if rows == 2 and sliding_window is None:
            raise ValueError(f"{type(module).__name__}: a mask with a window, a layer without one")
        seen = attention_mask[:, 0, 0].bool().expand(k.shape[0], -1)
        y = _causal(q, k[:, :n], v[:, :n], seen, sliding_window if rows == 2 else None)
    else:
        shape = tuple(attention_mask.shape)
        if attention_mask.dtype != torch.bool or attention_mask.ndim != 4:
            raise ValueError(
                f"attention_mask {shape} {attention_mask.dtype}: expected bool (batch, 1, 1, keys)"
            )
        if shape[1:3] != (1, 1):
            raise ValueError(f"attention_mask {shape}: {ONE_MEMORY}, bool (batch, 1, 1, keys)")
        y = _full(q, k, v, attention_mask[:, 0, 0, : k.shape[1]].expand(k.shape[0], -1))
    return nn.functional.dropout(y, dropout, module.training), None


def _full(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Let all queries (batch, length, heads, dim) read all keys; heads that share keys are further
    queries of one memory, so nothing is copied."""
    length, heads, shared = q.shape[1], q.shape[2], k.shape[2]
    q = q.unflatten(2, (shared, -1)).transpose(2, 3).flatten(1, 2)
    y = read(q, summarize(k, v, mask=mask))
    return y.unflatten(1, (length, -1)).transpose(2, 3).flatten(2, 3).reshape(
        y.shape[0], length, heads, v.shape[-1]
    )  # fmt: skip


def _causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, window: int | None) -> Tensor:
    """Let each query, the last tokens of those of k, read the keys up to its own."""
    groups, past = q.shape[2] // k.shape[2], k.shape[1] - q.shape[1]

    def each(x: Tensor) -> Tensor:
        return x if groups == 1 else x.repeat_interleave(groups, 2)

    if window is not None and window < k.shape[1]:
        q = nn.functional.pad(q, (0, 0, 0, 0, past, 0))
        options: dict[str, Any] = {"window": window, "mask": mask, "return_state": False}
        return axis_causal_attention(q, each(k), each(v), k.shape[1], **options)[0][:, past:]
    state = None
    if past:
        before = summarize(k[:, :past], v[:, :past], mask=None if mask is None else mask[:, :past])
        state = before if groups == 1 else State(
            *(x.repeat_interleave(groups, 1) for x in before)
        )  # fmt: skip
        mask = None if mask is None else mask[:, past:]
        k, v = k[:, past:], v[:, past:]
    return causal_attention(q, each(k), each(v), mask=mask, state=state)[0]


# ----------------------------------------------------------------------------------------- mask
def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function, attention_mask: Tensor | None = None,
    local_size: int | None = None, allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False, device: torch.device | str = "cpu", **_: Any,
) -> Tensor | None:  # fmt: skip
    """Return the mask of `attention` for transformers' description of one, as described above.

    attention_mask: padding, bool (batch, tokens up to now). Raises ValueError for what LightNet
    cannot express: sliding windows in both directions, chunks, blocks, packed sequences, others.
    """
    causal, window = _pattern(mask_function, kv_offset + kv_length, local_size)
    padding = None
    if attention_mask is not None:
        missing = kv_offset + kv_length - attention_mask.shape[-1]
        padding = nn.functional.pad(attention_mask.bool(), (0, max(0, missing)))
        padding = padding[:, kv_offset : kv_offset + kv_length]
        if not torch.compiler.is_compiling() and padding.all():
            padding = None
    if causal and q_length == 1:
        here = torch.arange(kv_offset, kv_offset + kv_length, device=device)
        seen = here <= q_offset
        if window is not None:
            seen = seen & (here > q_offset - window)
        seen = seen.expand(batch_size, -1) if padding is None else seen & padding
        return seen[:, None, None]
    if causal:
        n = int(q_offset) + q_length - kv_offset
        if not q_length <= n <= kv_length:
            raise ValueError(
                f"queries {int(q_offset)} to {int(q_offset) + q_length}, keys {kv_offset} to "
                f"{kv_offset + kv_length}: expected queries that have keys"
            )
        if padding is None:
            if allow_is_causal_skip and window is None and q_length == kv_length:
                return None
            padding = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
        rows = 1 if window is None else 2
        return padding[:, None, None, :n].to(torch.int8).expand(-1, -1, rows, -1)
    if padding is None:
        if allow_is_bidirectional_skip:
            return None
        padding = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    return padding[:, None, None]


def _pattern(
    function: Callable[..., Any], length: int, local_size: int | None
) -> tuple[bool, int | None]:
    """Return whether a mask function of transformers is causal, and its sliding window."""
    if function is causal_mask_function:
        return True, None
    if function is bidirectional_mask_function:
        return False, None
    names = _names(function)
    overlay = names - {"and_masks", CAUSAL, FULL}
    if local_size is not None and len(overlay) == 1 and overlay <= OVERLAYS.keys():
        if local_size >= length and overlay != {"blockwise_overlay"}:
            return CAUSAL in names, None  # too short to hide anything
        if names == {"and_masks", "sliding_window_overlay", CAUSAL}:
            return True, local_size
    asked = ", ".join(OVERLAYS[x] for x in sorted(overlay & OVERLAYS.keys())) or "a custom mask"
    raise ValueError(f"{asked}: {ONE_MEMORY}")


def _names(function: Any) -> set[str]:
    """Return the names of the functions of transformers that made a mask function."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    inner = [x for cell in cells for x in (cell if isinstance(cell, tuple) else (cell,))]
    name = getattr(function, "__qualname__", type(function).__name__).split(".")[0]
    return {name}.union(*(_names(x) for x in inner if callable(x) and not isinstance(x, Tensor)))


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
