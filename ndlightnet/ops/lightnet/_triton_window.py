"""The Triton form of causal attention to the last tokens, as in _triton.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ndlightnet.ops._operator import Gradient, Operator
from ndlightnet.ops.lightnet._triton import _theta_gradient
from ndlightnet_kernels.position import FIELDS, SCHEMA, FlatPosition


def _window(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, forget: Tensor | None, window: int, *fields: Any
) -> Any:
    """Return the output and, for the backward, anchors and flags of chunks. forget: decay rates (heads,) float32."""
    from ndlightnet_kernels import window as kernels

    return kernels.forward(q, k, v, mask, forget, window, FlatPosition(*fields))


def _window_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    from ndlightnet_kernels.plans import windowed

    chunk = windowed(k, v.shape[-1], FlatPosition(*rest[-FIELDS:]).kind).forward.chunk
    rows, chunks = k.shape[0] * k.shape[2], -(-k.shape[1] // chunk)
    top = k.new_empty(rows, chunks, k.shape[3], dtype=torch.float32)
    return q.new_empty(v.shape), top, k.new_empty(rows, chunks, dtype=torch.int32)


def _window_backward(*inputs: Any) -> Any:
    from ndlightnet_kernels import window_backward as kernels

    learn, position = inputs[-FIELDS - 1], FlatPosition(*inputs[-FIELDS:])
    arguments = (*inputs[: -FIELDS - 1], position, learn)
    *grads, dtheta = kernels.backward(*arguments)
    return *grads, _theta_gradient(dtheta, position.theta, learn)


def _flops(q: Sequence[int], v: Sequence[int], window: int, kind: str, **_: Any) -> int:
    """Scores of each token and the last ones, and their sums of values, as in a kernel."""
    scores = math.prod(q[:-1]) * min(window, q[1])
    return 2 * scores * ((1 if kind == "none" else 2) * q[-1] + v[-1])


INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? forget"
window_operator = Operator(
    f"window_attention({INPUTS}, SymInt window, {SCHEMA}) -> (Tensor out, Tensor top, Tensor flag)",
    _window,
    _window_fake,
    Gradient(
        f"window_attention_backward({INPUTS}, Tensor top, Tensor flag, Tensor dout, SymInt window, bool needs_theta, "
        f"{SCHEMA}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dtheta)",
        _window_backward,
    ),
    flops=_flops,
)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, forget: Tensor | None, window: int, position: FlatPosition
) -> Tensor:
    """Run the operator. Heads too wide for a program go in blocks of key channels, which add up.
    forget: decay rates (heads,) float32, or None."""
    from ndlightnet_kernels import plans

    blocks = plans.channel_blocks(k, v.shape[-1])
    if len(blocks) == 1:
        out: Tensor = window_operator(q, k, v, mask, forget, window, *position)[0]
        return out
    outs = [
        window_operator(q[..., block], k[..., block], v, mask, forget, window, *position.slots(block))[0].float()
        for block in blocks
    ]
    return torch.stack(outs).sum(0).to(q.dtype)
