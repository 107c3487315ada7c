"""Functions on tensors as torch.library operators, which torch.compile and torch.export can trace.

In eager mode each operator is called through an autograd.Function: torch's path to an operator's
registered gradient takes twice the host time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._subclasses.functional_tensor import FunctionalTensorMode

from ndlightnet.ops._once_differentiable import once_differentiable
from ndlightnet.ops.dispatch import OPERATIONS, Operation
from ndlightnet.ops.limits import unlimited

LIBRARY = torch.library.Library("ndlightnet", "FRAGMENT")
# FLOPs of each operator, given the shapes of its tensors and its other arguments in order
FORMULAS: dict[str, Callable[..., int]] = {}


class Gradient(NamedTuple):
    """The operator that computes another one's gradient.

    Names in its schema say what its arguments are: `x` an input or an output of the forward, `dx`
    the gradient of output x, `needs_x` whether input x needs a gradient, `has_x` whether it is
    given. Its results are named `dx`: the gradients of input x. An output x without a `dx` has no
    gradient; a `dx` of type Tensor? is None where nothing depends on x.

    compute returns a tuple, with None for gradients that do not exist. fake: by default gradients have the shapes and
    dtypes of their inputs. again: the same as compute, but differentiable, of the flags which of the results are needed
    and then the same arguments; without it, differentiating a gradient again raises RuntimeError.
    """

    schema: str
    compute: Callable[..., tuple[Tensor | None, ...]]
    fake: Callable[..., tuple[Tensor | None, ...]] | None = None
    again: Callable[..., Sequence[Tensor | None]] | None = None


class Operator:
    """An operator of named outputs: schema, forward, fake and, if it has one, the gradient.

    Inputs are positional. lowered: what AOTInductor compiles instead of `forward`, whose kernels it can. flops: number
    of FLOPs of the forward, given all inputs by name, shapes in place of tensors; a gradient has twice as many.
    implementations, limits: those of the `Operation` of this name.
    """

    def __init__(
        self,
        schema: str,
        forward: Callable[..., Any],
        fake: Callable[..., Any],
        gradient: Gradient | None = None,
        *,
        lowered: Callable[..., Any] | None = None,
        flops: Callable[..., int] = lambda **_: 0,
        implementations: tuple[str, ...] = (),
        limits: Callable[..., str] = unlimited,
    ) -> None:
        name, inputs, outputs = _parse(schema)
        if implementations:
            OPERATIONS[name] = Operation(implementations, limits)
        FORMULAS[name] = lambda *values, out_shape=None: flops(**dict(zip(inputs, values, strict=True)))
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        # compiled graphs call it at run time; Dynamo must not trace into it
        LIBRARY.impl(name, _disable_dynamo(forward), "CompositeExplicitAutograd")
        torch.library.register_fake(f"ndlightnet::{name}", fake, lib=LIBRARY)
        torch.library.register_torch_dispatch(
            f"ndlightnet::{name}", FunctionalTensorMode, _lower(lowered or forward), lib=LIBRARY
        )
        self.overload = getattr(torch.ops.ndlightnet, name).default
        self.function: Any = None
        if gradient is None:
            return
        save, backward = _differentiate(gradient, inputs, outputs, lambda **named: 2 * flops(**named))
        overload = self.overload
        torch.library.register_autograd(f"ndlightnet::{name}", backward, setup_context=save, lib=LIBRARY)

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


def kernel(module: str, name: str, **options: Any) -> Callable[..., Any]:
    """Return a function that imports a module of the kernels and calls its function of this name."""

    def call(*inputs: Any) -> Any:
        return getattr(import_module(f"ndlightnet_kernels.{module}"), name)(*inputs, **options)

    return call


def again_by(function: Callable[..., Tensor], *names: str) -> Callable[..., list[Tensor | None]]:
    """Return the differentiable gradient, see Gradient, of an operator that computes function(*inputs of these
    names)."""

    def again(needed: Sequence[bool], dout: Tensor, **named: Any) -> list[Tensor | None]:
        inputs = [named[x].view_as(named[x]) for x in names]  # one may be a function of another
        learnt = [x for x, need in zip(inputs, needed, strict=True) if need]
        grads = iter(torch.autograd.grad(function(*inputs), learnt, dout, create_graph=True))
        return [next(grads) if need else None for need in needed]

    return again


def weight_gradient(dout: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of a weight (out, dim) that mapped x (..., dim), from that of the result (..., out)."""
    return dout[None].flatten(0, -2).T @ x[None].flatten(0, -2)


