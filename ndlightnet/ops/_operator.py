"""Functions on tensors as torch.library operators, which torch.compile and torch.export can trace.

In eager mode each operator is called through an autograd.Function: torch's path to an operator's
registered gradient takes twice the host time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch._subclasses.functional_tensor import FunctionalTensorMode

from ndlightnet.ops._once_differentiable import once_differentiable

LIBRARY = torch.library.Library("ndlightnet", "FRAGMENT")


class Operator:
    """An operator with a schema, a fake implementation and, if it has one, a gradient.

    setup(ctx, inputs, output) saves what backward(ctx, *grads) needs; backward returns one gradient
    or None for each input. Inputs are positional. once: differentiating a gradient again raises an
    error; otherwise `backward` itself is differentiable where gradients are enabled in it. lowered:
    what AOTInductor compiles instead of `forward`, whose kernels it can.
    """

    def __init__(
        self,
        schema: str,
        forward: Callable[..., Any],
        fake: Callable[..., Any],
        setup: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
        backward: Callable[..., tuple[Any, ...]] | None = None,
        once: bool = True,
        lowered: Callable[..., Any] | None = None,
    ) -> None:
        name = schema.partition("(")[0]
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        # compiled graphs call it at run time; Dynamo must not trace into it
        LIBRARY.impl(name, _disable_dynamo(forward), "CompositeExplicitAutograd")
        torch.library.register_fake(f"ndlightnet::{name}", fake, lib=LIBRARY)
        torch.library.register_torch_dispatch(
            f"ndlightnet::{name}", FunctionalTensorMode, _lower(lowered or forward), lib=LIBRARY
        )
        self.overload = getattr(torch.ops.ndlightnet, name).default
        self.function: Any = None
        if setup is None or backward is None:
            return
        backward = once_differentiable(backward) if once else backward
        save, overload = setup, self.overload
        torch.library.register_autograd(f"ndlightnet::{name}", backward, setup_context=_positional(setup), lib=LIBRARY)

        def run(ctx: Any, *inputs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                output = overload(*inputs)
            save(ctx, inputs, output)
            return output

        members = {"forward": staticmethod(run), "backward": staticmethod(backward)}
        self.function = type(name, (torch.autograd.Function,), members)

    def __call__(self, *inputs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.overload(*inputs)
        learnt = self.function is not None and torch.is_grad_enabled()
        if learnt and torch._C._any_requires_grad(*inputs):
            return self.function.apply(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload(*inputs)


def _lower(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return what AOTInductor traces in place of an operator, so that its package has the kernels
    inside and runs without Python. Elsewhere, as in torch.compile, the operator stays one."""

    def dispatch(mode: Any, op: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        from torch._inductor.virtualized import V

        if not V.aot_compilation:
            return mode.__torch_dispatch__(op, types, args, kwargs)
        from ndlightnet_kernels.launch import lowering

        with mode, lowering():
            return forward(*args, **kwargs)

    return dispatch


def _positional(setup: Callable[..., None]) -> Callable[..., None]:
    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        setup(ctx, inputs, output)

    return save
