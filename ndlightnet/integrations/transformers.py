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

from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from ndlightnet.ops import State, axis_causal_attention, causal_attention, lightnet_attention, summarize

NAME = "lightnet"
ONE_MEMORY = (
    "LightNet has one memory for all queries, which cannot hide different keys from different "
    "queries: expected padding, causal attention or a sliding window"
)
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
# what transformers builds masks of: the name of its function -> what it is called
OVERLAYS = {
    "sliding_window_overlay": "a sliding window",
    "sliding_window_bidirectional_overlay": "a sliding window in both directions",
    "chunked_overlay": "attention in chunks",
    "blockwise_overlay": "blocks of tokens that see each other",
    "packed_sequence_mask_function": "packed sequences",
}
PACKING = {"packed_sequence_mask_function", "remap_positions_for_packed_sequence"}
CAUSAL, FULL, BOTH = "causal_mask_function", "bidirectional_mask_function", "and_masks"


def _place(code: Any) -> tuple[str, int]:
    """Return what tells the code of transformers' mask functions apart. (Torch cannot guard code
    itself, and while it traces a graph functions have no qualified names.)"""
    return code.co_filename, code.co_firstlineno


# place of a mask function -> name of the function that makes it
MADE: dict[tuple[str, int], str] = {
    _place(masking_utils.causal_mask_function.__code__): CAUSAL,
    _place(masking_utils.bidirectional_mask_function.__code__): FULL,
}
for _name in (*OVERLAYS, *PACKING, BOTH):
    _made = getattr(masking_utils, _name, None)  # versions differ; what is missing is refused
    for _code in _made.__code__.co_consts if _made else ():
        if isinstance(_code, CodeType):
            MADE[_place(_code)] = _name


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
    given = {name: x for name, x in kwargs.items() if x is not None and name not in HARMLESS}
    if given:
        raise ValueError(
            f"{', '.join(given)}: {type(module).__name__} asks for it and LightNet attention "
            "has no such thing: expected None"
        )
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions=True: LightNet computes no attention weights")
    seen = attention_mask
    if seen is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if causal and query.shape[2] > 1:
            y = _causal(query, key, value, None, sliding_window)
        else:
            y = lightnet_attention(query, key, value, enable_gqa=True)
    elif seen.dtype not in (torch.bool, torch.int8) or seen.ndim != 4:
        raise ValueError(f"attention_mask {tuple(seen.shape)} {seen.dtype}: expected bool (batch, 1, 1, keys)")
    elif seen.dtype == torch.bool:
        if seen.shape[1:3] != (1, 1):
            raise ValueError(f"attention_mask {tuple(seen.shape)}: {ONE_MEMORY}")
        y = lightnet_attention(query, key, value, seen, enable_gqa=True)
    else:
        rows, n = seen.shape[-2:]
        if rows == 2 and sliding_window is None:
            raise ValueError(f"{type(module).__name__}: a mask with a window, a layer without one")
        kept = seen[:, :, :1].bool()
        if rows > 2:
            y = _around(query, key, value, kept, rows - 3)
        else:
            window = sliding_window if rows == 2 else None
            y = _causal(query, key[:, :, :n], value[:, :, :n], kept, window)
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
    seen = None if mask is None else mask[:, 0, 0].expand(k.shape[0], -1)
    if windowed:
        return _window(q, k, v, seen, window, past)
    assert seen is not None
    old = (x[:, :, :past].transpose(1, 2) for x in (k, v))
    state = summarize(*old, mask=seen[:, :past])  # once for the heads that share keys
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        state = State(*(x.repeat_interleave(groups, 1) for x in state))
    new = (_heads(x[:, :, past:], groups) for x in (k, v))
    y = causal_attention(q.transpose(1, 2), *new, mask=seen[:, past:], state=state)[0]
    return y.transpose(1, 2)


def _around(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, reach: int) -> Tensor:
    """Let each query read the keys up to `reach` tokens before and after its own: a causal window
    of 2 reach + 1 keys that ends `reach` tokens later, behind the last key at padding."""
    if reach >= k.shape[2] - 1:
        return lightnet_attention(q, k, v, mask, enable_gqa=True)
    k, v = (nn.functional.pad(x, (0, 0, 0, reach)) for x in (k, v))
    seen = nn.functional.pad(mask[:, 0, 0], (0, reach)).expand(k.shape[0], -1)
    return _window(q, k, v, seen, 2 * reach + 1, reach)


def _window(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, window: int | None, past: int) -> Tensor:
    """Let query i read the `window` keys up to key past + i."""
    groups = q.shape[1] // k.shape[1]
    q = nn.functional.pad(q, (0, 0, past, 0)).transpose(1, 2)  # a query for every key
    told: dict[str, Any] = {"mask": seen, "window": window, "return_state": False}
    y = axis_causal_attention(q, _heads(k, groups), _heads(v, groups), k.shape[2], **told)[0]
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
    **_: Any,
) -> Tensor | None:
    """Return the mask of `attention` for transformers' description of one, as described above.

    attention_mask: padding, bool (batch, tokens up to now). Raises ValueError for what LightNet
    cannot express: chunks, blocks, packed sequences, others.
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


def _pattern(function: Callable[..., Any], length: int, local_size: int | None) -> tuple[bool, int | None]:
    """Return whether a mask function of transformers is causal, and its sliding window."""
    if function is causal_mask_function:
        return True, None
    if function is bidirectional_mask_function:
        return False, None
    parts = dict(_parts(function))
    names = parts.keys() - {BOTH, CAUSAL, FULL}
    if names >= PACKING and torch.compiler.is_compiling():  # a graph cannot tell if there are any
        packed: Tensor = parts["packed_sequence_mask_function"][0]
        torch._assert_async((packed == 0).all(), f"packed sequences: {ONE_MEMORY}")
        names -= PACKING
        if not names:
            return True, None
    if local_size is not None and len(names) == 1 and names <= OVERLAYS.keys():
        if local_size >= length and names != {"blockwise_overlay"}:
            return CAUSAL in parts, None  # too short to hide anything
        if names == {"sliding_window_overlay"} and CAUSAL in parts:
            return True, local_size
        if names == {"sliding_window_bidirectional_overlay"} and CAUSAL not in parts:
            return False, local_size
    asked = ", ".join(OVERLAYS[x] for x in sorted(names & OVERLAYS.keys())) or "a custom mask"
    raise ValueError(f"{asked}: {ONE_MEMORY}")


def _parts(function: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield the names of the functions of transformers that a mask function was made by ("" for
    others), with what it holds."""
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    code = getattr(function, "__code__", None)
    yield "" if code is None else MADE.get(_place(code), ""), held
    for x in held:
        for inner in x if isinstance(x, tuple) else (x,):
            if callable(inner) and not isinstance(inner, Tensor):
                yield from _parts(inner)


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
        found = super().state_dict(*args, **kwargs)
        written: set[int] = set()
        for name, x in found.items():
            if isinstance(x, Tensor) and x.numel():
                found[name] = x.clone() if x.data_ptr() in written else x
                written.add(x.data_ptr())
        return found


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
