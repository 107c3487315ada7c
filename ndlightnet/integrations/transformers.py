"""Hugging Face transformers: LightNet as the attention implementation "lightnet" of its models, and
`ForTrainer`, which lets its Trainer train networks of this library.

Importing this module registers "lightnet"; `model.set_attn_implementation("lightnet")`, or
`attn_implementation="lightnet"` in `from_config` and `from_pretrained`, then selects it.

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
                     tokens, and further keys are not yet written. r = 2: sliding window;
                     r > 2: not causal, each query reads the r - 3 tokens before and after it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from ndlightnet.integrations.tokens import ONE_MEMORY, require
from ndlightnet.ops import State, axis_causal_attention, causal_attention, lightnet_attention, summarize

NAME = "lightnet"
# keyword arguments that change nothing in an attention layer's output
HARMLESS = {
    "cache_position",
    "deterministic",
    "logits_to_keep",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "use_cache",
}
CELLS = 2**24  # of a mask that are compared at a time: 16 MiB


# ------------------------------------------------------------------------------------ attention
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute LightNet attention for a layer of transformers: (batch, length, heads, value_dim).

    query (batch, heads, length, dim); key, value (batch, key heads, keys, ·), each key head read by
    heads / key heads query heads. attention_mask: None or a mask of `mask`, see above. Raises
    ValueError for what LightNet cannot express: other masks, position biases, soft caps, sinks.
    """
    unknown = [name for name, x in kwargs.items() if x is not None and name not in HARMLESS]
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)}: {type(module).__name__} asks for it and LightNet attention "
            "has no such thing: expected None"
        )
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions=True: LightNet computes no attention weights")
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if causal and query.shape[2] > 1:
            y = _causal(query, key, value, None, sliding_window)
        else:
            y = lightnet_attention(query, key, value, enable_gqa=True)
    elif attention_mask.dtype not in (torch.bool, torch.int8) or attention_mask.ndim != 4:
        shape, dtype = tuple(attention_mask.shape), attention_mask.dtype
        raise ValueError(f"attention_mask {shape} {dtype}: expected bool (batch, 1, 1, keys)")
    elif attention_mask.dtype == torch.bool:
        if attention_mask.shape[1:3] != (1, 1):
            raise ValueError(f"attention_mask {tuple(attention_mask.shape)}: {ONE_MEMORY}")
        y = lightnet_attention(query, key, value, attention_mask, enable_gqa=True)
    else:
        rows, n = attention_mask.shape[-2:]
        if rows == 2 and sliding_window is None:
            raise ValueError(f"{type(module).__name__}: a mask with a window, a layer without one")
        visible = attention_mask[:, :, :1].bool()
        if rows > 2:
            y = _around(query, key, value, visible, rows - 3)
        else:
            window = sliding_window if rows == 2 else None
            y = _causal(query, key[:, :, :n], value[:, :, :n], visible, window)
    return nn.functional.dropout(y.transpose(1, 2), dropout, module.training), None


def _causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, window: int | None) -> Tensor:
    """Let each query read the keys up to its own, and in a window; the queries are the last tokens
    of those of k. Without a mask there must be as many queries as keys."""
    past = k.shape[2] - q.shape[2]
    if mask is None and past:
        raise ValueError(
            f"attention_mask=None with {q.shape[2]} queries and {k.shape[2]} keys in a causal "
            "layer: expected a mask, which says where the queries are"
        )
    windowed = window is not None and window < k.shape[2]
    if not past and not windowed:
        return lightnet_attention(q, k, v, mask, is_causal=True, enable_gqa=True)
    visible = None if mask is None else mask[:, 0, 0].expand(k.shape[0], -1)
    if windowed:
        return _window(q, k, v, visible, window, past)
    assert visible is not None
    old = (x[:, :, :past].transpose(1, 2) for x in (k, v))
    state = summarize(*old, mask=visible[:, :past])  # once for the heads that share keys
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        state = State(*(x.repeat_interleave(groups, 1) for x in state))
    new = (_heads(x[:, :, past:], groups) for x in (k, v))
    y = causal_attention(q.transpose(1, 2), *new, mask=visible[:, past:], state=state)[0]
    return y.transpose(1, 2)


def _around(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, reach: int) -> Tensor:
    """Let each query read the keys up to `reach` tokens before and after its own: a causal window
    of 2 reach + 1 keys that ends `reach` tokens later, behind the last key at padding."""
    if reach >= k.shape[2] - 1:
        return lightnet_attention(q, k, v, mask, enable_gqa=True)
    k, v = (nn.functional.pad(x, (0, 0, 0, reach)) for x in (k, v))
    visible = nn.functional.pad(mask[:, 0, 0], (0, reach)).expand(k.shape[0], -1)
    return _window(q, k, v, visible, 2 * reach + 1, reach)


def _window(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, window: int | None, past: int) -> Tensor:
    """Let query i read the `window` keys up to key past + i."""
    groups = q.shape[1] // k.shape[1]
    q = nn.functional.pad(q, (0, 0, past, 0)).transpose(1, 2)  # a query for every key
    k, v, keys = _heads(k, groups), _heads(v, groups), k.shape[2]
    y = axis_causal_attention(q, k, v, keys, mask=visible, window=window, return_state=False)[0]
    return y[:, past:].transpose(1, 2)


