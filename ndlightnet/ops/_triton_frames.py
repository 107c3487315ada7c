"""The door to ndlightnet_kernels' merge of many States: an operator with schema, fake and backward.
The kernels are imported when they are called, not before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ndlightnet.ops._once import once


@torch.library.custom_op("ndlightnet::triton_running", mutates_args=())
def triton_running(
    top: Tensor, total: Tensor, memory: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    from ndlightnet_kernels import frames

    return frames.running(top, total, memory, window)


@triton_running.register_fake
def _(top: Tensor, total: Tensor, memory: Tensor, window: int) -> tuple[Tensor, Tensor, Tensor]:
    out = [x.new_empty(x.shape) for x in (top, total, memory)]
    return out[0], out[1], out[2]


@torch.library.custom_op("ndlightnet::triton_running_backward", mutates_args=())
def triton_running_backward(
    top: Tensor, after: Tensor, dtotal: Tensor, dmemory: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    from ndlightnet_kernels import frames

    return frames.running_backward(top, after, dtotal, dmemory, window)


@triton_running_backward.register_fake
def _(
    top: Tensor, after: Tensor, dtotal: Tensor, dmemory: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    return dtotal.new_empty(dtotal.shape), dmemory.new_empty(dmemory.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.window = inputs[3]
    ctx.save_for_backward(inputs[0], output[0])
    ctx.mark_non_differentiable(output[0])


@once
def _grads(ctx: Any, _: Tensor, dtotal: Tensor, dmemory: Tensor) -> Any:
    return None, *triton_running_backward(*ctx.saved_tensors, dtotal, dmemory, ctx.window), None


triton_running.register_autograd(_grads, setup_context=_save)
