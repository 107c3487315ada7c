"""The product in the middle of a SwiGLU (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from ndlightnet.ops._operator import Operator
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


def _forward(x: Tensor) -> Tensor:
    from ndlightnet_kernels import swiglu as kernels

    return kernels.swiglu(x)


def _fake(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _gradient(dout: Tensor, x: Tensor) -> Tensor:
    from ndlightnet_kernels import swiglu as kernels

    return kernels.swiglu_backward(dout, x)


def _gradient_fake(dout: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
    (x,) = ctx.saved_tensors
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # for a second derivative
        return torch.autograd.grad(_by_torch(x), x, dout, create_graph=True)
    return (_swiglu_backward(dout, x),)


_swiglu_backward = Operator("swiglu_backward(Tensor dout, Tensor x) -> Tensor", _gradient, _gradient_fake)
_swiglu = Operator("swiglu(Tensor x) -> Tensor", _forward, _fake, _save, _backward, once=False)
