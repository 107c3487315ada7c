"""The catalogue of mixers. Each is built from one argument, `dim`, and maps
`(x (batch, *grid, dim), mask=None, causal=False)` to the shape of x; with `layout`, a Ragged, x is
`(length, dim)`: samples of different shapes, end to end. Tests iterate `__all__`."""

from ndlightnet.nn.mixers.identity import Identity
from ndlightnet.nn.mixers.lightnet import LightNetAttention
from ndlightnet.nn.mixers.softmax import SoftmaxAttention

__all__ = ["Identity", "LightNetAttention", "SoftmaxAttention"]
