"""Until the operators take a layout themselves."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ndlightnet import ops
from ndlightnet.layout import Grid, Layout, Ragged
from ndlightnet.ops.state import State


def global_attention(q: Tensor, k: Tensor, v: Tensor, *, layout: Layout, **how: Any) -> Tensor:
    if isinstance(layout, Ragged):
        mask = how.pop("mask")
        mask = None if mask is None else mask[0]
        return ops.packed_attention(q[0], k[0], v[0], layout, mask=mask, **how)[None]
    return ops.global_attention(q, k, v, **how)


def axis_causal_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, state: State | None = None, **how: Any
) -> tuple[Tensor, Any]:
    if isinstance(layout, Ragged):
        mask = how.pop("mask")
        mask = None if mask is None else mask[0]
        attend: Any = ops.packed_axis_causal_attention
        return attend(q[0], k[0], v[0], layout, mask=mask, **how)[None], None
    assert isinstance(layout, Grid)
    return ops.axis_causal_attention(q, k, v, layout.shape[0], state=state, **how)


def axis_scan(
    x: Tensor, coef: Tensor, log_decay: Tensor, reverse: Any, mask: Tensor | None, *,
    layout: Layout, **how: Any,
) -> Tensor:  # fmt: skip
    if isinstance(layout, Ragged):
        mask = None if mask is None else mask[0]
        return ops.packed_axis_scan(x[0], layout, coef, log_decay, reverse, mask, **how)[None]
    assert isinstance(layout, Grid)
    mask = None if mask is None else layout.unflatten(mask)
    y = ops.axis_scan(layout.unflatten(x), coef, log_decay, reverse, mask, **how)
    return layout.flatten(y)
