"""Residual stream and LayerNorm: a branch is added to the stream, the sum is normed, and mapped."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from ndlightnet.ops._operator import Gradient, Operator, kernel, weight_gradient
from ndlightnet.ops.dispatch import Impl, resolve
from ndlightnet.ops.dtypes import product_dtype
from ndlightnet.ops.norm_gate import MOST_ROW


def add_norm(
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-6,
    impl: Impl = "auto",
    proj: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the stream x + y, or x without y, and LayerNorm(x + y) * weight + bias, or the map of this by `proj`.

    x, y: (..., dim); weight, bias: (dim,); proj: (out, dim). Statistics are float32 or wider. With Triton the second
    result has the dtype of products (16 bits under autocast), and the backward computes what `proj` maps again.
    """
    if y is not None and y.shape != x.shape:
        raise ValueError(f"y {tuple(y.shape)}: expected the shape of x, {tuple(x.shape)}")
    for name, row in (("weight", weight), ("bias", bias)):
        if row.shape != x.shape[-1:]:
            raise ValueError(f"{name} {tuple(row.shape)}: expected {tuple(x.shape[-1:])} of x {tuple(x.shape)}")
    if resolve("add_norm", impl, x) == "triton":
        dtype = product_dtype(x)
        if y is not None and (x.dtype != torch.float32 or y.dtype != dtype or dtype == x.dtype):
            x, y = x + y, None  # the gradients of x and y are one tensor
        proj = None if proj is None else proj.to(dtype)
        stream, out, *_ = _add_norm(x, y, weight, bias, proj, eps, dtype, x.dtype, _learns(x, y, weight, bias, proj))
        return (x if y is None else stream), out
    stream = x if y is None else x + y
    out = layer_norm(stream, stream.shape[-1:], weight, bias, eps)
    return stream, out if proj is None else linear(out, proj)


def _learns(*inputs: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def _forward(
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    proj: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    _: torch.dtype,
    learn: bool,
) -> tuple[Tensor, ...]:
    stream, out, unit, rstd = _kernel(x, y, weight, bias, eps, dtype, learn)
    out = out if proj is None else linear(out, proj)
    nothing = [x.new_empty(0) if z is None else z for z in (stream, unit, rstd)]
    return nothing[0], out, *nothing[1:]


def _fake(x: Tensor, y: Any, w: Any, b: Any, proj: Any, eps: float, dtype: Any, _: Any, learn: bool) -> Any:
    out = x.new_empty(*x.shape[:-1], x.shape[-1] if proj is None else proj.shape[0], dtype=dtype)
    stream = x.new_empty(0 if y is None else x.shape)
    if not learn:
        return stream, out, x.new_empty(0), x.new_empty(0)
    return stream, out, x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _backward(
    weight: Tensor,
    bias: Tensor,
    proj: Tensor | None,
    unit: Tensor,
    rstd: Tensor,
    dstream: Tensor | None,
    dout: Tensor | None,
    dunit: Tensor | None,
    drstd: Tensor | None,
    of: torch.dtype,
    has_y: bool,
    needs_proj: bool,
) -> tuple[Tensor | None, ...]:
    if dout is None or dunit is not None or drstd is not None:  # of second derivatives
        return _formula(weight, bias, proj, unit, rstd, dstream, dout, dunit, drstd, of, has_y)
    if not has_y:  # the gradient of a result without numbers
        dstream = None
    dnormed = dout if proj is None else dout @ proj
    again = needs_proj and proj is not None
    *grads, normed = _kernel_backward(dstream, dnormed, weight, bias, unit, rstd, of, has_y, again)
    return *grads, weight_gradient(dout, normed) if again else None


def _formula(
    weight: Tensor,
    bias: Tensor,
    proj: Tensor | None,
    unit: Tensor,
    rstd: Tensor,
    dstream: Tensor | None,
    dout: Tensor | None,
    dunit: Tensor | None,
    drstd: Tensor | None,
    of: torch.dtype,
    has_y: bool,
    **_: Any,
) -> tuple[Tensor | None, ...]:
    """The gradients in torch, differentiable again: unit and rstd are results that depend on the stream."""
    if dout is None:
        dout = unit.new_zeros(*unit.shape[:-1], unit.shape[-1] if proj is None else proj.shape[0])
    dnormed = (dout if proj is None else dout @ proj).float()
    u, r, rows = unit.float(), rstd[..., None], range(unit.ndim - 1)
    d = dnormed * weight
    if dunit is not None:
        d = d + dunit
    d = (d - d.mean(-1, keepdim=True) - u * (d * u).mean(-1, keepdim=True)) * r
    if drstd is not None:
        d = d - drstd[..., None] * r.square() * u / u.shape[-1]
    if dstream is not None and has_y:
        d = d + dstream
    normed = (u * weight + bias).to(unit.dtype)
    dproj = None if proj is None else weight_gradient(dout, normed)
    dweight, dbias = (x.sum(tuple(rows)).to(weight.dtype) for x in (dnormed * u, dnormed))
    return d.to(of, copy=True), d.to(unit.dtype, copy=True) if has_y else None, dweight, dbias, dproj


def _fake_backward(
    weight: Tensor, bias: Tensor, proj: Tensor | None, unit: Tensor, *more: Any
) -> tuple[Tensor | None, ...]:
    *_, of, has_y, needs_proj = more
    dy = unit.new_empty(unit.shape) if has_y else None
    dproj = proj.new_empty(proj.shape) if needs_proj and proj is not None else None
    params = (weight.new_empty(weight.shape), bias.new_empty(bias.shape))
    return unit.new_empty(unit.shape, dtype=of), dy, *params, dproj


def _limits(x: Tensor, *_: Any, **__: Any) -> str:
    return f"{x.shape[-1]} channels: expected {MOST_ROW} or fewer" if x.shape[-1] > MOST_ROW else ""


_kernel = kernel("residual_norm", "add_norm")
_kernel_backward = kernel("residual_norm", "add_norm_backward")
PARAMETERS, TYPES = "Tensor weight, Tensor bias, Tensor? proj", "ScalarType of"
_add_norm = Operator(
    f"add_norm(Tensor x, Tensor? y, {PARAMETERS}, float eps, ScalarType dtype, {TYPES}, bool learn) "
    "-> (Tensor stream, Tensor out, Tensor unit, Tensor rstd)",
    _forward,
    _fake,
    Gradient(
        f"add_norm_backward({PARAMETERS}, Tensor unit, Tensor rstd, Tensor? dstream, Tensor? dout, Tensor? dunit, "
        f"Tensor? drstd, {TYPES}, bool has_y, bool needs_proj) "
        "-> (Tensor dx, Tensor dy, Tensor dweight, Tensor dbias, Tensor dproj)",
        _backward,
        _fake_backward,
        again=lambda _, **named: _formula(**named),
    ),
    flops=lambda proj, x=None, unit=None, **_: 0 if proj is None else 2 * math.prod(x or unit) * proj[0],
    implementations=("torch", "triton"),
    limits=_limits,
)
