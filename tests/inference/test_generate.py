"""Texts of a language model: what is drawn, what ends them, and characters that are complete."""

import itertools

import pytest
import torch

from ndlightnet import NDLightNet, mixers
from ndlightnet.data.text.tokenizer import ByteTokenizer, train_tokenizer
from ndlightnet.inference import generate, generate_text
from ndlightnet.inference.generate import _probabilities

WORDS, BYTES = 11, ByteTokenizer()


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    made = NDLightNet(1, vocab_size=WORDS, embed_dim=16, depth=2, tpe_states=4, causal=True, mixer=mixers.text_mixer)
    with torch.no_grad():
        made.embed.weight.mul_(30)  # logits of order one
    return made.eval().double()


def logits_of(net, tokens):
    with torch.no_grad():
        return net(torch.tensor([tokens]))[0, -1]


def test_temperature_0_is_the_argmax_of_the_whole_forward(net):
    for prompt in ([3], [1, 2, 3, 4, 5]):
        tokens = list(prompt)
        for token in generate(net, prompt, 8, temperature=0):
            assert token == int(logits_of(net, tokens).argmax())
            tokens.append(token)
        assert len(tokens) == len(prompt) + 8


@pytest.mark.parametrize("prompts", [[[3], [9], [0]], [[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]], [[7, 7]]])
def test_a_batch_continues_each_prompt_as_alone(net, prompts):
    each = [list(generate(net, prompt, 6, temperature=0)) for prompt in prompts]
    for batch in (prompts, torch.tensor(prompts)):
        drawn = list(generate(net, batch, 6, temperature=0))
        assert torch.stack(drawn, 1).tolist() == each


@pytest.mark.parametrize("top_k", [2, None])
def test_the_draws_of_a_batch_have_the_probabilities_of_each_prompt(net, top_k):
    """Of the most likely tokens, in 2,000 rows of each of two prompts."""
    count, prompts = 2000, [[1, 2, 3], [4, 9, 9]]
    rng = torch.Generator().manual_seed(0)
    replayed = Replayed(net, prompts[0])
    replayed.logits = torch.stack([logits_of(net, prompt) for prompt in prompts])[:, None].repeat(count, 1, 1)
    drawn = next(generate(replayed, prompts * count, 1, temperature=2, top_k=top_k, generator=rng))
    for row, logits in enumerate(replayed.logits[:2, 0]):
        probs = (logits / 2).where(logits >= logits.topk(top_k or WORDS).values[-1], -torch.inf).softmax(-1)
        counts = torch.bincount(drawn[row::2], minlength=WORDS)
        deviation = (count * probs * (1 - probs)).sqrt()
        assert ((counts - count * probs).abs() <= 4.5 * deviation + 1).all()
    one = [next(generate(net, single, 1, generator=rng.manual_seed(1))) for single in ([1], [[1]])]
    assert one[0] == int(one[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1e-6, 1e-8, 1e-40, 5e-324])
def test_a_tiny_temperature_is_the_most_likely_token(net, dtype, temperature):
    replayed = Replayed(net, [1, 2, 3])
    replayed.logits = torch.arange(WORDS, dtype=dtype).flip(0).roll(4)[None, None] * 1000
    assert list(generate(replayed, [1], 20, temperature=temperature)) == [4] * 20
    assert list(generate(replayed, [1], 20, temperature=temperature, top_k=3)) == [4] * 20


class Replayed:
    """A network whose stream gives the logits after one prompt, without computing them again."""

    vocab_size, per_token = WORDS, True

    def __init__(self, net, prompt):
        self.net, self.logits = net, logits_of(net, prompt)[None, None]

    def parameters(self):
        return self.net.parameters()

    def stream(self, batch_size=1):
        return self

    def features(self, tokens, active=None):
        return self.logits

    def forward_head(self, features):
        return features


def test_top_k_restricts_seeded_draws_of_an_endless_text(net):
    def drawn(seed):
        rng = torch.Generator().manual_seed(seed)
        return list(itertools.islice(generate(net, [4], 10**9, temperature=5.0, top_k=3, generator=rng), 20))

    tokens = [4, *drawn(1)]
    assert tokens[1:] == drawn(1) != drawn(2)
    for n, token in enumerate(tokens[1:], 1):
        assert token in logits_of(net, tokens[:n]).topk(3).indices
    assert list(generate(net, [4], 9, top_k=1)) == list(generate(net, [4], 9, temperature=0))


def test_equal_logits_do_not_widen_top_k():
    class Flat(Replayed):
        def __init__(self):
            self.logits = torch.zeros(1, 1, WORDS)

        def parameters(self):
            return iter([self.logits])

    assert len(set(generate(Flat(), [0], 200, top_k=2))) == 2


class Recited(Replayed):
    """A network that recites texts of tokens, bytes if there is no vocabulary, whatever it reads."""

    def __init__(self, *rows, vocabulary=256):
        self.rows, self.vocab_size, self.reads = rows, vocabulary, 0

    def parameters(self):
        return iter([torch.zeros(1)])

    def stream(self, batch_size=1):
        self.reads = 0
        return self

    def features(self, tokens, active=None):
        self.reads += 1
        drawn = torch.tensor([row[self.reads - 1] for row in self.rows])
        return torch.nn.functional.one_hot(drawn, self.vocab_size)[:, None].float()