def _heads(x: Tensor, groups: int) -> Tensor:
    """Return keys or values (batch, length, heads, dim) for every query head."""
    return (x if groups == 1 else x.repeat_interleave(groups, 1)).transpose(1, 2)


# ----------------------------------------------------------------------------------------- mask
def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    use_vmap: bool = False,
    config: Any = None,
    **_: Any,
) -> Tensor | None:
    """Return the mask of `attention` for transformers' description of one, as described above.

    attention_mask: padding, bool (batch, tokens up to now). use_vmap: whether the model has a mask function of its own.
    Raises ValueError for what LightNet cannot express: chunks, blocks, packed sequences, masks of a model's own.
    """
    plain = mask_function is causal_mask_function or mask_function is bidirectional_mask_function
    window = None if plain or local_size is None or local_size >= kv_offset + kv_length else local_size
    causal = mask_function is causal_mask_function if plain else not allow_is_bidirectional_skip
    if not plain:
        if use_vmap:
            raise ValueError(f"a custom mask: {ONE_MEMORY}")
        chunks = local_size is not None and local_size == getattr(config, "attention_chunk_size", None)
        what = "attention in chunks" if chunks else "packed sequences, blocks or a custom mask"
        queries = q_offset + torch.arange(q_length, device=device)
        keys = kv_offset + torch.arange(kv_length, device=device)
        _check_pattern(mask_function, causal, window, batch_size, queries, keys, what)
    padding = None
    if attention_mask is not None:
        missing = kv_offset + kv_length - attention_mask.shape[-1]
        padding = nn.functional.pad(attention_mask.bool(), (0, max(0, missing)))
        padding = padding[:, kv_offset : kv_offset + kv_length]
        if not torch.compiler.is_compiling() and padding.all():
            padding = None
    if causal and q_length == 1:
        place = torch.arange(kv_offset, kv_offset + kv_length, device=device)
        visible = place <= q_offset
        if window is not None:
            visible = visible & (place > q_offset - window)
        visible = visible.expand(batch_size, -1) if padding is None else visible & padding
        return visible[:, None, None]
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
        if allow_is_bidirectional_skip and window is None:
            return None
        padding = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    if window is None:
        return padding[:, None, None]
    if q_length != kv_length:
        raise ValueError(
            f"a sliding window in both directions, {q_length} queries and {kv_length} keys: expected as many"
        )
    return padding[:, None, None].to(torch.int8).expand(-1, -1, window + 3, -1)


def _check_pattern(
    function: Callable[..., Any], causal: bool, window: int | None, batch: int, queries: Tensor, keys: Tensor, what: str
) -> None:
    """Raise ValueError unless a mask function is causal or not, with or without a window.

    transformers composes mask functions, which say nothing about themselves: the function is called
    with all indices, a block of queries at a time. A compiled graph does so when it runs.
    """
    first = torch.arange(batch, device=keys.device)[:, None, None, None]
    head = torch.zeros((), dtype=torch.long, device=keys.device)
    rows = max(1, CELLS // max(1, batch * len(keys)))
    for block in (queries,) if torch.compiler.is_compiling() else queries.split(rows):
        distance = block[:, None] - keys
        expected = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        if window is not None:
            expected = distance.abs() <= window if not causal else expected & (distance < window)
        require((function(first, head, block[:, None], keys) == expected).all(), f"{what}: {ONE_MEMORY}")


# -------------------------------------------------------------------------------------- Trainer
Loss = Callable[[Tensor, Tensor], Tensor]


class ForTrainer(nn.Module):
    """A network of ours with the call that transformers' Trainer expects: labels as an argument,
    a dictionary as the result. `ForTrainer(net).net` is the network.

    A row of the data set is {"x": input, "labels": labels}. Networks themselves take no labels: the
    loss is the task's choice.

    Args:
        net: NDLightNet, NDLightUNet or any network of one input.
        loss: a function of scores and labels. Default: cross entropy of labels (batch, *space) with
            scores (batch, classes, *space), or (batch, length, classes) of a language model; labels
            of -100 do not count. A label is what a token predicts: nothing is shifted here.
    """

    def __init__(self, net: nn.Module, loss: Loss | None = None) -> None:
        super().__init__()
        self.net, self.loss = net, loss or class_loss

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        scores = self.net(x)
        if labels is None:
            return {"logits": scores}
        return {"loss": self.loss(scores, labels), "logits": scores}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state with tied weights twice, as safetensors refuses shared memory."""
        state = super().state_dict(*args, **kwargs)
        written: set[int] = set()
        for name, x in state.items():
            if isinstance(x, Tensor) and x.numel():
                state[name] = x.clone() if x.data_ptr() in written else x
                written.add(x.data_ptr())
        return state


def class_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy, with the classes on the last axis or on the second one."""
    last, second = labels.shape == scores.shape[:-1], labels.shape == scores[:, 0].shape
    if last == second and scores.ndim > 2:
        raise ValueError(
            f"labels {tuple(labels.shape)}, scores {tuple(scores.shape)}: expected labels (batch, "
            "*space) of scores (batch, classes, *space) or (batch, length, classes); give a loss"
        )
    return nn.functional.cross_entropy(scores if second else scores.movedim(-1, 1), labels)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
