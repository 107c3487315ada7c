"""NDLightNet as models of Hugging Face transformers: for Trainer, `generate`, pipelines and the Auto classes.

Importing this module registers NDLightNetConfig ("ndlightnet") and its models. Each holds an NDLightNet, `net`, and
folders go both ways, with the same weights bit by bit:

    net.save_pretrained(folder); model = NDLightNetForCausalLM.from_pretrained(folder)
    model.save_pretrained(folder); net = NDLightNet.from_pretrained(folder)

attention_mask (batch, length), 0 = padding at the left or the right: each row gets what it gets alone. With a cache,
input_ids are the tokens after it, and the mask may have the columns of those before, as in `generate`.

A cache, DynamicCache or StaticCache of the config, holds the network's StreamState, which does not grow, as recurrent
states of linear attention. It cannot forget its last tokens: no assisted generation. No gradients go through it.
"""

from __future__ import annotations

from contextlib import suppress
from inspect import signature
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves, tree_map, tree_structure, tree_unflatten
from transformers import modeling_outputs as outputs
from transformers.utils.generic import can_return_tuple

from ndlightnet.integrations.tokens import require
from ndlightnet.models import NDLightNet
from ndlightnet.models.stream import StreamState
from ndlightnet.nn.constants import Constants
from ndlightnet.nn.mixers.names import described
from ndlightnet.ops.linear_cross_entropy import IGNORED, linear_cross_entropy

if not hasattr(outputs.CausalLMOutputWithPast, "cache"):  # before, generate asks every cache its length
    raise ImportError(f"transformers {transformers.__version__}: expected 5.24 or newer, for caches of states alone")
DEFAULTS = {name: p.default for name, p in signature(NDLightNet).parameters.items()} | {"dims": 1}


class NDLightNetConfig(transformers.PreTrainedConfig):
    """NDLightNet's arguments (dims=1 by default) and transformers'. Classifiers have num_labels outputs, by default
    num_classes, which other models do not read. A mixer is kept in JSON's form."""

    model_type = "ndlightnet"
    attribute_map: ClassVar = {"hidden_size": "embed_dim", "num_hidden_layers": "depth", "tie_word_embeddings": "tied"}
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs = DEFAULTS | {self.attribute_map.get(name, name): x for name, x in kwargs.items()}
        kwargs["mixer"] = described(kwargs["mixer"])
        if kwargs["num_classes"] and self.id2label is None:
            kwargs.setdefault("num_labels", kwargs["num_classes"])
        super().__post_init__(**kwargs)

    @property
    def layer_types(self) -> list[str]:
        """The kind of each layer's cache."""
        return ["linear_attention"] * self.depth


class NDLightNetPreTrainedModel(transformers.PreTrainedModel):
    """Base class of the models."""

    config_class = NDLightNetConfig
    base_model_prefix = "net"  # so weights are loaded with and without it
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False
    _no_split_modules: ClassVar = ["Block"]  # type: ignore[misc]
    _is_stateful = True
    _can_compile_fullgraph = True

    def __init__(self, config: NDLightNetConfig, num_classes: int | None = None) -> None:
        super().__init__(config)
        self.net = NDLightNet(**{name: getattr(config, name) for name in DEFAULTS} | {"num_classes": num_classes})
        self.drawn = not self.net._weight.is_meta
        self.streams = False
        with suppress(ValueError):  # not causal, or a mixer that cannot advance: no caches
            config.number_of_conv_states = max(len(tree_leaves(tree)) for tree in by_layer(first_state(self.net, 0)))
            self.streams = config.vocab_size is not None
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return self.net.embed

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Compute constants, and draw what a file had not, of a network that was built on device meta to load it."""
        if self.drawn:
            return
        for module in [m for m in self.net.modules() if isinstance(m, Constants)]:
            module.reset_constants()
        missing = {n: p for n, p in self.net.named_parameters() if not getattr(p, "_is_hf_initialized", False)}
        fresh = dict(NDLightNet(**self.net.config).named_parameters()) if missing else {}
        for name, parameter in missing.items():
            parameter.copy_(fresh[name])

    def save_pretrained(self, save_directory: Any, *, state_dict: Any = None, **options: Any) -> Any:  # type: ignore
        """Write a folder for this class and for NDLightNet. The arguments are transformers' own."""
        self.config.update(self.net.description())
        state = self.state_dict() if state_dict is None else state_dict
        weights = {n.removeprefix("net."): x for n, x in state.items() if n not in self.all_tied_weights_keys}
        return super().save_pretrained(save_directory, state_dict=weights, **options)

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        """Load weights with the names of this model or of its network, whose Trainer's checkpoints have."""
        weights = {n if n.startswith("net.") else f"net.{n}": x for n, x in state_dict.items()}
        return super().load_state_dict(weights, *args, **options)

    def _set_gradient_checkpointing(self, enable: bool = True, **_: Any) -> None:  # type: ignore[override]
        self.gradient_checkpointing = enable
        self.net.set_grad_checkpointing(enable)

    def _features(self, ids: Any, mask: Any, cache: Any = None, use_cache: Any = None, **unknown: Any) -> Any:
        """Return the features of an input, and the cache after it, None if none is used."""
        cache = unknown.pop("past_key_values", None) if cache is None else cache  # its name before
        refuse(unknown)
        real = real_tokens(mask, ids)
        default = self.config.use_cache and self.streams and not torch.is_grad_enabled()
        if cache is None and not (default if use_cache is None else use_cache):
            return self.net.forward_features(ids, real), None
        cache = transformers.DynamicCache(config=self.config) if cache is None else cache
        if len(cache.layers) != self.config.depth or not all(cache.is_linear):
            raise ValueError(f"cache={cache}: expected one for this config, DynamicCache(config=model.config)")
        features, state = advance(self.net, ids, real, self._state(cache, len(ids)))
        for i, tree in enumerate(by_layer(state)):
            for j, x in enumerate(tree_leaves(tree)):
                cache.update_recurrent_state(x.detach(), i, state_idx=j)
            # an update sets it for convolutions alone
            cache.layers[i].has_previous_state = dict.fromkeys(cache.layers[i].has_previous_state, True)
        return features, cache

    def _state(self, cache: Any, batch: int) -> StreamState:
        """Return the state in a cache. That of an empty one is not the zeros of its buffers: a maximum is -inf."""
        if not cache.has_previous_state():
            return first_state(self.net, batch)
        trees = []
        for layer, tree in zip(cache.layers, by_layer(first_state(self.net, 0)), strict=True):
            leaves = [layer.recurrent_states[j] for j in range(len(tree_leaves(tree)))]
            # a cache is overwritten before the backward pass
            leaves = [x.clone() for x in leaves] if torch.is_grad_enabled() else leaves
            trees.append(tree_unflatten(leaves, tree_structure(tree)))
        frames, total, *tpe = trees[0][1]
        return StreamState(frames, 0, None, (), tpe[0] if tpe else None, tuple(x for x, _ in trees), total, frames)


