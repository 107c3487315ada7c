"""Log-likelihoods of texts by a language model: of continuations, in packs, and of documents of any length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

LOGITS = 2**26  # that are held at once
Pair = tuple[Sequence[int], Sequence[int]]


def in_bfloat16(network: Any) -> torch.autocast:
    """Return the context in which a network computes: on a GPU bfloat16 where its precision suffices."""
    device = next(network.parameters()).device.type
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


def encode_pair(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a context and of its continuation, by the rule of the LM Evaluation Harness: white space at
    the end of the context is moved to the continuation, whose tokens are those of both texts after as many as the
    context has. An empty context is the token that ends a document, after which texts begin."""
    end = len(context.rstrip())
    context, continuation = context[:end], context[end:] + continuation
    if not context:
        return [tokenizer.end], tokenizer.encode([continuation])[0]
    alone, both = tokenizer.encode([context, context + continuation])
    return alone, both[len(alone) :]


@torch.no_grad()
def log_likelihoods(
    network: Any, pairs: Sequence[Pair], budget: int = 2**14, report: Callable[[int], object] = lambda _: None
) -> list[tuple[float, bool]]:
    """Return for each pair (tokens of a context, tokens of a continuation), of any lengths, the sum of the
    log-probabilities of the continuation after the context, and whether each of its tokens is the most likely one.

    network: a causal NDLightNet with a vocabulary, in eval mode. Pairs of similar lengths are packed end to end,
    without padding, up to `budget` tokens; a longer one is alone. Logits are those of the continuation only, in the
    precision of the network's weights, also under autocast; their log-softmax is in float32 or more. report: is called
    with the number of pairs of each pack.
    Raises ValueError for an empty context, for tokens outside the vocabulary, and for other networks.
    """
    device = _device(network)
    for number, (context, continuation) in enumerate(pairs):
        tokens = [*context, *continuation]
        if not context or not 0 <= min(tokens) <= max(tokens) < network.vocab_size:
            expected = f"one token of context or more, each from 0 to {network.vocab_size - 1}"
            raise ValueError(f"pairs[{number}], {len(context)} and {len(continuation)} tokens: expected {expected}")
    results = [(0.0, True)] * len(pairs)
    lengths = [len(context) + len(continuation) - 1 for context, continuation in pairs]  # the last one is not read
    for numbers in _packs(lengths, budget):
        joined = torch.tensor([token for i in numbers for part in pairs[i] for token in part], device=device)
        rows = joined.split([lengths[i] + 1 for i in numbers])  # one copy to the device, of all
        packed = network.forward_features(network.pack([row[:-1] for row in rows]))
        counts = [len(pairs[i][1]) for i in numbers]
        features = torch.cat([x[len(x) - n :] for x, n in zip(packed.unpack(), counts, strict=True)])
        targets = torch.cat([row[len(row) - n :] for row, n in zip(rows, counts, strict=True)])
        scores, likeliest = (x.cpu().split(counts) for x in score_tokens(network, features, targets))
        for i, score, most in zip(numbers, scores, likeliest, strict=True):
            results[i] = float(score.double().sum()), bool(most.all())
        report(len(numbers))
    return results


def _packs(lengths: Sequence[int], budget: int) -> Iterable[list[int]]:
    """Yield the numbers of rows, by length, whose lengths sum to no more than `budget`, or of one."""
    pack, total = list[int](), 0
    for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):  # a lack of memory shows at once
        if pack and total + lengths[i] > budget:
            yield pack
            pack, total = [], 0
        pack.append(i)
        total += lengths[i]
    if pack:
        yield pack


@torch.no_grad()
def rolling_log_likelihood(network: Any, tokens: Sequence[int] | Tensor, prefix: int, chunk: int = 4096) -> float:
    """Return the log-likelihood of a document (tokens,) of any length after the token `prefix`, each token with all
    that come before it as context: the network reads a stream, `chunk` tokens at a time, in constant memory.

    network: as in `log_likelihoods`. Raises ValueError if it has a mixer that cannot stream.
    """
    device = _device(network)
    targets = torch.as_tensor(tokens, dtype=torch.int64)
    try:
        stream = network.stream(cuda_graph=False)
    except ValueError as error:
        raise ValueError(f"the network cannot read a document as a stream ({error})") from error
    inputs = torch.cat([torch.tensor([prefix]), targets.cpu()[:-1]])
    total = 0.0
    for x, y in zip(inputs.split(chunk), targets.split(chunk), strict=True):
        features = stream.features(x[None].to(device))[0]
        total += float(score_tokens(network, features, y.to(device))[0].double().sum())
    return total


def _device(network: Any) -> torch.device:
    if not (getattr(network, "vocab_size", None) and network.per_token and network.causal):
        raise ValueError("network: expected a causal language model, NDLightNet(1, vocab_size=..., causal=True)")
    device: torch.device = next(network.parameters()).device
    return device


def score_tokens(network: Any, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the tokens `targets` (tokens,) int64 by features (tokens, channels), in float32
    or more, and whether they are the most likely ones, bool. The logits of few tokens are held at once."""
    size = max(1, LOGITS // network.vocab_size)
    scores, likeliest = [], []
    with torch.autocast(features.device.type, enabled=False):
        features = features.to(network.norm.weight.dtype)
        for x, y in zip(features.split(size), targets.split(size), strict=True):
            logits = network.forward_head(x[None])[0]
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            scores.append(logits.gather(-1, y[:, None])[:, 0] - logits.logsumexp(-1))
            likeliest.append(logits.argmax(-1) == y)
    return torch.cat(scores), torch.cat(likeliest)
