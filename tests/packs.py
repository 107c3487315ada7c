"""The operators on samples end to end, for tests that hold a pack's tokens (length, ...)."""

from torch import Tensor

from ndlightnet.layout import Ragged
from ndlightnet.ops import axis_causal_attention, axis_scan, global_attention


def row(x: Tensor | None) -> Tensor | None:
    return None if x is None else x[None]


def packed_attention(q, k, v, layout: Ragged, *, mask=None, **how) -> Tensor:
    qkv = (x[None] for x in (q, k, v))
    return global_attention(*qkv, layout=layout, mask=row(mask), **how)[0]


def packed_axis_causal_attention(q, k, v, layout: Ragged, *, mask=None, **how) -> Tensor:
    qkv = (x[None] for x in (q, k, v))
    out, state = axis_causal_attention(*qkv, layout, mask=row(mask), **how)
    assert state is None
    return out[0]


def packed_axis_scan(x, layout: Ragged, coef, decay, reverse=None, mask=None, **how) -> Tensor:
    return axis_scan(x[None], coef, decay, reverse, row(mask), layout=layout, **how)[0]
