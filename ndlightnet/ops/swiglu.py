"""The second half of a SwiGLU (Shazeer 2020, arXiv 2002.05202): the gated product and the output map."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn.functional import linear, silu

from ndlightnet.ops._operator import Gradient, Operator, again_by, kernel, weight_gradient
from ndlightnet.ops.dispatch import Impl, resolve
from ndlightnet.ops.dtypes import product_dtype


def swiglu(x: Tensor, weight: Tensor, impl: Impl = "auto") -> Tensor:
    """Return the map of SiLU(gate) * up by `weight` (out, dim), (..., out), where x (..., 2 * dim) is [gate, up].

    With Triton the backward computes the product SiLU(gate) * up again: it is not kept.
    """
    if x.shape[-1] != 2 * weight.shape[1]:
        raise ValueError(f"x {tuple(x.shape)}: expected (..., 2 * dim), with a weight {tuple(weight.shape)} (out, dim)")
    if resolve("swiglu", impl, x) == "triton":
        dtype = product_dtype(x)
        out: Tensor = _swiglu(x.to(dtype), weight.to(dtype))
        return out
    return _by_torch(x, weight)


def _by_torch(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return linear(silu(gate) * up, weight)


def _backward(dout: Tensor, x: Tensor, weight: Tensor, needs_weight: bool) -> tuple[Tensor, Tensor | None]:
    dx, product = _kernel_backward(dout @ weight, x, needs_weight)
    return dx, None if product is None else weight_gradient(dout, product)


_kernel, _kernel_backward = kernel("swiglu", "swiglu"), kernel("swiglu", "swiglu_backward")
_swiglu = Operator(
    "swiglu(Tensor x, Tensor weight) -> Tensor out",
    lambda x, weight: linear(_kernel(x), weight),
    lambda x, weight: x.new_empty(*x.shape[:-1], weight.shape[0]),
    Gradient(
        "swiglu_backward(Tensor dout, Tensor x, Tensor weight, bool needs_weight) -> (Tensor dx, Tensor dweight)",
        _backward,
        again=again_by(_by_torch, "x", "weight"),
    ),
    flops=lambda x, weight, **_: math.prod(x) * weight[0],
    implementations=("torch", "triton"),
)
