"""Log-likelihoods: packs and streams against the plain forward, and how a text is split."""

import random

import pytest
import torch

from ndlightnet import NDLightNet, SoftmaxAttention, mixers
from ndlightnet.data.text.tokenizer import ByteTokenizer, train_tokenizer
from ndlightnet.inference.likelihood import encode_pair, log_likelihoods, rolling_log_likelihood

WORDS = 50


def language_model(**arguments):
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "embed_dim": 16, "depth": 1, "tpe_states": 4, "causal": True}
    net = NDLightNet(1, **{**sizes, "mixer": mixers.text_mixer, **arguments})
    with torch.no_grad():
        net.embed.weight.mul_(30)  # logits of order one
    return net.eval()


@pytest.fixture(scope="module")
def net():
    return language_model(depth=2).double()


@pytest.fixture(scope="module")
def pairs():
    """Lengths 1 to 40, and contexts of one token up to all."""
    rng = random.Random(0)
    tokens = [[rng.randrange(WORDS) for _ in range(n)] for n in range(1, 41)]
    cuts = [rng.randint(1, len(row)) for row in tokens]
    return [(row[:cut], row[cut:]) for row, cut in zip(tokens, cuts, strict=True)]


@torch.no_grad()
def alone(net, context, continuation):
    """By the plain forward."""
    logits = net(torch.tensor([[*context, *continuation]]))[0, len(context) - 1 : -1].log_softmax(-1)
    tokens = torch.tensor(continuation, dtype=torch.int64)
    return float(logits.gather(1, tokens[:, None]).sum()), bool((logits.argmax(-1) == tokens).all())


@pytest.mark.parametrize("budget", [1, 64, 10**6])
def test_packs_are_each_pair_alone(net, pairs, budget):
    expected = [alone(net, *pair) for pair in pairs]
    for change in (lambda x: x, lambda x: x[::-1]):
        sizes = []
        measured = log_likelihoods(net, change(pairs), budget, sizes.append)
        for (score, greedy), (by_hand, likeliest) in zip(measured, change(expected), strict=True):
            assert score == pytest.approx(by_hand, abs=1e-10) and greedy == likeliest
        assert sum(sizes) == 40
        assert {1: 39, 64: 17, 10**6: 1}[budget] == len(sizes)  # there is nothing to read of a single token


def test_the_greedy_continuation_and_logits_in_pieces(net, monkeypatch):
    tokens = [1, 2, 3]
    with torch.no_grad():
        for _ in range(9):
            tokens.append(int(net(torch.tensor([tokens]))[0, -1].argmax()))
    spoilt = [*tokens[:-1], (tokens[-1] + 1) % WORDS]
    pairs = [(tokens[:3], tokens[3:]), (tokens[:3], spoilt[3:]), (tokens, [])]
    measured = log_likelihoods(net, pairs)
    assert [greedy for _, greedy in measured] == [True, False, True] and measured[2][0] == 0
    monkeypatch.setattr("ndlightnet.inference.likelihood.LOGITS", 2 * WORDS)
    assert [score for score, _ in log_likelihoods(net, pairs)] == pytest.approx([score for score, _ in measured])


def test_a_document_of_any_length_is_one_stream(net):
    """100,000 tokens in pieces of two sizes; a shorter document as the plain forward."""
    document = torch.randint(WORDS, (100_000,), generator=torch.Generator().manual_seed(0))
    small = language_model(mixer="LightNetAttention", tpe=False).double()
    scores = [rolling_log_likelihood(small, document, 7, chunk) for chunk in (4096, 99_999)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-11)
    short = document[:300]
    expected, _ = alone(net, [7], short.tolist())
    for chunk in (1, 37, 299, 300, 4096):
        assert rolling_log_likelihood(net, short.tolist(), 7, chunk) == pytest.approx(expected, abs=1e-9)
    assert rolling_log_likelihood(net, [], 7) == 0


def test_logits_have_the_precision_of_the_weights_under_autocast():
    net, pairs = language_model(), [([1, 2], [3, 4]), ([5], [6])]
    dtypes = []
    net.head.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        scores = log_likelihoods(net, pairs)
    assert dtypes == [torch.float32]
    assert [x for x, _ in scores] == pytest.approx([x for x, _ in log_likelihoods(net, pairs)], rel=0.02)


def test_what_cannot_be_measured_is_one_line(net):
    for pair in (([], [1]), ([1], [WORDS]), ([-1], [1])):
        with pytest.raises(ValueError, match=r"^pairs\[1\], \d and 1 tokens: expected one token of context or more"):
            log_likelihoods(net, [([1], [2]), pair])
    for wrong in (
        language_model(causal=False, mixer="LightNetAttention"),
        NDLightNet(2, embed_dim=16, depth=1, patch_size=4),
    ):
        for call in (
            lambda wrong=wrong: log_likelihoods(wrong, []),
            lambda wrong=wrong: rolling_log_likelihood(wrong, [1], 0),
        ):
            with pytest.raises(ValueError, match=r"^network: expected a causal language model"):
                call()
    softmax = language_model(mixer=SoftmaxAttention)
    with pytest.raises(ValueError, match=r"^the network cannot read a document as a stream \("):
        rolling_log_likelihood(softmax, [1, 2], 0)


AWKWARD = [
    ("The cat", " sat"),
    ("The cat ", "sat"),
    ("The cat \n\n", " sat  "),
    ("Frage: ça", "va"),
    ("数", "学 and 数学"),
    ("an", "d the"),
    ("the\u00a0", "end"),
    ("the", ""),
    ("the end", "\u0301 again"),
    (" the", " "),
]


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_pairs_are_split_as_by_the_harness(kind):
    api = pytest.importorskip("lm_eval.api.model")
    tokenizer = (
        ByteTokenizer() if kind == "bytes" else train_tokenizer(["The cat sat and the end, ça va 数学"] * 3, 300)
    )
    harness = type("", (), {"backend": "causal", "tok_encode": lambda self, text: tokenizer.encode([text])[0]})()
    for context, continuation in AWKWARD:
        ours = encode_pair(tokenizer, context, continuation)
        assert ours == api.TemplateLM._encode_pair(harness, context, continuation)
    assert encode_pair(tokenizer, "", "the end") == ([tokenizer.end], tokenizer.encode(["the end"])[0])
    assert encode_pair(tokenizer, " \n", "the end") == ([tokenizer.end], tokenizer.encode([" \nthe end"])[0])
