"""The Triton form of causal attention to the last tokens, as in _triton.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ndlightnet.ops._operator import Operator
from ndlightnet.ops.lightnet._triton import Flat, _dtheta, _fit, _like, _save, _saved
from ndlightnet_kernels.position import FIELDS, SCHEMA


def _window(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, forget: Tensor | None, window: int, *position: Any
) -> Any:
    """Return the output and, for the backward, anchors and flags of chunks. forget: decay rates
    (heads,) float32."""
    from ndlightnet_kernels import window as kernels

    return kernels.forward(q, k, v, mask, forget, window, Flat(*position))


def _window_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    from ndlightnet_kernels.plans import windowed

    chunk = windowed(k, v.shape[-1], Flat(*rest[-FIELDS:]).kind).forward.chunk
    rows, chunks = k.shape[0] * k.shape[2], -(-k.shape[1] // chunk)
    top = k.new_empty(rows, chunks, k.shape[3], dtype=torch.float32)
    return q.new_empty(v.shape), top, k.new_empty(rows, chunks, dtype=torch.int32)


def _window_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    forget: Tensor | None,
    top: Tensor,
    flag: Tensor,
    dout: Tensor,
    window: int,
    learn: bool,
    *position: Any,
) -> Any:
    from ndlightnet_kernels import window_backward as kernels

    given = (q, k, v, mask, forget, top, flag, dout, window)
    return kernels.backward(*given, Flat(*position), learn)


def _window_backward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    return *_like(q, k, v), _dtheta(q, rest)


def _window_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.window = inputs[5]
    _save(ctx, inputs[6:], *inputs[:5], *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _window_grads(ctx: Any, dout: Tensor, *_: None) -> Any:
    tensors, where, learn = _saved(ctx)
    dq, dk, dv, dtheta = window_backward(*tensors, dout, ctx.window, learn, *where)
    return dq, dk, dv, None, None, None, *_fit(dtheta, where.theta, learn)


window_backward = Operator(
    "window_attention_backward(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? forget, "
    f"Tensor top, Tensor flag, Tensor dout, SymInt window, bool learn, {SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _window_backward,
    _window_backward_fake,
)
window_operator = Operator(
    "window_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? forget, SymInt window, "
    f"{SCHEMA}) -> (Tensor, Tensor, Tensor)",
    _window,
    _window_fake,
    _window_save,
    _window_grads,
)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, forget: Tensor | None, window: int, where: Flat
) -> Tensor:
    """Run the operator. Heads too wide for a program go in blocks of key channels, which add up.
    forget: decay rates (heads,) float32, or None."""
    from ndlightnet_kernels import plans

    blocks = plans.channel_blocks(k, v.shape[-1])
    if len(blocks) == 1:
        out: Tensor = window_operator(q, k, v, mask, forget, window, *where)[0]
        return out
    parts = (
        window_operator(q[..., block], k[..., block], v, mask, forget, window, *where.slots(block))[0].float()
        for block in blocks
    )
    return torch.stack(list(parts)).sum(0).to(q.dtype)
