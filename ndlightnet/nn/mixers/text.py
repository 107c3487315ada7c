"""The mixers of a language model: a memory that fades, and a window, in layers that alternate."""

from __future__ import annotations

from functools import partial

from torch import nn

from ndlightnet.nn.heads import default_heads
from ndlightnet.nn.mixers.lightnet import LightNetAttention
from ndlightnet.nn.mixers.window import WindowAttention
from ndlightnet.nn.mixers.with_local import WithLocal

SLOWEST, FASTEST = 1e-3, 0.064  # decay rates of the heads, per token


def text_mixer(
    dim: int, *, dims: int | None = None, layer: int = 0, window: int = 512
) -> nn.Module:
    """Return the mixer of a layer of a causal language model, `NDLightNet(mixer=text_mixer)`.

    Of three layers two have LightNet attention, one head per 64 channels, whose memories fade in
    16 (the last head) to 1,000 tokens (the first), and the third softmax attention to the last
    `window` tokens, with a rotary code; all with local mixing of the values. So there are layers
    that select exactly, and nothing depends on how long the text is: a stream has a state of
    constant size, and texts may be far longer than those of training.

    dims, layer: number of axes (1), index of the layer; networks give both.
    """
    if layer % 3 == 2:
        near = partial(WindowAttention, window=window, rotary=True)
        return WithLocal(dim, near, dims=dims, layer=layer)
    heads, _ = default_heads(dim, None)
    ratio = FASTEST / SLOWEST
    rates = [SLOWEST * ratio ** (head / max(1, heads - 1)) for head in range(heads)]
    return LightNetAttention(dim, heads, dims=dims, key_scale=1.0, forget=rates)
