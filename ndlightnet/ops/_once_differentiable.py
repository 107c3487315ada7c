"""Errors where the explicit gradient of an operator is differentiated again."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., tuple[Any, ...]]


class _Final(torch.autograd.Function):
    """Identity on a computed gradient, with a graph edge to every tensor that it depends on."""

    @staticmethod
    def forward(grad: Tensor, *sources: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise RuntimeError(
            "no second derivative: the gradient of this operator is written out and cannot be "
            "differentiated again; that of impl='reference', where there is one, can"
        )


def once_differentiable(backward: Backward) -> Backward:
    """Wrap an operator's backward so that differentiating its results again raises RuntimeError.

    torch's once_differentiable does not suffice: no graph edge leads from its error to the saved
    tensors, so torch.autograd.grad bypasses it and leaves out their part of the gradient.
    """

    @wraps(backward)
    def run(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return backward(ctx, *grads)
        saved = ctx.saved_tensors  # read once: checkpointing allows it a single time
        attributes = {**vars(ctx), "saved_tensors": saved, "needs_input_grad": ctx.needs_input_grad}
        with torch.no_grad():
            out = backward(SimpleNamespace(**attributes), *grads)
        sources = [x for x in (*saved, *grads) if isinstance(x, Tensor) and x.requires_grad]
        return tuple(
            _Final.apply(x, *sources) if isinstance(x, Tensor) else x  # type: ignore
            for x in out
        )

    return run


class _Inputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *xs: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(*xs)
        return tuple(None if x is None else x.view_as(x) for x in xs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads


def once_differentiable_inputs(*xs: Any) -> tuple[Any, ...]:
    """Return an operator's inputs unchanged, such that differentiating its gradient again raises
    RuntimeError; for operators that do not raise it themselves."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return xs
    return _Inputs.apply(*xs)  # type: ignore
