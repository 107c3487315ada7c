"""The doors to ndlightnet_kernels' MD-TPE, norm and gate: operators with schemas, fakes and
backwards. The kernels are imported when they are called, not before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ndlightnet.ops._once import once


@torch.library.custom_op("ndlightnet::triton_norm_gate", mutates_args=())
def triton_norm_gate(
    y: Tensor, u: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    from ndlightnet_kernels import gate

    return gate.norm_gate(y, u, weight, bias, eps)


@triton_norm_gate.register_fake
def _(
    y: Tensor, u: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    mean = y.new_empty(y.shape[:-1], dtype=torch.float32)
    return y.new_empty(y.shape), mean, torch.empty_like(mean)


@torch.library.custom_op("ndlightnet::triton_norm_gate_backward", mutates_args=())
def triton_norm_gate_backward(
    dout: Tensor, y: Tensor, u: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from ndlightnet_kernels import gate

    return gate.norm_gate_backward(dout, y, u, weight, bias, mean, rstd)


@triton_norm_gate_backward.register_fake
def _(
    dout: Tensor, y: Tensor, u: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grads = [x.new_empty(x.shape) for x in (y, u, weight, bias)]
    return grads[0], grads[1], grads[2], grads[3]


def _norm_gate_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:4], *output[1:])
    ctx.mark_non_differentiable(*output[1:])


@once
def _norm_gate_grads(ctx: Any, dout: Tensor, *_: Tensor) -> Any:
    return *triton_norm_gate_backward(dout, *ctx.saved_tensors), None


triton_norm_gate.register_autograd(_norm_gate_grads, setup_context=_norm_gate_save)


@torch.library.custom_op("ndlightnet::triton_axis_scan", mutates_args=())
def triton_axis_scan(
    x: Tensor, coef: Tensor, log_decay: Tensor, rcoef: Tensor | None, rlog_decay: Tensor | None,
    mask: Tensor | None, residual: bool,
) -> Tensor:  # fmt: skip
    from ndlightnet_kernels import axis_scan

    return axis_scan.forward(x, coef, log_decay, rcoef, rlog_decay, mask, residual)


@triton_axis_scan.register_fake
def _(
    x: Tensor, coef: Tensor, log_decay: Tensor, rcoef: Tensor | None, rlog_decay: Tensor | None,
    mask: Tensor | None, residual: bool,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape)


@torch.library.custom_op("ndlightnet::triton_axis_scan_backward", mutates_args=())
def triton_axis_scan_backward(
    dy: Tensor, x: Tensor, coef: Tensor, log_decay: Tensor, rcoef: Tensor | None,
    rlog_decay: Tensor | None, mask: Tensor | None, residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients; those of the way back are empty where there is none."""
    from ndlightnet_kernels import axis_scan

    grads = axis_scan.backward(dy, x, coef, log_decay, rcoef, rlog_decay, mask, residual)
    dx, dcoef, dlog, drcoef, drlog = grads
    none = coef.new_empty(0)
    return (
        dx,
        dcoef,
        dlog,
        none if drcoef is None else drcoef,
        (torch.empty_like(none) if drlog is None else drlog),
    )


@triton_axis_scan_backward.register_fake
def _(
    dy: Tensor, x: Tensor, coef: Tensor, log_decay: Tensor, rcoef: Tensor | None,
    rlog_decay: Tensor | None, mask: Tensor | None, residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dcoef, dlog = coef.new_empty(coef.shape), log_decay.new_empty(log_decay.shape)
    back = [x.new_empty(x.shape if rcoef is not None else 0) for x in (coef, log_decay)]
    return x.new_empty(x.shape), dcoef, dlog, back[0], back[1]


def _axis_scan_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.residual = inputs
    ctx.save_for_backward(*tensors)


@once
def _axis_scan_grads(ctx: Any, dy: Tensor) -> Any:
    saved = ctx.saved_tensors
    dx, dcoef, dlog, drcoef, drlog = triton_axis_scan_backward(dy, *saved, ctx.residual)
    back = (None, None) if saved[3] is None else (drcoef, drlog)
    return dx, dcoef, dlog, *back, None, None


triton_axis_scan.register_autograd(_axis_scan_grads, setup_context=_axis_scan_save)