Types = dict[str, str]


def _parse(schema: str) -> tuple[str, Types, Types]:
    """Return an operator's name, and the types of its inputs and of its outputs by their names."""
    call, _, results = schema.removesuffix(")").partition(") -> ")
    name, _, arguments = call.partition("(")
    lists = (part.split(", ") if part else [] for part in (arguments, results.removeprefix("(")))
    inputs, outputs = ({x.split()[1]: x.split()[0] for x in part} for part in lists)
    return name, inputs, outputs


def _picker(numbers: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that takes the values of these numbers, fast where there are several."""
    return itemgetter(*numbers) if len(numbers) > 1 else lambda values: tuple([values[i] for i in numbers])


def _differentiate(
    gradient: Gradient, inputs: Types, outputs: Types, flops: Callable[..., int]
) -> tuple[Callable[..., None], Callable[..., Any]]:
    """Register the operator of a gradient. Return the function that saves what it needs of the
    forward's `inputs` and `outputs`, and the one that calls it."""
    _, arguments, results = _parse(gradient.schema)
    targets = [name.removeprefix("d") for name in results]

    def joined(grads: Sequence[Tensor | None], values: Sequence[Any]) -> Any:
        # an operator returns no None
        tensors = tuple([values[0].new_empty(0) if x is None else x for x in grads])
        return tensors if len(tensors) > 1 else tensors[0]

    def compute(*values: Any) -> Any:
        return joined(gradient.compute(*values), values)

    def fake(*values: Any) -> Any:
        if gradient.fake is not None:
            return joined(gradient.fake(*values), values)
        named = dict(zip(arguments, values, strict=True))
        sources = [named[x] if named.get(f"needs_{x}", True) else None for x in targets]
        return joined([None if x is None else x.new_empty(x.shape) for x in sources], values)

    operator = Operator(gradient.schema, compute, fake, flops=flops)
    forward, grads = [*inputs, *outputs], [f"d{name}" for name in outputs]
    tensors = [x for x in forward if x in arguments and arguments[x].startswith("Tensor")]
    constants = [x for x in inputs if not inputs[x].startswith("Tensor")]
    has = [x for x in inputs if f"has_{x}" in arguments]
    needs = [x for x in inputs if f"needs_{x}" in arguments]
    names = [*tensors, *constants, *(f"has_{x}" for x in has), *grads, *(f"needs_{x}" for x in needs)]
    in_order = _picker([names.index(x) for x in arguments])
    unused = [x for x in outputs if f"d{x}" not in arguments]
    pick_tensors, pick_constants, pick_has, pick_unused, pick_needs = (
        _picker([forward.index(x) for x in part]) for part in (tensors, constants, has, unused, needs)
    )
    targets_at = [forward.index(x) for x in targets]
    required = [arguments[x] == "Tensor" for x in grads if x in arguments]
    materialize = len(outputs) == 1 or (len(required) > 1 and all(required))

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        values = (*inputs, *output) if isinstance(output, tuple) else (*inputs, output)
        ctx.save_for_backward(*pick_tensors(values))
        ctx.constants = (*pick_constants(values), *[x is not None for x in pick_has(values)])
        if unused:
            ctx.mark_non_differentiable(*pick_unused(values))
        if not materialize:  # no zeros are written for outputs without a gradient
            ctx.set_materialize_grads(False)

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad
        # saved_tensors is read once: checkpointing allows it a single time
        values = (*ctx.saved_tensors, *ctx.constants, *grads, *pick_needs(needed))
        if gradient.again is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            named = dict(zip(names, values, strict=True))
            computed = gradient.again([needed[i] for i in targets_at], **named)
        else:
            computed = operator(*in_order(values))
            computed = computed if isinstance(computed, tuple) else (computed,)
        out: list[Tensor | None] = [None] * len(needed)
        for i, x in zip(targets_at, computed, strict=True):
            out[i] = x if needed[i] else None
        return tuple(out)

    return save, backward if gradient.again is not None else once_differentiable(backward)


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
