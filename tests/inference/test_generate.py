"""Texts of a language model: what is drawn, what ends them, and characters that are complete."""

import itertools

import pytest
import torch

from ndlightnet import NDLightNet, mixers
from ndlightnet.inference import generate, generate_text

WORDS = 11


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
        return lambda _: self.logits


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
    """A network that recites a text of bytes, whatever it reads."""

    vocab_size = 256

    def __init__(self, text: bytes):
        self.text = text

    def parameters(self):
        return iter([torch.zeros(1)])

    def stream(self, batch_size=1):
        rest = iter(self.text)
        return lambda _: torch.nn.functional.one_hot(torch.tensor([[next(rest)]]), 256).float()


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
    read = []
    stream = network.stream()
    network.stream = lambda batch_size: lambda x: (read.append(1), stream(x))[1]
    arrivals = [(token, len(read)) for token in generate(network, [0], 6, temperature=0, stop=[b"abd"])]
    assert arrivals == [(ord("a"), 3), (ord("b"), 3), (ord("c"), 3)]


def test_characters_are_complete():
    characters = list(generate_text(Recited("aé€😀b".encode()), "x", 11, temperature=0))
    assert characters == ["a", "é", "€", "😀", "b"]
    shortened = list(generate_text(Recited("a€".encode()), "x", 3, temperature=0))
    assert shortened == ["a", "�"]
    assert "".join(generate_text(Recited(b"a\xffb"), "x", 3, temperature=0)) == "a�b"
    assert "".join(generate_text(Recited("a€ende".encode()), "x", 8, temperature=0, stop=["€e"])) == "a"


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
        ({"prompt": torch.ones(1, 2, 3)}, r"prompt \(1, 2, 3\): expected \(tokens,\) or \(batch"),
        ({"prompt": torch.ones(0, 2)}, r"prompt \(0"),
        ({"prompt": [[1], [11]]}, r"prompt \(2"),
        ({"prompt": [[1], [1, 2]]}, "prompt: expected a tensor, or lists of one length"),
        ({"prompt": [[1]], "stop": [[2]]}, r"stop=\[\[2\]\]: expected none for prompts \(1, 1\)"),
    ],
)
def test_wrong_arguments_are_named(net, changed, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        generate(net, **{"prompt": [1], "length": 3, **changed})


def test_networks_that_cannot_generate_are_named():
    network = Recited(b"")
    network.vocab_size = 300
    with pytest.raises(ValueError, match=r"^network: has vocab_size=300, expected 256"):
        generate_text(network, "x", 3)
    image = NDLightNet(2, embed_dim=16, depth=1, patch_size=4)
    with pytest.raises(ValueError, match=r"^network: expected a language model"):
        generate(image, [1], 3)
    both = NDLightNet(1, vocab_size=5, embed_dim=16, depth=1)
    with pytest.raises(ValueError, match=r"^causal=False: expected a causal network"):
        next(generate(both, [1], 3))


def test_one_stop_is_one_and_not_its_letters():
    texts = generate_text(Recited(b"hello DEAR END now"), "x", 18, temperature=0, stop="END")
    assert "".join(texts) == "hello DEAR "
    with pytest.raises(ValueError, match="stop='abc': expected sequences"):
        next(generate(Recited(b"abc"), [0], 3, stop="abc"))
