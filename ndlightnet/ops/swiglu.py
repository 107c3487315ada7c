"""The product in the middle of a SwiGLU (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from ndlightnet.ops._operator import Gradient, Operator, kernel
from ndlightnet.ops.dispatch import Impl, resolve


def swiglu(x: Tensor, impl: Impl = "auto") -> Tensor:
    """Return SiLU(gate) * up, (..., dim) in x's dtype, where x (..., 2 * dim) is [gate, up]."""
    if x.shape[-1] % 2:
        raise ValueError(f"x {tuple(x.shape)}: expected (..., 2 * dim)")
    if resolve("swiglu", impl, x) == "triton":
        out: Tensor = _swiglu(x)
        return out
    return _by_torch(x)


def _by_torch(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return silu(gate) * up


def _backward_by_torch(needed: Any, dout: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(_by_torch(x), x, dout, create_graph=True)


_gradient = kernel("swiglu", "swiglu_backward")
_swiglu = Operator(
    "swiglu(Tensor x) -> Tensor out",
    kernel("swiglu", "swiglu"),
    lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2),
    Gradient(
        "swiglu_backward(Tensor dout, Tensor x) -> Tensor dx",
        lambda *inputs: (_gradient(*inputs),),
        again=_backward_by_torch,
    ),
    implementations=("torch", "triton"),
)
