"""Continuations of texts by a language model, token by token in constant memory."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

CHUNK = 4096  # tokens of the prompt that are read at once
GREEDY = 1e-6  # a lower temperature counts as 0: logits divided by it could be infinite in float32


def generate(
    network: Any,
    prompt: Tensor | Sequence[Any],
    length: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    stop: Sequence[Sequence[int]] = (),
    generator: torch.Generator | None = None,
) -> Iterator[Any]:
    """Yield up to `length` tokens that continue `prompt` (tokens,), each as soon as it is drawn: an
    int, or for prompts (batch, tokens) of one length a tensor (batch,) of a token for each.

    network: a causal NDLightNet with a vocabulary, in eval mode. Its `stream` reads the prompt and then one token at a
    time, so memory does not grow. Each token is drawn from softmax(logits / temperature) of the `top_k` most likely
    tokens (default: of all); a temperature below 1e-6 takes the most likely one. stop: sequences of tokens that end the
    text of a single prompt; they are not yielded, and tokens that may begin one wait until it is decided. generator:
    for draws that can be repeated; its device is the network's or the CPU.

    Raises ValueError for an empty prompt, a token outside the vocabulary, numbers out of range,
    `stop` with a batch, and a network that has no vocabulary or cannot stream.
    """
    vocabulary = getattr(network, "vocab_size", None)
    if vocabulary is None or not getattr(network, "per_token", False):
        raise ValueError("network: expected a language model, NDLightNet(1, vocab_size=...)")
    device = next(network.parameters()).device
    try:
        tokens = torch.as_tensor(prompt, dtype=torch.int64, device=device)
    except (TypeError, ValueError) as error:  # lists of different lengths, or of tensors
        raise ValueError(f"prompt: expected a tensor, or lists of one length ({error})") from error
    good = tokens.ndim in (1, 2) and tokens.numel() > 0
    if not good or not 0 <= tokens.min() <= tokens.max() < vocabulary:
        raise ValueError(
            f"prompt {tuple(tokens.shape)}: expected (tokens,) or (batch, tokens), one token or "
            f"more, each from 0 to {vocabulary - 1}"
        )
    if length < 0:
        raise ValueError(f"length={length}: expected 0 or more")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature}: expected 0 (the most likely token) or more")
    if top_k is not None and not 1 <= top_k <= vocabulary:
        raise ValueError(f"top_k={top_k}: expected 1 to {vocabulary}, or None")
    ends = [] if isinstance(stop, str) else [list(end) for end in stop]
    if isinstance(stop, str) or not all(ends):
        raise ValueError(f"stop={stop!r}: expected sequences of one token or more")
    if ends and tokens.ndim == 2:
        raise ValueError(f"stop={stop!r}: expected none for prompts {tuple(tokens.shape)}")
    batch = tokens if tokens.ndim == 2 else tokens[None]
    draw = partial(_draw, temperature=temperature, top_k=top_k, generator=generator)
    drawn = _continued(network, batch, length, draw)
    return drawn if tokens.ndim == 2 else _ended(map(int, drawn), ends)


def _continued(network: Any, tokens: Tensor, length: int, draw: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """Yield the `length` tokens (batch,) that continue `tokens` (batch, tokens)."""
    stream = network.stream(len(tokens))
    for chunk in tokens.split(CHUNK, 1):
        logits = stream(chunk)
    for remaining in range(length, 0, -1):
        drawn = draw(logits[:, -1])
        yield drawn
        if remaining > 1:
            logits = stream(drawn[:, None])


def _ended(tokens: Iterator[int], ends: list[list[int]]) -> Iterator[int]:
    """Yield tokens until one of `ends`, which is not yielded."""
    held = list[int]()
    for token in tokens:
        held.append(token)
        if lengths := [len(end) for end in ends if held[-len(end) :] == end]:
            yield from held[: -max(lengths)]
            return
        wait = max((_begun(held, end) for end in ends), default=0)
        yield from held[: len(held) - wait]
        held = held[len(held) - wait :]
    yield from held


def _begun(held: list[int], end: list[int]) -> int:
    """Return how many of the last tokens are the beginning of `end`."""
    longest = min(len(held), len(end) - 1)
    return next((n for n in range(longest, 0, -1) if held[-n:] == end[:n]), 0)


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Draw a token (batch,) for each row of logits (batch, vocabulary)."""
    if temperature < GREEDY:
        return logits.argmax(-1)
    logits = logits.float()
    if top_k is not None:  # by their places: of equal logits no more than top_k may stay
        unlikely = logits.argsort(descending=True, stable=True)[:, top_k:]
        logits = logits.scatter(-1, unlikely, -torch.inf)
    probs = (logits / temperature).softmax(-1)
    if generator is not None:
        probs = probs.to(generator.device)
    return torch.multinomial(probs, 1, generator=generator)[:, 0].to(logits.device)


def generate_text(
    network: Any,
    prompt: str,
    length: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    stop: str | Sequence[str] = (),
    generator: torch.Generator | None = None,
) -> Iterator[str]:
    """Yield the text with which a language model of bytes continues `prompt`, as `generate`, in characters that are
    complete: bytes of one that is not wait for the next ones. Bytes that are no UTF-8 become U+FFFD. length: in bytes.
    Raises ValueError as `generate`, and for a vocabulary of more than the 256 bytes."""
    vocabulary = getattr(network, "vocab_size", None)
    if vocabulary is not None and vocabulary > 256:
        raise ValueError(
            f"network: has vocab_size={vocabulary}, expected 256, the bytes of a text; `generate` "
            "yields tokens of any vocabulary"
        )
    ends = [end.encode() for end in ([stop] if isinstance(stop, str) else stop)]
    tokens = generate(
        network, list(prompt.encode()), length, temperature=temperature, top_k=top_k, stop=ends, generator=generator
    )
    return _decoded(tokens)


def _decoded(tokens: Iterator[int]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        if text := decoder.decode(bytes([token])):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text
