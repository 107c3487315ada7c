"""Instance norm (Ulyanov et al. 2016, arXiv 1607.08022), a residual and SiLU, in one pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from ndlightnet.layout import Layout
from ndlightnet.ops._operator import Gradient, Operator, kernel
from ndlightnet.ops.dispatch import Impl, resolve
from ndlightnet.ops.dtypes import accumulator, finest
from ndlightnet.ops.limits import sizes_reason
from ndlightnet.ops.plain import plain
from ndlightnet.ops.recompute import dropped, recomputable
from ndlightnet.ops.recurrence.chunks import exact

MOST_CELLS = 2**31 - 2**26  # indices are 32 bits, and the last ones of a tile are beyond the row


def instance_norm_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    impl: Impl = "auto",
    *,
    layout: Layout | None = None,
) -> Tensor:
    """Return SiLU(norm(x) * weight + bias + residual), in x's dtype, under autocast too.

    norm subtracts the mean of each channel of each sample and divides by its standard deviation;
    a single cell is mapped to 0, equal cells by the kernel too, in eager torch to 1e-9 of their
    value. x, residual: (batch, channels, *space); weight, bias: (channels,). Statistics and all
    arithmetic are float32 or wider. For the gradient x and residual are kept, and at most two
    numbers for each channel; a result in eager mode, and such a residual, are `recomputable`. "auto"
    takes the kernel for contiguous x; in torch.compile, torch.

    layout: of x; of a slab the statistics are those of all slabs.
    """
    for name, y, shape in (
        ("residual", residual, x.shape),
        ("weight", weight, x.shape[1:2]),
        ("bias", bias, x.shape[1:2]),
    ):
        if y is not None and y.shape != shape:
            raise ValueError(f"{name} {tuple(y.shape)}: expected {tuple(shape)}, as x has")
    by_kernel = kernel_runs(x) if impl == "auto" else resolve("instance_norm_silu", impl, x) == "triton"
    inputs: Any = x, weight, bias, residual, eps
    if layout is not None and layout.shared:
        if not by_kernel:
            return _by_torch(x, weight, bias, residual, eps, layout)
        with dropped(residual):
            out = _SlabKernels.apply(*inputs, layout)
        return recomputable(out, _kernel_again, residual)
    if by_kernel:
        with dropped(residual):
            out = _instance_norm(*inputs)[0]
        return recomputable(out, _kernel_again, residual)
    if torch.compiler.is_compiling() or plain() or not torch.is_grad_enabled():
        return _by_torch(*inputs)  # torch.compile keeps what it finds best
    with dropped(residual):
        out = _Recomputed.apply(*inputs)
    return recomputable(out, _torch_again, residual)


def _kernel_again(node: Any) -> Tensor:
    from ndlightnet_kernels import instance_norm as kernels

    return kernels.apply_statistics(*node.saved_tensors)


def _torch_again(node: Any) -> Tensor:
    x, weight, bias, residual = node.saved_tensors
    return _by_torch(x, weight, bias, residual, node.eps)


def kernel_runs(x: Tensor) -> bool:
    """Return whether "auto" takes the kernel."""
    if torch.compiler.is_compiling() or plain() or not x.is_contiguous():
        return False  # torch.compile fuses it with what is beside it; the kernel would copy x
    return resolve("instance_norm_silu", "auto", x) == "triton"


def instance_norm_silu_(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    layout: Layout | None = None,
) -> Tensor:
    """Overwrite contiguous x with `instance_norm_silu`, by its kernel and without a gradient."""
    if layout is not None and layout.shared:
        return _slab_by_kernels(x, weight, bias, residual, eps, layout=layout, out=x)[0]
    _instance_norm_in_place(x, weight, bias, residual, eps)
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)  # autograd may hold x for an earlier operation
    return x


def instance_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, layout: Layout | None = None) -> Tensor:
    """Return norm(x) * weight + bias of `instance_norm_silu`, in torch."""
    return _normed(x, weight, bias, eps, layout).to(x.dtype)


def _normed(x: Tensor, weight: Tensor, bias: Tensor, eps: float, layout: Layout | None) -> Tensor:
    """Return `instance_norm` unrounded: group_norm rounds the statistics of 16-bit tensors to their dtype."""
    acc = accumulator(x)
    if layout is None or not layout.shared:
        with exact(x):
            return torch.group_norm(_centred(x), x.shape[1], weight.to(acc), bias.to(acc), eps)
    dims, wide = tuple(range(2, x.ndim)), x.to(acc)
    cells = math.prod(x.shape[2:])
    square, mean = torch.var_mean(wide, dims, correction=0)
    mean, variance = _sample_statistics(mean, square * cells, cells, layout)
    shape = (*x.shape[:2], *[1] * len(dims))
    scale = torch.rsqrt(variance + eps) * weight.to(acc)
    return (wide - mean.view(shape)) * scale.view(shape) + bias.to(acc).view(1, *shape[1:])


def _centred(x: Tensor) -> Tensor:
    """Return x less the mean of each row, in the statistics' dtype. group_norm computes x a +
    (b - mean a), which of cells far from 0 loses the digits that the norm keeps; Inductor
    subtracts first. The norm is the same for any centre, which needs no gradient."""
    wide = x.to(accumulator(x))
    if torch.compiler.is_compiling():
        return wide
    centre = wide.detach()
    if x.ndim > 2:
        centre = centre.mean(tuple(range(2, x.ndim)), keepdim=True)
    return wide - centre if wide is x or torch.is_grad_enabled() else wide.sub_(centre)


def _by_torch(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, eps: float, layout: Layout | None = None
) -> Tensor:
    y = _normed(x, weight, bias, eps, layout)
    if residual is not None:
        y = y + residual if plain() else y.add_(residual)
    return silu(y, inplace=not torch.is_grad_enabled()).to(x.dtype)


class _Recomputed(torch.autograd.Function):
    """`_by_torch`, computed again for its gradient, which can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        ctx.save_for_backward(*inputs[:4])
        ctx.eps = inputs[4]
        return _by_torch(*inputs)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        wants, saved = ctx.needs_input_grad[:4], ctx.saved_tensors
        x, second = saved[0], torch.is_grad_enabled()
        if second or not x.is_contiguous() or x.device.type not in ("cpu", "cuda"):
            return *by_autograd(dout, saved, ctx.eps, wants, second), None
        return *_by_formula(dout, saved, ctx.eps, wants), None


