"""The mixers of a language model: which layer has which, and its stream, causality and packs."""

from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_leaves

from ndlightnet import LightNetAttention, NDLightNet
from ndlightnet.nn.mixers import WindowAttention, text_mixer


@pytest.fixture
def net():
    torch.manual_seed(0)
    mixer = partial(text_mixer, window=5)
    net = NDLightNet(1, vocab_size=20, embed_dim=128, depth=3, causal=True, mixer=mixer)
    for parameter in net.parameters():  # or attention is nearly uniform, and hides mistakes
        torch.nn.init.normal_(parameter, std=0.2)
    return net.double().eval()


def test_kinds(net):
    first, second, third = (block.mixer for block in net.blocks)
    assert isinstance(first, LightNetAttention) and isinstance(second, LightNetAttention)
    assert isinstance(third.mixer, WindowAttention) and third.mixer.window == 5
    assert all(mixer.local_values is not None for mixer in (first, second, third))
    assert first.forget.tolist() == pytest.approx([0.001, 0.004])


@pytest.mark.parametrize("dim", [32, 64, 200, 384, 448])
def test_a_rate_for_each_head(dim):
    layer = text_mixer(dim)
    known = torch.tensor([0.001, 0.004, 0.008, 0.016, 0.032, 0.064, 0.001])
    assert torch.equal(layer.forget, known[: layer.heads]) and layer.key_scale == 1


def test_it_is_causal():
    with pytest.raises(ValueError, match="causal=False with text_mixer"):
        NDLightNet(1, vocab_size=20, embed_dim=32, depth=1, mixer=text_mixer)


def test_stream_is_whole(net):
    tokens = torch.randint(20, (2, 23))
    stream = net.stream(2, cuda_graph=False)
    parts = [stream(part) for part in tokens.split([4, 1, 11, 7], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), net(tokens), rtol=1e-10, atol=1e-10)


def test_later_tokens_are_not_read(net):
    tokens = torch.randint(20, (1, 16))
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 20
    one, other = net(tokens), net(changed)
    torch.testing.assert_close(one[:, :9], other[:, :9], rtol=1e-12, atol=1e-12)
    assert (one[:, 9] - other[:, 9]).abs().max() > 1e-3


def test_pack_as_alone(net):
    texts = [torch.randint(20, (n,)) for n in (3, 12, 7)]
    together = net(net.pack(texts))
    alone = torch.cat([net(text[None])[0] for text in texts])
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-10)


def test_state_does_not_grow(net):
    state, sizes = net.init_state(1), []
    for length in (1, 40):
        _, state = net.advance(torch.randint(20, (1, length)), state)
        sizes.append([x.numel() for x in tree_leaves(state) if isinstance(x, torch.Tensor)])
    assert sizes[0] == sizes[1] and sum(sizes[0]) > 3 * 128
