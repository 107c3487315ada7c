"""The mixers of a language model: which layer has which, and packs. tests/models/test_stream.py streams them."""

from functools import partial

import pytest
import torch

from ndlightnet import LightNetAttention, NDLightNet
from ndlightnet.nn.mixers import WindowAttention, text_mixer


def test_layers():
    first, second, third = (text_mixer(128, layer=layer, window=5) for layer in range(3))
    assert isinstance(first, LightNetAttention) and isinstance(second, LightNetAttention)
    assert isinstance(third.mixer, WindowAttention) and third.mixer.window == 5 and third.mixer.lrpe
    assert all(mixer.local_values is not None for mixer in (first, second, third))


@pytest.mark.parametrize("dim", [32, 64, 200, 384, 448])
def test_a_rate_for_each_head(dim):
    layer = text_mixer(dim)
    rates = torch.tensor([0.001, 0.004, 0.008, 0.016, 0.032, 0.064, 0.001])
    assert torch.equal(layer.forget, rates[: layer.heads]) and layer.key_scale == 1


def test_it_is_causal():
    with pytest.raises(ValueError, match="causal=False with text_mixer"):
        NDLightNet(1, vocab_size=20, embed_dim=32, depth=1, mixer=partial(text_mixer, window=5))


def test_pack_as_alone(close):
    net = NDLightNet(1, vocab_size=20, embed_dim=128, depth=3, causal=True, mixer=partial(text_mixer, window=5))
    net = net.double().eval()
    texts = [torch.randint(20, (n,)) for n in (3, 12, 7)]
    close(net(net.pack(texts)), torch.cat([net(text[None])[0] for text in texts]), 1e-10)
