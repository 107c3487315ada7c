"""The catalogue of mixers. Each is built from one argument, `dim`, and maps `(x (batch, *grid, dim), mask=None,
causal=False, layout=None, context=None)` to the shape of x, as base.py says; tests iterate `__all__`. Mixers whose
state does not grow with the sequence are StreamingMixers, with `init_state` and `advance`. WithLocal gives any of them
a local branch, and so is not one of them; nor is text_mixer, which chooses one for each layer of a language model, nor
published_mixer, the paper's layer. Networks take all of these by name, too: `mixer="GLA"`. To add a mixer, write `mix`
in a new file and export it here."""

from ndlightnet.nn.mixers.bounded_memory import ABCAttention
from ndlightnet.nn.mixers.cosformer import CosformerAttention
from ndlightnet.nn.mixers.delta import DeltaNet, GatedDeltaNet, KimiDeltaAttention
from ndlightnet.nn.mixers.gla import GLA
from ndlightnet.nn.mixers.hgrn import HGRN
from ndlightnet.nn.mixers.hgrn2 import HGRN2
from ndlightnet.nn.mixers.identity import Identity
from ndlightnet.nn.mixers.lavo import LAVO
from ndlightnet.nn.mixers.lightnet import LightNetAttention
from ndlightnet.nn.mixers.lightnet import published_mixer as published_mixer
from ndlightnet.nn.mixers.linear import LinearAttention
from ndlightnet.nn.mixers.long_short import LongShortAttention
from ndlightnet.nn.mixers.lrpe import LrpeAttention
from ndlightnet.nn.mixers.mamba import Mamba
from ndlightnet.nn.mixers.names import CATALOGUE
from ndlightnet.nn.mixers.nystrom import NystromAttention
from ndlightnet.nn.mixers.random_features import RandomFeatureAttention
from ndlightnet.nn.mixers.rwkv import RWKV4
from ndlightnet.nn.mixers.s4 import S4
from ndlightnet.nn.mixers.s5 import S5
from ndlightnet.nn.mixers.softmax import SoftmaxAttention
from ndlightnet.nn.mixers.text import text_mixer as text_mixer
from ndlightnet.nn.mixers.tnl import TNL
from ndlightnet.nn.mixers.unshared import UnsharedLightNet
from ndlightnet.nn.mixers.window import WindowAttention
from ndlightnet.nn.mixers.with_local import WithLocal as WithLocal

__all__ = [
    "GLA",
    "HGRN",
    "HGRN2",
    "LAVO",
    "RWKV4",
    "S4",
    "S5",
    "TNL",
    "ABCAttention",
    "CosformerAttention",
    "DeltaNet",
    "GatedDeltaNet",
    "Identity",
    "KimiDeltaAttention",
    "LightNetAttention",
    "LinearAttention",
    "LongShortAttention",
    "LrpeAttention",
    "Mamba",
    "NystromAttention",
    "RandomFeatureAttention",
    "SoftmaxAttention",
    "UnsharedLightNet",
    "WindowAttention",
]

_MORE = ("WithLocal", "published_mixer", "text_mixer")
CATALOGUE.update({name: globals()[name] for name in (*__all__, *_MORE)})