@pytest.mark.parametrize(
    "stop, expected",
    [
        ([], b"ababac!"),
        ([b"c"], b"ababa"),
        ([b"abac"], b"ab"),
        ([b"x", b"bac"], b"aba"),
        ([b"ac", b"abac"], b"ab"),
        ([b"abab"], b""),
        ([b"!?"], b"ababac!"),
    ],
)
def test_a_stop_sequence_ends_the_text(stop, expected):
    text = generate(Recited(b"ababac!"), [0], 7, temperature=0, stop=stop)
    assert bytes(text) == expected


def test_what_may_begin_a_stop_waits_no_longer_than_it_must():
    network = Recited(b"abcabd")
    arrivals = [(token, network.reads) for token in generate(network, [0], 6, temperature=0, stop=[b"abd"])]
    assert arrivals == [(ord("a"), 3), (ord("b"), 3), (ord("c"), 3)]


def test_each_text_of_a_batch_ends_by_itself():
    network = Recited(b"abcx!y", b"ab!xzz", b"bcdefg")
    steps = list(generate(network, [[0], [0], [0]], 6, temperature=0, stop=[b"x!", b"!"]))
    assert torch.stack(steps, 1).tolist() == [[*b"abc", -1, -1, -1], [*b"ab", -1, -1, -1, -1], [*b"bcdefg"]]
    network = Recited(b"a!bcde", b"ab!cde")
    assert torch.stack(list(generate(network, [[0], [0]], 6, temperature=0, stop=[b"!"])), 1).tolist() == [
        [ord("a"), -1],
        [*b"ab"],
    ]


def test_prompts_of_several_lengths_are_continued_as_each_alone(net, monkeypatch):
    prompts = [[3], [1, 2, 3, 4, 5], [7, 7]]
    each = [list(generate(net, prompt, 6, temperature=0, repetition_penalty=1.5)) for prompt in prompts]
    monkeypatch.setitem(generate.__globals__, "CHUNK", 2)
    for batch in (prompts, [torch.tensor(prompt) for prompt in prompts]):
        drawn = list(generate(net, batch, 6, temperature=0, repetition_penalty=1.5))
        assert torch.stack(drawn, 1).tolist() == each


def test_top_p_by_hand_and_as_in_transformers():
    logits = torch.tensor([[0.1, 0.5, 0.25, 0.15], [0.7, 0.1, 0.1, 0.1]]).log()
    network = Recited(b"", vocabulary=4)
    network.features = lambda tokens, active=None: logits.repeat(400, 1)[:, None]
    rng = torch.Generator().manual_seed(0)
    for top_p, kept in ((0.4, [{1}, {0}]), (0.6, [{1, 2}, {0}]), (0.8, [{1, 2, 3}, {0, 1}]), (1, [{*range(4)}] * 2)):
        drawn = next(generate(network, [[0]] * 800, 1, top_p=top_p, generator=rng))
        assert [{*drawn[row::2].tolist()} for row in range(2)] == kept
    shares = torch.bincount(next(generate(network, [[0]] * 800, 1, top_p=0.6, generator=rng))[::2]) / 400
    assert shares.tolist() == pytest.approx([0, 2 / 3, 1 / 3], abs=0.1)

    warpers = pytest.importorskip("transformers").generation.logits_process
    logits = 3 * torch.randn(50, 20, generator=rng)
    for top_k, top_p in ((None, 0.7), (5, 0.9), (None, 0.05)):
        expected = warpers.TemperatureLogitsWarper(0.7)(None, logits)
        expected = expected if top_k is None else warpers.TopKLogitsWarper(top_k)(None, expected)
        expected = warpers.TopPLogitsWarper(top_p)(None, expected).softmax(-1)
        torch.testing.assert_close(_probabilities(logits / 0.7, top_k, top_p), expected)


def test_the_repetition_penalty_by_hand_and_as_in_transformers():
    processor = pytest.importorskip("transformers").RepetitionPenaltyLogitsProcessor(3.0)
    network = Recited(b"", vocabulary=4)
    logits = torch.tensor([[4.0, 3.0, -1.0, -2.0], [-1.0, -1.2, -5.0, -4.0]])
    network.features = lambda tokens, active=None: logits[:, None]
    # 4 / 3 < 3 after token 0; then 3 / 3 < 4 / 3. -1 * 3 < -1.2, then -1.2 * 3 < -1 * 3
    steps = generate(network, [[0], [0]], 4, temperature=0, repetition_penalty=3)
    assert torch.stack(list(steps), 1).tolist() == [[1, 0, 0, 0], [1, 0, 0, 0]]
    prompts, texts = torch.tensor([[0, 2], [3, 1]]), []
    for step in generate(network, prompts, 4, temperature=0, repetition_penalty=3):
        before = torch.cat([prompts, *texts], 1)
        assert step.tolist() == processor(before, logits).argmax(-1).tolist()
        texts.append(step[:, None])