def _by_formula(dout: Tensor, saved: Sequence[Any], eps: float, wants: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight, bias, residual that are wanted. Torch's operators by name:
    a backward pass within another one is not sure to be captured in a CUDA graph."""
    x, weight, bias, residual = saved
    n, c, cells = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    with exact(x):
        x = _centred(x)
        w, b = weight.to(x.dtype), bias.to(x.dtype)
        y, mean, rstd = torch.native_group_norm(x, w, b, n, c, cells, c, eps)
        y = y if residual is None else y.add_(residual)
        dy = torch.ops.aten.silu_backward(dout.to(y.dtype), y).contiguous()
        grads = torch.ops.aten.native_group_norm_backward(dy, x, mean, rstd, w, n, c, cells, c, list(wants[:3]))
    pairs = zip((*grads, dy), saved, wants, strict=True)
    return tuple(grad.to(like.dtype) if want else None for grad, like, want in pairs)


def by_autograd(
    dout: Tensor,
    saved: Sequence[Any],
    eps: float,
    wants: Sequence[bool],
    second: bool,
    function: Callable[..., Tensor] = _by_torch,
) -> list[Tensor | None]:
    """Return the same, of `function`, differentiable if `second`."""
    # on a CPU torch 2.11 crashes where channels-last cells want no gradient
    learnt = (wants[0] or saved[0].device.type == "cpu", *wants[1:])
    with torch.enable_grad():
        # other tensors of the same numbers: x may depend on residual
        inputs: list[Any] = [
            y if y is None else y.view_as(y) if second and want else y.detach().requires_grad_(needed)
            for y, want, needed in zip(saved, wants, learnt, strict=True)
        ]
        x, weight, bias, residual = inputs
        out = function(x, weight, bias, residual, eps)
        sources = [y for y, needed in zip(inputs, learnt, strict=True) if needed]
        grads = iter(torch.autograd.grad(out, sources, dout, create_graph=second))
    computed = [next(grads) if needed else None for needed in learnt]
    return [grad if want else None for grad, want in zip(computed, wants, strict=True)]


def _overwrite(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, eps: float) -> None:
    from ndlightnet_kernels import instance_norm as kernels

    kernels.instance_norm_silu(x, weight, bias, residual, eps, out=x)


def _fake(x: Tensor, *_: Any) -> Any:
    mean = x.new_empty(x.shape[:2], dtype=torch.float32)
    return x.new_empty(x.shape), mean, torch.empty_like(mean)


def _backward_by_torch(
    needed: Sequence[bool], dout: Tensor, eps: float, x: Tensor, weight: Tensor, bias: Tensor, residual: Any, **_: Any
) -> list[Tensor | None]:
    return by_autograd(dout, (x, weight, bias, residual), eps, needed, True)


def _limits(x: Tensor, *_: Any, **__: Any) -> str:
    cells = x[:1, :1].numel()
    if reason := sizes_reason(x):
        return reason
    return f"{cells} cells: expected {MOST_CELLS} or fewer in a channel" if cells > MOST_CELLS else ""


INPUTS = "Tensor weight, Tensor bias, Tensor? residual"
_instance_norm = Operator(
    f"instance_norm_silu(Tensor x, {INPUTS}, float eps) -> (Tensor out, Tensor mean, Tensor rstd)",
    kernel("instance_norm", "instance_norm_silu"),
    _fake,
    Gradient(
        f"instance_norm_silu_backward(Tensor dout, Tensor x, {INPUTS}, Tensor mean, Tensor rstd) "
        "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dresidual)",
        kernel("instance_norm", "instance_norm_silu_backward"),
        again=_backward_by_torch,
    ),
    implementations=("torch", "triton"),
    limits=_limits,
)
_instance_norm_in_place = Operator(
    f"instance_norm_silu_(Tensor(a!) x, {INPUTS}, float eps) -> ()", _overwrite, lambda *_: None
)


# --------------------------------------------------------------- slabs, with the statistics of all
def _sample_statistics(mean: Tensor, squares: Tensor, cells: int, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return mean and variance of all slabs' cells, from the mean of this slab's cells and the sum
    of their squared deviations. Sums of squares in float64: a mean far from 0 costs no digits."""
    exact = finest(mean.device)
    slab_mean, size = mean.to(exact), layout.whole.length
    sums = layout.total(torch.stack([slab_mean * cells, squares.to(exact) + slab_mean * slab_mean * cells], 1))
    total_mean = sums[:, 0] / size
    variance = (sums[:, 1] / size - total_mean * total_mean).clamp(min=0)
    return total_mean.to(mean.dtype), variance.to(mean.dtype)


class _SlabKernels(torch.autograd.Function):
    """By the kernels of one process, with an exchange between sums and what is done with them."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        out, mean, rstd = _slab_by_kernels(*inputs)
        ctx.save_for_backward(*inputs[:4], mean, rstd)
        ctx.eps, ctx.layout = inputs[4:]
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        from ndlightnet_kernels import instance_norm as kernels

        saved = ctx.saved_tensors  # read once: checkpointing allows it a single time
        layout, cells = ctx.layout, math.prod(saved[0].shape[2:])
        if torch.is_grad_enabled():  # for a second derivative
            wants, again = ctx.needs_input_grad[:4], partial(_by_torch, layout=layout)
            return *by_autograd(dout, saved[:4], ctx.eps, wants, True, again), None, None

        def of_sample(sums: Tensor) -> Tensor:
            return layout.total(sums) * (cells / layout.whole.length)

        inputs: tuple[Any, ...] = (dout, *saved, of_sample)
        grads = kernels.instance_norm_silu_backward(*inputs)
        return *grads, None, None


def _slab_by_kernels(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    eps: float,
    layout: Layout,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, which may be written to `out`, and mean and 1 / deviation of the sample."""
    from ndlightnet_kernels import instance_norm as kernels

    def of_sample(mean: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
        return _sample_statistics(mean, squares, math.prod(x.shape[2:]), layout)

    return kernels.instance_norm_silu(x, weight, bias, residual, eps, out=out, of_whole=of_sample)
