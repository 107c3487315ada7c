"""Continuations of texts by a language model, token by token in constant memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, takewhile, tee, zip_longest
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

CHUNK = 4096  # tokens of the prompt that are read at once
GREEDY = 1e-6  # a lower temperature counts as 0: logits divided by it could be infinite in float32
Item = TypeVar("Item")


def generate(
    network: Any,
    prompt: Tensor | Sequence[Any],
    length: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: Sequence[Sequence[int]] = (),
    generator: torch.Generator | None = None,
) -> Iterator[Any]:
    """Yield up to `length` tokens that continue `prompt` (tokens,), each as soon as it is drawn: an
    int, or for several prompts, of any lengths, an int64 tensor (batch,) of a token for each.

    network: a causal NDLightNet with a vocabulary, in eval mode. Its `stream` reads the prompts and then one token at a
    time, so memory does not grow. Each token is drawn from softmax(logits / temperature); a temperature below 1e-6
    takes the most likely one. top_k: of so many most likely tokens. top_p: of the fewest most likely ones whose
    probabilities sum to it (nucleus sampling). repetition_penalty: positive logits of tokens that the prompt or the
    continuation already has are divided by it, negative ones multiplied, as in CTRL. stop: sequences of tokens that end
    a text; they are not yielded, and tokens that may begin one wait until it is decided. Of several texts each ends by
    itself and is -1 from there on, until all have ended. generator: for draws that can be repeated; its device is the
    network's or the CPU.

    Raises ValueError for an empty prompt, a token outside the vocabulary, numbers out of range, and a network that has
    no vocabulary or cannot stream.
    """
    vocabulary = getattr(network, "vocab_size", None)
    if vocabulary is None or not getattr(network, "per_token", False):
        raise ValueError("network: expected a language model, NDLightNet(1, vocab_size=...)")
    prompts, single = _prompts(prompt, next(network.parameters()).device)
    for tokens in prompts:
        good = tokens.ndim == 1 and tokens.numel() > 0
        if not good or not 0 <= tokens.min() <= tokens.max() < vocabulary:
            raise ValueError(
                f"prompt {tuple(tokens.shape)}: expected (tokens,) or several of them, one token or "
                f"more, each from 0 to {vocabulary - 1}"
            )
    if length < 0:
        raise ValueError(f"length={length}: expected 0 or more")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature}: expected 0 (the most likely token) or more")
    if top_k is not None and not 1 <= top_k <= vocabulary:
        raise ValueError(f"top_k={top_k}: expected 1 to {vocabulary}, or None")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}: expected more than 0 and at most 1, or None")
    if not 0 < repetition_penalty < float("inf"):
        raise ValueError(f"repetition_penalty={repetition_penalty}: expected more than 0, 1 for none")
    ends = [] if isinstance(stop, str) else [list(end) for end in stop]
    if isinstance(stop, str) or not all(ends):
        raise ValueError(f"stop={stop!r}: expected sequences of one token or more")
    draw = partial(_draw, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
    drawn = _continued(network, prompts, length, draw, repetition_penalty)
    if single:
        return _ended(map(int, drawn), ends)
    if not ends:
        return drawn
    steps = zip_longest(*(_ended(row, ends) for row in _rows(drawn, len(prompts))), fillvalue=-1)
    return (torch.tensor(step, device=prompts[0].device) for step in steps)


def _prompts(prompt: Any, device: torch.device) -> tuple[list[Tensor], bool]:
    """Return the tokens of each prompt, and whether it is a single one."""
    nested = len(prompt) > 0 and (isinstance(prompt[0], Sequence) or getattr(prompt[0], "ndim", 0) > 0)
    try:
        rows = prompt if nested else [prompt]
        return [torch.as_tensor(row, dtype=torch.int64, device=device) for row in rows], not nested
    except (TypeError, ValueError) as error:
        raise ValueError(f"prompt: expected tokens, or lists of them ({error})") from error


def _continued(
    network: Any, prompts: list[Tensor], length: int, draw: Callable[[Tensor], Tensor], penalty: float
) -> Iterator[Tensor]:
    """Yield the `length` tokens (batch,) that continue the prompts."""
    batch = len(prompts)
    stream = network.stream(batch)

    @torch.no_grad()
    def read(tokens: Tensor, active: list[bool] | None = None) -> Tensor:
        """Return the logits (active rows, vocabulary) after tokens (batch, length)."""
        for chunk in tokens.split(CHUNK, 1):
            features = stream.features(chunk, active)
        return network.forward_head(features[:, -1:])[:, -1]

    if len({len(tokens) for tokens in prompts}) == 1:
        logits = read(torch.stack(prompts))
    else:  # one after the other, while the others pause
        rows = enumerate(prompts)
        each = [read(tokens.expand(batch, -1), [i == row for i in range(batch)]) for row, tokens in rows]
        logits = torch.cat(each)
    seen = None
    if penalty != 1:
        seen = logits.new_zeros(logits.shape, dtype=torch.bool)
        for row, tokens in enumerate(prompts):
            seen[row, tokens] = True
    for remaining in range(length, 0, -1):
        drawn = draw(logits if seen is None else _penalized(logits, seen, penalty))
        yield drawn
        if remaining > 1:
            if seen is not None:
                seen.scatter_(1, drawn[:, None], True)
            logits = read(drawn[:, None])


def _penalized(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def _rows(steps: Iterator[Tensor], batch: int) -> list[Iterator[int]]:
    """Return the tokens of each row of steps (batch,)."""
    copies = tee(map(Tensor.tolist, steps), batch)
    return [map(itemgetter(row), copy) for row, copy in enumerate(copies)]


def _ended(items: Iterable[Item], ends: Sequence[Sequence[Item]]) -> Iterator[Item]:
    """Yield tokens or characters until one of `ends`, which is not yielded."""
    held = list[Item]()
    for item in items:
        held.append(item)
        if lengths := [len(end) for end in ends if held[-len(end) :] == [*end]]:
            yield from held[: -max(lengths)]
            return
        wait = max((_begun(held, end) for end in ends), default=0)
        yield from held[: len(held) - wait]
        held = held[len(held) - wait :]
    yield from held


def _begun(held: list[Item], end: Sequence[Item]) -> int:
    """Return how many of the last items are the beginning of `end`."""
    longest = min(len(held), len(end) - 1)
    return next((n for n in range(longest, 0, -1) if held[-n:] == [*end[:n]]), 0)


def _draw(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """Draw a token (batch,) for each row of logits (batch, vocabulary)."""
    if temperature < GREEDY:
        return logits.argmax(-1)
    probs = _probabilities(logits.float() / temperature, top_k, top_p)
    if generator is not None:
        probs = probs.to(generator.device)
    return torch.multinomial(probs, 1, generator=generator)[:, 0].to(logits.device)


def _probabilities(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    if top_k is None and top_p is None:
        return logits.softmax(-1)
    ordered, order = logits.sort(descending=True, stable=True)  # by places: equal logits do not widen top_k
    if top_k is not None:
        ordered[:, top_k:] = -torch.inf
    probs = ordered.softmax(-1)
    if top_p is not None:  # those before a token that stays do not reach it
        probs = ordered.masked_fill(probs.cumsum(-1) - probs >= top_p, -torch.inf).softmax(-1)
    return torch.zeros_like(probs).scatter(-1, order, probs)


def generate_text(
    network: Any,
    prompt: str | Sequence[str],
    length: int,
    *,
    tokenizer: Any,
    stop: str | Sequence[str] = (),
    **options: Any,
) -> Iterator[Any]:
    """Yield the text with which a language model continues `prompt`, character by character as soon as one is
    complete; for several prompts lists of a character of each, "" where a text has ended.

    length: in tokens. tokenizer: a Tokenizer of ndlightnet.data.text.tokenizer, such as the one in the checkpoint. An
    empty prompt begins after its token `end`, which also ends a text. stop: texts that end it, wherever tokens begin;
    they are not yielded, and characters that may begin one wait. Bytes that are no UTF-8 become U+FFFD; tokens beyond
    the tokenizer's have no text. options: temperature, top_k, top_p, repetition_penalty and generator as in `generate`.
    Raises ValueError as `generate`.
    """
    ends = [stop] if isinstance(stop, str) else [*stop]
    if not all(ends):
        raise ValueError(f"stop={stop!r}: expected texts of one character or more")
    prompts = [row or [tokenizer.end] for row in tokenizer.encode([prompt] if isinstance(prompt, str) else prompt)]
    drawn = generate(network, prompts, length, **options)

    def text(row: Iterator[int], before: Sequence[int]) -> Iterator[str]:
        row = takewhile(lambda token: token != tokenizer.end, row)
        pieces = tokenizer.decode_stream((token for token in row if token < tokenizer.vocab_size), before)
        return _ended(chain.from_iterable(pieces), ends)

    texts = list(map(text, _rows(drawn, len(prompts)), prompts))
    return texts[0] if isinstance(prompt, str) else map(list, zip_longest(*texts, fillvalue=""))
