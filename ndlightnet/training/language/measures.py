"""Bits per byte: at every length of windows, by position in them, and of a stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves

SINGLE = 64  # bytes at the end that a stream gets one at a time
AGREE = 0.01  # bits per byte: bf16 rounds a logit of 16 by up to 1/16, and the mean by far less


def token_nll(predict: Callable[[Tensor], Tensor], windows: Tensor) -> Tensor:
    """Return the negative log-likelihood of every byte but the first, in nats: windows (batch,
    length + 1) uint8 -> (batch, length) float32. predict: bytes (batch, length) int64 -> logits
    (batch, length, 256)."""
    windows = windows.long()
    logits, targets = predict(windows[:, :-1]).float(), windows[:, 1:]
    each = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return each.view(targets.shape)


def octaves(length: int, first: int) -> list[tuple[int, int]]:
    """Split positions into (start, end): 0 to `first`, then ends doubled up to `length`."""
    ends = [0, min(first, length)]
    while ends[-1] < length:
        ends.append(min(2 * ends[-1], length))
    return list(pairwise(ends))


def means(bits: dict[int, Tensor], lengths: Sequence[int], trained: int) -> dict[str, Any]:
    """Return mean bits per byte. bits: for each measured length of windows, the bits of the same
    bytes, (bytes,). The means are over all bytes and by position in the longest windows, and for
    comparison of these bytes in windows of the training length: other positions are other text."""
    at = {n: float(bits[n].double().mean()) if n in bits else None for n in lengths}
    longest = max(bits, default=0)

    def by_position(length: int) -> dict[str, float]:
        each = bits[length].double().view(-1, longest)
        return {f"{a}-{b}": float(each[:, a:b].mean()) for a, b in octaves(longest, trained)}

    return {
        "bits_per_byte": at[trained],
        "bits_per_byte_at": at,
        "bits_per_byte_by_position": by_position(longest) if longest else {},
        "same_bytes_at_training_length": by_position(trained) if trained in bits else {},
    }


@torch.no_grad()
def file_bits(net: Any, text: Tensor, chunk: int) -> float:
    """Return the bits that `net` needs for all bytes of a text (bytes,) uint8 but the first: as a
    stream, in chunks, from one byte to the last. Where a mixer cannot stream, in windows of `chunk`
    bytes, each from an empty context."""
    try:
        predict = net.stream()
    except ValueError:
        predict = net
    parts = (text[None, start : start + chunk + 1] for start in range(0, len(text) - 1, chunk))
    return sum(float(token_nll(predict, part).double().sum()) for part in parts) / math.log(2)


@torch.no_grad()
def decode(net: Any, text: Tensor, chunk: int) -> dict[str, Any]:
    """Compare bits per byte of a stream of `net`, on text (bytes + 1,) uint8 in chunks of 1 byte,
    then of `chunk`, then of 1 again, with those of the network on the whole text at once.

    state_bytes and, on CUDA, memory_allocated: after the first byte and after the last.
    """
    try:
        stream = net.stream()
    except ValueError as error:  # raised for a mixer whose state would grow
        return {"not_measured": str(error)}
    count = len(text) - 1
    chunks, rest = divmod(max(0, count - 1 - SINGLE), chunk)
    sizes = [1, *[chunk] * chunks, *[rest] * (rest > 0)]
    sizes += [1] * (count - sum(sizes))
    streamed, start = 0.0, 0
    state: list[int] = []
    memory: list[int] = []
    for length in sizes:
        part = text[None, start : start + length + 1]
        streamed += float(token_nll(stream, part).sum()) / count / math.log(2)
        start += length
        if start in (1, count):
            leaves = [x for x in tree_leaves(stream.state) if isinstance(x, Tensor)]
            state.append(sum(x.numel() * x.element_size() for x in leaves))
            memory += [torch.cuda.memory_allocated(text.device)] if text.is_cuda else []
    found = {"bytes": count, "bits_per_byte": streamed, "state_bytes": state, "memory_allocated": memory or None}
    try:
        at_once = float(token_nll(net, text[None]).cpu().double().mean()) / math.log(2)
    except torch.OutOfMemoryError as error:
        return {**found, "bits_per_byte_at_once": None, "not_measured": str(error)}
    difference = abs(streamed - at_once)
    return {**found, "bits_per_byte_at_once": at_once, "difference": difference, "agrees": difference <= AGREE}
