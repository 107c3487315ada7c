"""Beam search: the most likely target of a source, by an encoder and a decoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ndlightnet.layout.abstract import check_integers

PENALTY = 100  # most, of the length; of powers beyond it a float has none


@torch.no_grad()
def beam_search(
    network: Any,
    source: Tensor,
    length: int,
    *,
    begin: int,
    end: int,
    mask: Tensor | None = None,
    beams: int = 1,
    length_penalty: float = 1.0,
) -> list[list[int]]:
    """Return the target of each source that a search finds most likely, its words between `begin` and `end`.

    A beam is a beginning of a target; of all its continuations by a word, the `beams` most likely ones go on. One whose
    last word is `end`, while among the `beams` best, is finished. A sample is through when `beams` of its targets are
    finished, or after `length` words. The result has the highest log-likelihood / words ** length_penalty, the end
    being a word. beams=1 takes the most likely word each time.

    network: a Seq2Seq, in eval mode; it writes word by word, and keeps what its mixers keep. source: (batch, source
    length), int64. mask: bool of that shape, False = padding. length: most words of a target, `end` included.
    Raises ValueError for numbers out of range, and for logits that are not numbers.
    """
    vocabulary = network.vocab_size
    check_integers(1, length=length, beams=beams)
    if not -PENALTY <= length_penalty <= PENALTY:
        raise ValueError(f"length_penalty={length_penalty}: expected a number from {-PENALTY} to {PENALTY}")
    for name, value in (("begin", begin), ("end", end)):
        if not 0 <= value < vocabulary:
            raise ValueError(f"{name}={value}: expected 0 to {vocabulary - 1}, a word of the network's vocabulary")
    batch, device = len(source), source.device
    samples = torch.arange(batch, device=device)[:, None]
    state = network.init_state(source, mask).rows(samples.expand(-1, beams).flatten())
    # all beams of a sample are alike at first: one goes on
    scores = torch.full((batch, beams), -torch.inf, device=device)
    scores[:, 0] = 0.0
    targets = torch.full((batch, beams, 1), begin, dtype=torch.int64, device=device)
    # of each sample the targets that have ended, or have as many words as they may: score, and words without the ends
    finished: list[list[tuple[float, list[int]]]] = [[] for _ in range(batch)]
    for count in range(1, length + 1):
        logits, state = network.advance(targets[:, :, -1:].flatten(0, 1), state)
        if (logits.isnan() | logits.isposinf()).any():
            raise ValueError(f"network: its logits of word {count} are not numbers, or infinite")
        exact = logits[:, -1].to(torch.promote_types(logits.dtype, torch.float32))
        # after words of likelihood 0 there may be no likely word: all logits are -inf
        steps = exact.log_softmax(-1).nan_to_num(-torch.inf, neginf=-torch.inf).view(batch, beams, vocabulary)
        # twice as many as beams: of them at most `beams` end
        best, index = (scores[..., None] + steps).flatten(1).topk(min(2 * beams, beams * vocabulary))
        beam, word = index // vocabulary, index % vocabulary
        targets = torch.cat([targets.take_along_dim(beam[..., None], 1), word[..., None]], 2)
        ends = word == end
        last = count == length
        stops = ends | last
        for row, place in stops[:, :beams].nonzero().tolist():
            if len(finished[row]) < beams and best[row, place] > -torch.inf:
                words = targets[row, place, 1:].tolist()
                score = float(best[row, place]) / count**length_penalty
                finished[row].append((score, words[:-1] if ends[row, place] else words))
        if last or all(len(targets_of) == beams for targets_of in finished):
            break
        scores, kept = best.masked_fill(ends, -torch.inf).topk(beams)
        targets = targets.take_along_dim(kept[..., None], 1)
        state = state.rows((samples * beams + beam.gather(1, kept)).flatten())
    return [max(targets_of, key=lambda one: one[0])[1] if targets_of else [] for targets_of in finished]
