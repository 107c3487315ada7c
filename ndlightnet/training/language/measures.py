"""Bits per byte: at every length of windows, by position in them, and of a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def token_nll(predict: Callable[[Tensor], Tensor], windows: Tensor) -> Tensor:
    """Return the negative log-likelihood of every byte but the first, in nats: windows (batch, length + 1) uint8 ->
    (batch, length) float32. predict: bytes (batch, length) int64 -> logits (batch, length, 256)."""
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
    """Return the bits that `net` needs for all bytes of a text (bytes,) uint8 but the first: as a stream, in chunks,
    from one byte to the last. Where a mixer cannot stream, in windows of `chunk` bytes, each from an empty context."""
    try:
        predict = net.stream()
    except ValueError:
        predict = net
    pieces = (text[None, start : start + chunk + 1] for start in range(0, len(text) - 1, chunk))
    return sum(float(token_nll(predict, piece).double().sum()) for piece in pieces) / math.log(2)
