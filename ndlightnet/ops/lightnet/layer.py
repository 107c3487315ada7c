"""A layer of global LightNet attention, from the joint projection of its tokens to its output: attention, local mixing,
norm, gate and the output map.

On kernels it is one operator, on a slab the steps of slab_layer.py, so that the gradients of queries, keys, values and
gate are written where they belong in that of the projection: as gradients of their own they would be added and copied
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ndlightnet.layout import Layout, Ragged
from ndlightnet.ops._operator import Gradient, Operator
from ndlightnet.ops.dispatch import Impl, resolve
from ndlightnet.ops.dtypes import accumulator, product_dtype
from ndlightnet.ops.lightnet import _triton
from ndlightnet.ops.lightnet.attention import begin_global_attention, check_inputs, global_position
from ndlightnet.ops.lightnet.slab_layer import slab_layer
from ndlightnet.ops.local_mixing import _triton as local
from ndlightnet.ops.local_mixing import api
from ndlightnet.ops.local_mixing.offsets import Offsets
from ndlightnet.ops.norm_gate import backward as gate_backward
from ndlightnet.ops.norm_gate import flops as gate_flops
from ndlightnet.ops.norm_gate import forward as gate_forward
from ndlightnet.ops.norm_gate import norm_gate
from ndlightnet.ops.position import Position
from ndlightnet_kernels.position import FIELDS, SCHEMA, FlatPosition


def attention_layer(
    x: Tensor,
    heads: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    up: Tensor,
    proj: Tensor,
    taps: Tensor | None = None,
    offsets: Sequence[Sequence[int]] = (),
    *,
    layout: Layout,
    mask: Tensor | None = None,
    position: Position | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Return norm_gate of what queries read and of the values' local mixing, if there are taps.

    x (batch, length, 3 * dim + rank): queries, keys, values, and the gate before its map `up`. weight, bias, eps, up,
    proj: of `norm_gate`. taps, offsets: of `local_mixing`. mask, position, layout: of `global_attention`.
    """
    dim, rank = up.shape
    *qkv, gate = x.split([dim, dim, dim, rank], -1)
    q, k, v = (y.unflatten(-1, (heads, dim // heads)) for y in qkv)
    if layout.joint and _on_kernels(k, v, taps, layout, position, impl):
        dtype = product_dtype(x)
        joint, maps = x.to(dtype), (up.to(dtype), proj.to(dtype))
        shifts: Offsets = ()
        if taps is not None:
            shifts = api.check_taps(v.flatten(2), taps, offsets, mask, layout, True)
        if not layout.shared:
            pack = layout if isinstance(layout, Ragged) else None
            position = global_position(q, k, v, mask, position, pack)
            where = _triton.of_layout(position, pack, k, dim // heads)
            at = local.NOWHERE
            if taps is not None:
                at = local.where(layout, shifts, x.device)
                taps = taps.to(accumulator(x))
            out: Tensor = _layer(joint, weight, bias, *maps, taps, mask, eps, heads, *where, *at)[0]
            return out
        # operators of a compiled graph write into no other one's result
        if layout.axis is not None and mask is None and not torch.compiler.is_compiling():
            check_inputs(k, v, mask, position, q)
            pieces = partial(_pieces, heads=heads, rank=rank)
            return slab_layer(joint, pieces, weight, bias, eps, *maps, taps, shifts, layout, position)
    near: Any = None
    if taps is not None:
        near = api.begin_local_mixing(v.flatten(2), taps, offsets, layout=layout, mask=mask, impl=impl)
    attention = begin_global_attention(q, k, v, mask=mask, position=position, layout=layout, impl=impl)
    beside = near and near()  # while the States of slabs are under way
    return norm_gate(attention().flatten(2), gate, weight, bias, eps, impl, beside, up, proj)


def _on_kernels(
    k: Tensor, v: Tensor, taps: Tensor | None, layout: Layout, position: Position | None, impl: Impl
) -> bool:
    """Return whether all of a layer runs on kernels."""
    chosen = [resolve("global_attention", impl, k, v, position=position), resolve("norm_gate", impl, v.flatten(2))]
    if taps is not None:
        chosen.append(api.choose(v.flatten(2), taps, layout, impl))
    return set(chosen) == {"triton"}


def _pieces(x: Tensor, heads: int, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return views of queries, keys and values (batch, length, heads, dim), and of the gate."""
    dim = (x.shape[-1] - rank) // 3
    *qkv, gate = x.split([dim, dim, dim, rank], -1)
    q, k, v = (y.unflatten(-1, (heads, dim // heads)) for y in qkv)
    return q, k, v, gate


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    up: Tensor,
    proj: Tensor,
    taps: Tensor | None,
    mask: Tensor | None,
    eps: float,
    heads: int,
    *places: Any,
    mix: Any = local.forward,
) -> tuple[Tensor, ...]:
    q, k, v, gate = _pieces(x, heads, up.shape[1])
    near = None if taps is None else mix(v.flatten(2), taps, mask, *places[FIELDS:])
    y, *state = _triton._global(q, k, v, mask, *places[:FIELDS])
    y = y.flatten(2)
    out, mean, rstd = gate_forward(y, gate, weight, bias, near, up, proj, eps)
    return out, y, x.new_empty(0) if near is None else near, mean, rstd, *state


def _lowered(*inputs: Any) -> tuple[Tensor, ...]:
    """Local mixing is that which AOTInductor can compile."""
    return _forward(*inputs, mix=local.lowered)


def _fake(
    x: Tensor, weight: Any, bias: Any, up: Tensor, proj: Tensor, taps: Any, _: Any, __: Any, heads: int, *places: Any
) -> Any:
    _, k, v, _ = _pieces(x, heads, up.shape[1])
    y = x.new_empty(*x.shape[:-1], up.shape[0])
    mean = x.new_empty(x.shape[:-1], dtype=torch.float32)
    near = x.new_empty(0) if taps is None else torch.empty_like(y)
    out = x.new_empty(*x.shape[:-1], proj.shape[0])
    return out, y, near, mean, torch.empty_like(mean), *_triton._state(k, v.shape[-1], places[:FIELDS])


def _backward(
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    up: Tensor,
    proj: Tensor,
    taps: Tensor | None,
    mask: Tensor | None,
    y: Tensor,
    near: Tensor,
    mean: Tensor,
    rstd: Tensor,
    top: Tensor,
    total: Tensor,
    memory: Tensor,
    heads: int,
    needs_proj: bool,
    needs_theta: bool,
    *places: Any,
) -> tuple[Tensor | None, ...]:
    from ndlightnet_kernels import attention_backward as kernels

    position, at, rank = FlatPosition(*places[:FIELDS]), places[FIELDS:], up.shape[1]
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)  # kernels write rows of it
    (q, k, v, gate), (dq, dk, dv, dgate) = _pieces(x, heads, rank), _pieces(dx, heads, rank)
    beside = None if taps is None else near
    grads: Any = gate_backward(dout, y, gate, weight, bias, beside, up, proj, mean, rstd, needs_proj, dgate)
    dy, _, dweight, dbias, dnear, dup, dproj = grads
    dtaps = None if taps is None else local.backward(dnear, v.flatten(2), taps, mask, *at, dx=dv.flatten(2))[1]
    _, dtotal, dmemory, by_q = kernels.read_backward(q, total, memory, dy.view(v.shape), position, needs_theta, dq)
    _, _, by_k = kernels.summarize_backward(
        k, v, mask, top, dtotal, dmemory, position, needs_theta, dk, dv, add=taps is not None
    )
    dtheta = _triton._theta_gradient(by_q + by_k if needs_theta else by_k, position.theta, needs_theta)
    return dx, dweight, dbias, dup, dproj, dtaps, dtheta


def _flops(x: Sequence[int], up: Sequence[int], proj: Sequence[int], taps: Any, heads: int, kind: str, **_: Any) -> int:
    y = *x[:-1], up[0]
    attended = _triton._attention_flops((*x[:-1], heads, up[0] // heads), (up[0] // heads,), kind)
    mixed = 0 if taps is None else local.flops(y, taps)
    return attended + mixed + gate_flops(y, None, up, proj)


INPUTS = "Tensor x, Tensor weight, Tensor bias, Tensor up, Tensor proj, Tensor? taps, Tensor? mask"
KEPT = "Tensor y, Tensor near, Tensor mean, Tensor rstd, Tensor top, Tensor total, Tensor memory"
_layer = Operator(
    f"attention_layer({INPUTS}, float eps, int heads, {SCHEMA}, {local.WHERE}) -> (Tensor out, {KEPT})",
    _forward,
    _fake,
    Gradient(
        f"attention_layer_backward(Tensor dout, {INPUTS}, {KEPT}, int heads, bool needs_proj, bool needs_theta, "
        f"{SCHEMA}, {local.WHERE}) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dup, Tensor dproj, "
        "Tensor dtaps, Tensor dtheta)",
        _backward,
    ),
    lowered=_lowered,
    flops=_flops,
)