class NDLightNetModel(NDLightNetPreTrainedModel):
    """The network without its head."""

    def __init__(self, config: NDLightNetConfig) -> None:
        super().__init__(config, 0)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(self, input_ids: Any = None, attention_mask: Any = None, pixel_values: Any = None, **rest: Any) -> Any:
        """Return `last_hidden_state` (batch, length, embed_dim) of input_ids (batch, length), int64 or int32, or of
        pixel_values, floats (batch, in_chans, *space), and `cache`. rest: cache; use_cache, default: the config's, but
        not where gradients are enabled. Raises ValueError for other shapes, masks and arguments."""
        x = input_ids if pixel_values is None else pixel_values
        features, cache = self._features(x, attention_mask, **rest)
        return outputs.BaseModelOutputWithPast(last_hidden_state=features.flatten(1, -2), cache=cache)


class LanguageModel(NDLightNetPreTrainedModel):
    """Base class of the language models."""

    causal = True
    accepts_loss_kwargs = True
    _tied_weights_keys: ClassVar = {"net.head.weight": "net.embed.weight"}  # type: ignore[misc]

    def __init__(self, config: NDLightNetConfig) -> None:
        if config.causal != self.causal or config.vocab_size is None:
            problem = f"causal={config.causal}, vocab_size={config.vocab_size}"
            raise ValueError(f"{problem}: {type(self).__name__} expected causal={self.causal} and a vocab_size")
        super().__init__(config)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self, input_ids: Any, attention_mask: Any = None, labels: Any = None, logits_to_keep: Any = 0, **kwargs: Any
    ) -> Any:
        """Return `logits` (batch, length, vocab_size), `loss` and `cache`; in training, with labels, no logits.
        labels: (batch, length) int64, -100 = not counted, of the tokens themselves: a causal model shifts them, and
        what padding would predict does not count. logits_to_keep: of the last tokens, 0: of all. kwargs: those of
        NDLightNetModel, and num_items_in_batch, what the sum of losses is divided by if not the number of labels."""
        loss, logits, items = None, None, kwargs.pop("num_items_in_batch", None)
        features, cache = self._features(input_ids, attention_mask, **kwargs)
        if labels is not None:
            loss = self._loss(features, labels, real_tokens(attention_mask, labels), items)
        if labels is None or not self.training:
            logits = self.net.forward_head(transformers.modeling_utils.slice_logits_to_keep(features, logits_to_keep))
        return outputs.CausalLMOutputWithPast(loss=loss, logits=logits, cache=cache)

    def _loss(self, features: Tensor, labels: Tensor, real: Tensor | None, items: Any) -> Tensor:
        real = torch.ones_like(labels, dtype=torch.bool) if real is None else real
        labels = labels.masked_fill(~real, IGNORED)
        if self.causal:
            labels = pad(labels, (0, 1), value=IGNORED)[:, 1:].masked_fill(~real, IGNORED)
        rows, head, count = self.net.forward_head(features, pre_logits=True), self.net.head, (labels != IGNORED).sum()
        if items is not None and not torch.compiler.is_compiling() and not count:
            return 0 * rows.sum()  # of Trainer's batches one may have no labels: the mean is NaN
        loss = linear_cross_entropy(rows, head.weight, labels, head.bias)
        return loss if items is None else loss * count / items


