"""Beam search: against all targets, against the most likely word each time, ends, and padding."""

from itertools import product

import numpy as np
import pytest
import torch

from ndlightnet.inference import beam_search
from ndlightnet.models import Seq2Seq

BEGIN, END = 1, 0


def network(vocabulary: int = 4, **options) -> Seq2Seq:
    options = {"embed_dim": 16, "depth": 1, "decoder_depth": 2, "tpe_states": 4, **options}
    net = Seq2Seq(vocabulary, **options).double().eval()
    with torch.no_grad():  # words that differ in likelihood
        net.encoder.embed.weight.mul_(10)
    return net


@torch.no_grad()
def log_likelihood(net: Seq2Seq, source: torch.Tensor, words: list[int]) -> float:
    """Of words, the end among them, after the token that begins a text."""
    target = torch.tensor([[BEGIN, *words]])
    steps = net(source, target[:, :-1])[0].log_softmax(-1)
    return float(steps.gather(1, target[0, 1:, None]).sum())


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("mixer", ["LightNetAttention", "SoftmaxAttention"])
@torch.no_grad()
def test_with_every_beam_it_finds_the_best_of_all_targets(mixer, penalty):
    """Of two words and an end, three at most: eight beams hold every beginning, and each target has a forward pass."""
    texts = [[*words, *end] for n in range(4) for words in product((1, 2), repeat=n) for end in ([END], [])]
    possible = [text for text in texts if 0 < len(text) <= 3 and (text[-1] == END or len(text) == 3)]
    lengths = set()
    for _ in range(16):
        net, source = network(3, mixer=mixer), torch.randint(3, (1, 5))
        best = max(possible, key=lambda text: log_likelihood(net, source, text) / len(text) ** penalty)
        words = beam_search(net, source, 3, begin=BEGIN, end=END, beams=8, length_penalty=penalty)[0]
        assert words == [word for word in best if word != END]
        lengths.add(len(words))
    assert len(lengths) > 1


def test_one_beam_takes_the_most_likely_word_each_time():
    net, source = network(9), torch.randint(9, (5, 7))
    results = beam_search(net, source, 6, begin=BEGIN, end=END)
    for row, words in enumerate(results):
        target = [BEGIN]
        while len(target) <= 6:
            word = int(net(source[row : row + 1], torch.tensor([target]))[0, -1].argmax())
            if word == END:
                break
            target.append(word)
        assert words == target[1:]
    assert len({tuple(words) for words in results}) > 1


@pytest.mark.parametrize("beams", [1, 3])
def test_padding_and_neighbours_change_nothing(beams):
    net, lengths = network(9, mixer="LAVO", cross="LAVO"), (7, 3, 5)
    source = torch.randint(9, (3, 7))
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    together = beam_search(net, source, 8, begin=BEGIN, end=END, mask=mask, beams=beams)
    alone = [
        beam_search(net, source[i : i + 1, :n], 8, begin=BEGIN, end=END, beams=beams)[0] for i, n in enumerate(lengths)
    ]
    assert together == alone


class Table:
    """A network whose logits are drawn for each source and beginning."""

    def __init__(self, vocab_size: int, seed: int, certain: float = 0.0) -> None:
        self.vocab_size, self.seed, self.certain = vocab_size, seed, certain

    def logits(self, words: list[int]) -> torch.Tensor:
        numbers = np.random.default_rng([self.seed, *words])
        logits = torch.from_numpy(numbers.normal(size=self.vocab_size, scale=2))
        return logits.masked_fill(torch.from_numpy(numbers.random(self.vocab_size) < self.certain), -torch.inf)

    class State:
        def __init__(self, texts: list[list[int]]) -> None:
            self.texts = texts

        def rows(self, index: torch.Tensor) -> "Table.State":
            return Table.State([self.texts[row] for row in index.tolist()])

    def init_state(self, source: torch.Tensor, mask: torch.Tensor | None) -> "Table.State":
        return Table.State(source.tolist())

    def advance(self, words: torch.Tensor, state: "Table.State") -> tuple[torch.Tensor, "Table.State"]:
        texts = [[*text, int(word)] for text, word in zip(state.texts, words[:, 0], strict=True)]
        return torch.stack([self.logits(text) for text in texts])[:, None], Table.State(texts)