@pytest.fixture(scope="module")
def words():
    return train_tokenizer(["the end of the text, and the end again: ça va, 数学 and 数 again"] * 3, 290)


def test_texts_of_a_tokenizer_are_streamed_in_complete_characters(words):
    text = "the 数学 → 🙂 end"
    tokens = words.encode([text])[0]
    assert len(tokens) < len(text.encode())  # words, and characters of several tokens
    network = Recited([*tokens, words.end, 5], vocabulary=words.vocab_size + 3)
    arrivals = [(x, network.reads) for x in generate_text(network, "a", 99, tokenizer=words, temperature=0)]
    assert "".join(x for x, _ in arrivals) == text and all(len(x) == 1 and x != "\ufffd" for x, _ in arrivals)
    assert [reads for x, reads in arrivals if x == "→"] == [tokens.index(words.encode(["→"])[0][-1]) + 1]
    assert network.reads == len(tokens) + 1  # nothing is read after the token that ends it
    beyond = Recited([tokens[0], words.vocab_size, *tokens[1:]], vocabulary=words.vocab_size + 3)
    assert "".join(generate_text(beyond, "a", len(tokens) + 1, tokenizer=words, temperature=0)) == text


def test_a_stop_text_may_begin_inside_a_token(words):
    tokens = words.encode(["and the end again"])[0]
    pieces = [words.decode([token]) for token in tokens]
    assert " end" in pieces or " the" in pieces
    for stop, expected in (("nd ag", "and the e"), ("e e", "and th"), (["again", "x"], "and the end "), ("ee", None)):
        network = Recited(tokens, vocabulary=words.vocab_size)
        text = generate_text(network, "a", len(tokens), tokenizer=words, temperature=0, stop=stop)
        assert "".join(text) == ("and the end again" if expected is None else expected)
    with pytest.raises(ValueError, match=r"^stop=\['a', ''\]: expected texts of one character"):
        generate_text(network, "a", 3, tokenizer=words, stop=["a", ""])


def test_texts_of_a_batch_and_an_empty_prompt(words):
    texts = ["the 数学", "and the end again", ""]
    rows = [[*tokens, *[words.end] * 20] for tokens in words.encode(texts)]
    network = Recited(*rows, vocabulary=words.vocab_size)
    read = []
    features = network.features
    network.features = lambda tokens, active=None: read.append(tokens.tolist()) or features(tokens)
    steps = list(generate_text(network, ["", "", ""], 20, tokenizer=words, temperature=0))
    assert ["".join(row) for row in zip(*steps, strict=True)] == texts and len(steps) == 17
    assert read[0] == [[words.end]] * 3


def test_characters_are_complete():
    characters = list(generate_text(Recited("aé€😀b".encode()), "x", 11, tokenizer=BYTES, temperature=0))
    assert characters == ["a", "é", "€", "😀", "b"]
    shortened = list(generate_text(Recited("a€".encode()), "x", 3, tokenizer=BYTES, temperature=0))
    assert shortened == ["a", "�"]
    assert "".join(generate_text(Recited(b"a\xffb"), "x", 3, tokenizer=BYTES, temperature=0)) == "a�b"
    assert (
        "".join(generate_text(Recited("a€ende".encode()), "x", 8, tokenizer=BYTES, temperature=0, stop=["€e"])) == "a"
    )


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [11]}, "prompt"),
        ({"length": -1}, "length=-1"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": 12}, "top_k=12"),
        ({"stop": [[]]}, "stop="),
        ({"top_p": 0}, "top_p=0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
        ({"prompt": torch.ones(1, 2, 3)}, r"prompt \(2, 3\): expected \(tokens,\) or several"),
        ({"prompt": torch.ones(0, 2)}, r"prompt \(0"),
        ({"prompt": [[1], [11]]}, r"prompt \(1,\)"),
        ({"prompt": [[1], []]}, r"prompt \(0,\)"),
        ({"prompt": ["a"]}, "prompt: expected tokens, or lists of them"),
    ],
)
def test_wrong_arguments_are_named(net, changed, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        generate(net, **{"prompt": [1], "length": 3, **changed})


def test_networks_that_cannot_generate_are_named():
    image = NDLightNet(2, embed_dim=16, depth=1, patch_size=4)
    with pytest.raises(ValueError, match=r"^network: expected a language model"):
        generate(image, [1], 3)
    both = NDLightNet(1, vocab_size=5, embed_dim=16, depth=1)
    with pytest.raises(ValueError, match=r"^causal=False: expected a causal network"):
        next(generate(both, [1], 3))


def test_one_stop_is_one_and_not_its_letters():
    texts = generate_text(Recited(b"hello DEAR END now"), "x", 18, tokenizer=BYTES, temperature=0, stop="END")
    assert "".join(texts) == "hello DEAR "
    with pytest.raises(ValueError, match="stop='abc': expected sequences"):
        next(generate(Recited(b"abc"), [0], 3, stop="abc"))