class NDLightNetForCausalLM(LanguageModel, transformers.GenerationMixin):
    """A causal language model."""


class NDLightNetForMaskedLM(LanguageModel):
    """A language model of causal=False, whose labels are those of the tokens at which they are."""

    causal = False


class NDLightNetForSequenceClassification(NDLightNetPreTrainedModel):
    """A classifier of texts, by the mean over their tokens."""

    def __init__(self, config: NDLightNetConfig) -> None:
        super().__init__(config, config.num_labels)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        """Return `logits` (batch, num_labels) and `loss`, by the config's problem_type as in transformers."""
        refuse(kwargs)
        logits = self.net(input_ids, real_tokens(attention_mask, input_ids))
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return outputs.SequenceClassifierOutput(loss=loss, logits=logits)


class NDLightNetForImageClassification(NDLightNetForSequenceClassification):
    """A classifier of images (dims=2), videos and volumes (dims=3), by the mean over their tokens."""

    main_input_name = "pixel_values"

    def forward(self, pixel_values: Any, labels: Any = None, **kwargs: Any) -> Any:
        """Return `logits` and `loss` of floats (batch, in_chans, *space), such as (batch, in_chans, frames, h, w)."""
        return super().forward(pixel_values, None, labels, **kwargs)


def refuse(arguments: dict[str, Any]) -> None:
    """Raise ValueError for arguments of other models, unless None or False."""
    if names := [name for name, x in arguments.items() if x is not None and x is not False]:
        raise ValueError(f"{', '.join(names)}: expected None, an NDLightNet reads input_ids or pixel_values alone")


def real_tokens(mask: Tensor | None, ids: Tensor) -> Tensor | None:
    """Return the columns of an attention_mask for the last tokens, ids (batch, length), as bool; None: no padding."""
    if mask is None:
        return None
    if mask.ndim != 2 or len(mask) != len(ids) or mask.shape[1] < ids.shape[1]:
        raise ValueError(f"attention_mask {tuple(mask.shape)}: expected {tuple(ids.shape)}, or the columns before, too")
    mask = mask.bool()
    begins = mask & ~pad(mask, (1, 0))[:, :-1]
    require((begins.sum(1) <= 1).all(), "attention_mask: padding between real tokens, expected it at the ends of a row")
    real = mask[:, mask.shape[1] - ids.shape[1] :]
    return None if not torch.compiler.is_compiling() and real.all() else real


def first_state(net: NDLightNet, batch: int) -> StreamState:
    """Return the state before the first token, with all tensors."""
    return net.init_state(batch)._replace(space=(), **net.frame_states(batch, (), net._weight.device))


def by_layer(state: StreamState) -> list[Any]:
    """Return what the cache of each layer holds: the layer's memory, and in the first one what belongs to no layer."""
    common = (state.frames, state.total) if state.tpe is None else (state.frames, state.total, state.tpe)
    return [(memory, () if i else common) for i, memory in enumerate(state.layers)]


def advance(net: NDLightNet, ids: Tensor, real: Tensor | None, state: StreamState) -> tuple[Tensor, StreamState]:
    """Advance a network by tokens (batch, length), by those of each row that are real. Features of padding are 0."""
    if real is None or torch.compiler.is_compiling():
        require(real is None or real.all(), "attention_mask: expected no padding, in a compiled call with a cache")
        return net.advance(ids, state)
    features, counts = net._weight.new_zeros(*ids.shape, net.embed_dim), real.sum(1)
    for count in counts.unique().tolist():
        rows = (counts == count).nonzero().flatten()
        taken = torch.zeros_like(real).index_copy(0, rows, real[rows])
        part = tree_map(lambda x, rows=rows: x[rows] if isinstance(x, Tensor) else x, state)
        y, part = net.advance(ids[taken].view(len(rows), count), part)
        features[taken] = y.flatten(0, 1)
        state = tree_map(lambda x, y, i=rows: x.index_copy(0, i, y) if isinstance(x, Tensor) else x, state, part)
    return features, state


transformers.AutoConfig.register("ndlightnet", NDLightNetConfig, exist_ok=True)
for auto, model in (
    (transformers.AutoModel, NDLightNetModel),
    (transformers.AutoModelForCausalLM, NDLightNetForCausalLM),
    (transformers.AutoModelForMaskedLM, NDLightNetForMaskedLM),
    (transformers.AutoModelForSequenceClassification, NDLightNetForSequenceClassification),
    (transformers.AutoModelForImageClassification, NDLightNetForImageClassification),
    (transformers.AutoModelForVideoClassification, NDLightNetForImageClassification),
):
    auto.register(NDLightNetConfig, model, exist_ok=True)