def searched(net: Table, number: int, length: int, beams: int, penalty: float) -> list[int]:
    """The search as its docstring says it, of one source, by lists of all continuations."""
    live, finished = [(0.0, [])], []
    for count in range(1, length + 1):
        longer = []
        for score, words in live:
            steps = (
                net.logits([number, BEGIN, *words]).log_softmax(-1).nan_to_num(-torch.inf, neginf=-torch.inf).tolist()
            )
            longer += [(score + step, [*words, word]) for word, step in enumerate(steps) if step > -torch.inf]
        longer = sorted(longer, key=lambda one: -one[0])[: 2 * beams]
        for score, words in longer[:beams]:
            if (words[-1] == END or count == length) and len(finished) < beams:
                finished.append((score / count**penalty, [word for word in words if word != END]))
        if len(finished) == beams:
            break
        live = [one for one in longer if one[1][-1] != END][:beams]
    return max(finished, key=lambda one: one[0])[1] if finished else []


@pytest.mark.parametrize("certain", [0.0, 0.4])
@pytest.mark.parametrize("beams", [1, 2, 3, 7])
def test_it_is_the_search_that_it_says(beams, certain):
    """Samples that end at different times, words of likelihood 0, more beams than words."""
    lengths = set()
    for seed in range(12):
        net, penalty = Table((3, 5, 9)[seed % 3], seed, certain), (0.0, 0.6, 2.0)[seed // 4]
        results = beam_search(
            net, torch.arange(4)[:, None], 6, begin=BEGIN, end=END, beams=beams, length_penalty=penalty
        )
        assert results == [searched(net, number, 6, beams, penalty) for number in range(4)]
        lengths |= {len(words) for words in results}
    assert len(lengths) > 3


def test_of_no_source_there_is_no_target():
    assert beam_search(network(9), torch.zeros(0, 3, dtype=torch.int64), 4, begin=BEGIN, end=END, beams=3) == []


@pytest.mark.parametrize("weight", [torch.nan, torch.inf])
def test_a_network_that_gives_no_numbers_is_named(weight):
    net = network(9)
    net.decoder.norm.weight.data.fill_(weight)
    with pytest.raises(ValueError, match="network: its logits of word 1 are not numbers"):
        beam_search(net, torch.zeros(2, 3, dtype=torch.int64), 4, begin=BEGIN, end=END, beams=2)


def test_more_beams_find_what_is_more_likely():
    """Of targets of one length, so that no penalty matters."""
    torch.manual_seed(1)
    net, source = network(12), torch.randint(12, (8, 6))
    net.encoder.embed.weight.data[END] = 0  # rarely the most likely
    sums = {}
    for beams in (1, 8):
        words = beam_search(net, source, 5, begin=BEGIN, end=END, beams=beams, length_penalty=0)
        sums[beams] = sum(
            log_likelihood(net, source[i : i + 1], one if len(one) == 5 else [*one, END]) for i, one in enumerate(words)
        )
    assert sums[8] > sums[1]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"length": 0}, "length=0: expected an int >= 1"),
        ({"beams": 0}, "beams=0: expected an int >= 1"),
        ({"length_penalty": float("nan")}, "length_penalty=nan: expected a number from -100 to 100"),
        ({"begin": -1}, "begin=-1: expected 0 to 3"),
        ({"end": 4}, "end=4: expected 0 to 3"),
    ],
)
def test_numbers_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        beam_search(network(), torch.zeros(1, 3, dtype=torch.int64), **{"length": 3, "begin": 0, "end": 0, **options})
