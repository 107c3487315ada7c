"""Seq2Seq: against its formula written out, padding, who sees whom, word by word, files, refusals."""

import pytest
import torch
from torch import nn
from torch.autograd import grad
from torch.utils._pytree import tree_leaves

from ndlightnet.models import Seq2Seq
from ndlightnet.nn import mixers
from ndlightnet.nn.mixers.base import reads_context

WORDS = 31
SMALL = {"embed_dim": 64, "depth": 2, "decoder_depth": 2, "tpe_states": 8}
# the encoder's mixer, the decoder's, and how it reads: not causal, causal, cross
PATTERNS = {
    "LightNet": ("LightNetAttention", None, None),
    "softmax": ("SoftmaxAttention", None, {"SoftmaxAttention": {"rotary": False}}),
    "LAVO": ("LAVO", None, {"LAVO": {"window": None}}),
    "linear": ("LinearAttention", None, "LinearAttention"),
    "cosFormer": ({"CosformerAttention": {"reach": 40}}, "CosformerAttention", {"CosformerAttention": {"reach": 40}}),
    "ABC": ("ABCAttention", None, "ABCAttention"),
    "DeltaNet": ("DeltaNet", None, "DeltaNet"),
    "each its own": ("S5", ["text_mixer", "SoftmaxAttention"], ["LightNetAttention", "LAVO"]),
}
each_pattern = pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
LENGTHS = (12, 7, 5)


def network(pattern=PATTERNS["LightNet"], **options) -> Seq2Seq:
    mixer, decoder_mixer, cross = pattern
    return Seq2Seq(WORDS, mixer=mixer, decoder_mixer=decoder_mixer, cross=cross, **SMALL | options).double().eval()


def texts():
    mask = torch.arange(12) < torch.tensor(LENGTHS)[:, None]
    return torch.randint(WORDS, (3, 12)), torch.randint(WORDS, (3, 9)), mask


def test_forward_is_its_formula(close):
    net, (source, target, mask) = network(), texts()
    context = net.encoder.forward_features(source, mask)
    x = net.encoder.embed(target)
    x = net.decoder.tpe(x)
    for block in net.decoder.blocks:
        x = x + block.mixer(block.norm1(x), causal=True)
        x = x + block.cross(block.norm_cross(x), context=context, mask=mask)
        x = x + block.mlp(block.norm2(x))
    close(net(source, target, mask), net.decoder.norm(x) @ net.encoder.embed.weight.T, 1e-12)


