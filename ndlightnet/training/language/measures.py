"""Bits per byte and perplexity: at every length of windows, by position in them, and of a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ndlightnet.data.text.tokenizer import ByteTokenizer, Tokenizer
from ndlightnet.models import NDLightNet
from ndlightnet.models.stream import Stream
from ndlightnet.ops.linear_cross_entropy import LEAST, MOST


class Extent(NamedTuple):
    """What a text has of each: bytes in UTF-8 and, by WikiText's rule, words and ends of lines."""

    tokens: int
    bytes: int
    words: int


def extent(tokens: Tensor, tokenizer: Tokenizer) -> Extent:
    """Return the extent of tokens (tokens,); ends of documents have no bytes and are no words, but
    among bytes, where 0 may be one of a file."""
    numbers = tokens.tolist()
    text = tokenizer.decode(number for number in numbers if number != tokenizer.end)
    count = len(numbers) if isinstance(tokenizer, ByteTokenizer) else len(text.encode())
    return Extent(len(numbers), count, len(text.split()) + text.count("\n"))


def token_nll(net: Any, tokens: Tensor) -> Tensor:
    """Return the negative log-likelihood of every token but the first, in nats: (batch, length + 1) integers ->
    (batch, length) float32. net: a network, token numbers (batch, length) -> logits (batch, length, vocabulary), or its
    stream; of an NDLightNet the logits of all tokens are never held at once."""
    inputs, targets = tokens[:, :-1].long(), tokens[:, 1:].long()
    rows, head = _features(net, inputs)
    labels, size = targets.flatten(), max(LEAST, MOST // 2**14)
    pieces = zip(rows.flatten(0, 1).split(size), labels.split(size), strict=True)
    return torch.cat([cross_entropy(head(x).float(), y, reduction="none") for x, y in pieces]).view(targets.shape)


def _features(net: Any, inputs: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return what a head maps to logits, (batch, length, channels), and this head."""
    if isinstance(net, Stream):
        return net.model.forward_head(net.features(inputs), pre_logits=True), net.model.head
    if getattr(type(net), "forward", None) is NDLightNet.forward:  # a subclass may have its own
        return net.forward_head(net.forward_features(inputs), pre_logits=True), net.head
    return net(inputs), lambda logits: logits


def octaves(length: int, first: int) -> list[tuple[int, int]]:
    """Split positions into (start, end): 0 to `first`, then ends doubled up to `length`."""
    ends = [0, min(first, length)]
    while ends[-1] < length:
        ends.append(min(2 * ends[-1], length))
    return list(pairwise(ends))


def means(bits: dict[int, Tensor], lengths: Sequence[int], trained: int, text: Extent) -> dict[str, Any]:
    """Return mean bits per byte and perplexities. bits: for each measured length of windows, the bits of the same
    tokens, (tokens,). The means are over all of them and by position in the longest windows, and for comparison of
    these tokens in windows of the training length: other positions are other text."""
    mean = {n: float(bits[n].double().mean()) for n in bits}
    per_byte, per_word = text.tokens / max(1, text.bytes), text.tokens / max(1, text.words)
    longest = max(bits, default=0)

    def by_position(length: int) -> dict[str, float]:
        each = bits[length].double().view(-1, longest) * per_byte
        return {f"{a}-{b}": float(each[:, a:b].mean()) for a, b in octaves(longest, trained)}

    at = {n: mean[n] * per_byte if n in bits else None for n in lengths}
    return {
        "bits_per_byte": at[trained],
        "bits_per_byte_at": at,
        "perplexity_at": {n: power_of_2(mean[n]) if n in bits else None for n in lengths},
        "word_perplexity_at": {n: power_of_2(mean[n] * per_word) if n in bits else None for n in lengths},
        "bits_per_byte_by_position": by_position(longest) if longest else {},
        "same_bytes_at_training_length": by_position(trained) if trained in bits else {},
    }


def power_of_2(bits: float) -> float:
    """Return the perplexity of so many bits; infinite where no float can hold it."""
    return 2.0**bits if bits < 1024 else math.inf


@torch.no_grad()
def file_bits(net: Any, text: Tensor, chunk: int) -> float:
    """Return the bits that `net` needs for all tokens of a text (tokens,) but the first: as a stream, in chunks, from
    one token to the last. Where a mixer cannot stream, in windows of `chunk` tokens, each from an empty context."""
    try:
        predict = net.stream()
    except ValueError:
        predict = net
    pieces = (text[None, start : start + chunk + 1] for start in range(0, len(text) - 1, chunk))
    return sum(float(token_nll(predict, piece).double().sum()) for piece in pieces) / math.log(2)
