"""Bits per byte and perplexity: at every length of windows, by position in them, and of a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ndlightnet.data.text.tokenizer import ByteTokenizer, Tokenizer
from ndlightnet.inference.likelihood import rolling_log_likelihood, score_tokens
from ndlightnet.models import NDLightNet


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
    (batch, length) float32. net: a network, token numbers (batch, length) -> logits (batch, length, vocabulary); of an
    NDLightNet the logits of all tokens are never held at once."""
    inputs, targets = tokens[:, :-1].long(), tokens[:, 1:].long()
    if calls_head(net):
        features = net.forward_features(inputs)
        return -score_tokens(net, features.flatten(0, 1), targets.flatten())[0].view(targets.shape)
    nll = cross_entropy(net(inputs).flatten(0, 1).float(), targets.flatten(), reduction="none")
    return nll.view(targets.shape)


def calls_head(net: Any) -> TypeGuard[NDLightNet]:
    """Return whether the logits of a network are NDLightNet's: those of its head, not of a subclass's own forward."""
    return getattr(type(net), "forward", None) is NDLightNet.forward


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
        return -rolling_log_likelihood(net, text[1:], int(text[0]), chunk) / math.log(2)
    except ValueError:
        pieces = (text[None, start : start + chunk + 1] for start in range(0, len(text) - 1, chunk))
        return sum(float(token_nll(net, piece).double().sum()) for piece in pieces) / math.log(2)