@each_pattern
def test_padding_changes_nothing(pattern, close):
    """Of the source in the middle of a batch, and behind a target: values, and gradients of what is not padding."""
    net, (source, target, mask) = network(pattern), texts()
    together = net(source, target, mask)
    longer = net(source, torch.cat([target, target[:, :4]], 1), mask)
    alone = torch.cat([net(source[i : i + 1, :n], target[i : i + 1]) for i, n in enumerate(LENGTHS)])
    close(together, alone, 1e-9)
    close(longer[:, :9], alone, 1e-9)
    weights = [p for p in net.parameters() if p.requires_grad]
    pull = torch.randn_like(alone)
    for a, b in zip(*(grad(y, weights, pull, allow_unused=True) for y in (together, alone)), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            close(a, b, 1e-8)


@each_pattern
def test_word_by_word(pattern, close):
    """In pieces of several sizes, and after rows have changed places, as beams do."""
    net, (source, target, mask) = network(pattern), texts()
    expected = net(source, target, mask)
    state, pieces = net.init_state(source, mask), []
    for begin, end in ((0, 1), (1, 2), (2, 6)):
        logits, state = net.advance(target[:, begin:end], state)
        pieces.append(logits)
    close(torch.cat(pieces, 1), expected[:, :6], 1e-9)
    order = torch.tensor([2, 0, 0, 1])
    logits, _ = net.advance(target[order, 6:], state.rows(order))
    close(logits, expected[order, 6:], 1e-9)


CROSS = [name for name in mixers.__all__ if isinstance(kind := getattr(mixers, name), type) and reads_context(kind)]


@pytest.mark.parametrize("name", CROSS)
def test_word_by_word_by_every_mixer_with_a_cross_form(name, close):
    options = {"reach": 40} if name == "CosformerAttention" else {}
    net, (source, target, mask) = network((PATTERNS["LightNet"][0], None, {name: options})), texts()
    state, pieces = net.init_state(source, mask), []
    for words in target.split(1, 1):
        logits, state = net.advance(words, state)
        pieces.append(logits)
    expected = net(source, target, mask)
    close(torch.cat(pieces, 1), expected, 1e-9)
    expected.sum().backward()
    learnt = [p for p in net.parameters() if p.requires_grad]
    assert all(p.grad is not None for p in learnt)  # DDP would wait for others


@pytest.mark.parametrize("cross", [None, "LAVO"])
def test_a_state_does_not_grow(cross):
    """Neither with the source nor with the target."""
    net, sizes = network(("LightNetAttention", None, cross)), set()
    for source, target in ((3, 1), (50, 1), (3, 40)):
        state = net.init_state(torch.zeros(1, source, dtype=torch.int64))
        _, state = net.advance(torch.zeros(1, target, dtype=torch.int64), state)
        sizes.add(sum(x.numel() for x in tree_leaves(state) if isinstance(x, torch.Tensor)))
    assert len(sizes) == 1


def test_who_sees_whom():
    net, (source, target, mask) = network(), texts()
    read = net.encode(source, mask).detach().requires_grad_()
    words = net.encoder.embed(target).detach().requires_grad_()
    y = net.decoder(words, read, mask)
    for step in (0, 4, 8):
        by_word, by_source = grad(y[1, step].square().sum(), (words, read), retain_graph=True)
        assert by_word[1, : step + 1].any(-1).all() and not by_word[1, step + 1 :].any()
        assert by_source[1, :7].any(-1).all() and not by_source[1, 7:].any()
        assert not by_word[[0, 2]].any() and not by_source[[0, 2]].any()


def test_saved_and_loaded(tmp_path):
    net, (source, target, mask) = network(PATTERNS["each its own"]), texts()
    net.save_pretrained(tmp_path)
    again = Seq2Seq.from_pretrained(tmp_path)
    assert torch.equal(again(source, target, mask), net(source, target, mask))
    assert again.config == net.config and again.config["decoder_mixer"]


@each_pattern
def test_a_network_that_is_initialised_again_is_a_new_one(pattern):
    mixer, decoder_mixer, cross = pattern
    options = {"mixer": mixer, "decoder_mixer": decoder_mixer, "cross": cross, **SMALL}
    torch.manual_seed(1)
    new = Seq2Seq(WORDS, **options)
    torch.manual_seed(1)
    again = Seq2Seq(WORDS, **options, device="meta").to_empty(device="cpu")
    again.reset_parameters()
    for (name, x), y in zip(new.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(x, y), name


def test_every_branch_and_both_embeddings_are_dropped():
    """What dropout is given: embedded tokens, and of the encoder's blocks two branches, of the decoder's three."""
    net, (source, target, mask) = network(dropout=0.5).train(), texts()
    drops = [module for module in net.modules() if isinstance(module, nn.Dropout) and module.p == 0.5]
    lengths = []
    for module in drops:
        module.register_forward_hook(lambda *args: lengths.append(args[-1].shape[1]))
    net(source, target, mask)
    assert sorted(lengths) == [9] * (1 + 3 * 2) + [12] * (1 + 2 * 2)


def test_without_position_code_after_the_embedding(close):
    net, (source, target, _) = network(tpe=False), texts()
    assert net.encoder.tpe is None and net.decoder.tpe is None
    state = net.init_state(source)
    assert state.tpe is None
    close(net.advance(target, state)[0], net(source, target), 1e-9)


@pytest.mark.parametrize("rows, length, message", [(3, 2, r"words \(3, 2\)"), (2, 0, "expected one word or more")])
def test_words_that_do_not_fit_a_state(rows, length, message):
    net = network()
    state = net.init_state(torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=message):
        net.advance(torch.zeros(rows, length, dtype=torch.int64), state)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"decoder_depth": 0}, "decoder_depth=0: expected an int >= 1"),
        ({"cross": "S5"}, "cross: S5 has no cross form, expected a mixer with one"),
        ({"cross": "CosformerAttention"}, "reach=None depends on the length of the target"),
        ({"mixer": ["LightNetAttention", "LAVO"]}, "decoder_mixer=None: expected one beside a list"),
        ({"cross": ["LAVO"]}, "cross: a list of 1, expected one for each of 2 layers"),
        ({"decoder_mixer": "Lavo"}, "decoder_mixer='Lavo'.*did you mean"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        Seq2Seq(WORDS, **SMALL | options)


@pytest.mark.parametrize(
    "source, target, message",
    [
        (
            torch.zeros(2, 3),
            torch.zeros(2, 3, dtype=torch.int64),
            r"input \(2, 3\) torch.float32: expected token numbers",
        ),
        (
            torch.zeros(2, 3, dtype=torch.int64),
            torch.zeros(2, 3),
            r"target \(2, 3\) torch.float32: expected words \(2, length\)",
        ),
        (
            torch.zeros(2, 3, dtype=torch.int64),
            torch.zeros(3, 3, dtype=torch.int64),
            r"target \(3, 3\) torch.int64: expected words \(2, length\), int64",
        ),
        (torch.zeros(2, 3, dtype=torch.int64), torch.full((2, 3), WORDS), "numbers from 31 to 31: expected 0 to 30"),
    ],
)
def test_bad_input(source, target, message):
    with pytest.raises(ValueError, match=message):
        network()(source, target)
