"""The mixers of a language model: memories that decay, and windows, layer by layer."""

from __future__ import annotations

from functools import partial

from torch import nn

from ndlightnet.nn.mixers.base import default_heads
from ndlightnet.nn.mixers.lightnet import LightNetAttention
from ndlightnet.nn.mixers.window import WindowAttention
from ndlightnet.nn.mixers.with_local import WithLocal

RATES = (0.001, 0.004, 0.008, 0.016, 0.032, 0.064)  # of the heads' decay, per token


def text_mixer(
    dim: int, *, dims: int | None = None, layer: int | None = None, causal: bool | None = None, window: int = 512
) -> nn.Module:
    """Return the mixer of a layer of a causal language model, `NDLightNet(mixer=text_mixer)`.

    Every third layer has softmax attention to the last `window` tokens, with a rotary code; the others have LightNet
    attention, one head per 64 channels, whose memories decay to 1 / e within 1,000 (the first head of six) to 16 tokens
    (the last). All mix the values locally. So there are layers that can select single tokens, and no layer depends on
    the length of the text: a stream has a state of constant size, and a text may be far longer than those of training.

    dims, layer, causal: number of axes (1), index of the layer, True; networks give them. Another window:
    `mixer=partial(text_mixer, window=256)`, in Python only.
    """
    if causal is False:
        raise ValueError("causal=False with text_mixer: expected a causal network")
    if (layer or 0) % 3 == 2:
        attention = partial(WindowAttention, window=window, rotary=True)
        return WithLocal(dim, attention, dims=dims or 1, layer=layer, causal=True)
    heads, _ = default_heads(dim, None)
    rates = [RATES[head % len(RATES)] for head in range(heads)]
    return LightNetAttention(dim, heads, dims=dims or 1, causal=True, forget=rates)
