"""Operators with a schema, a fake implementation and an explicit backward, and the choice of one.

The causal form is one operator for torch.compile: its number of chunks depends on the length, and
its backward is written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ndlightnet.ops import parallel
from ndlightnet.ops._once import once
from ndlightnet.ops._support import supported
from ndlightnet.ops.lrpe import Lrpe
from ndlightnet.ops.state import State

Impl = Literal["auto", "torch", "triton", "reference"]


def choose(
    impl: Impl, operation: str, x: Tensor, v: Tensor | None = None, lrpe: Lrpe | None = None,
    others: Sequence[Tensor] = (),
) -> str:  # fmt: skip
    """The implementation that runs; arguments as of `supported`. An explicit wish is never replaced
    by another one, but no kernel is launched over nothing: torch makes the empty results."""
    if impl not in ("auto", "torch", "triton", "reference"):
        raise ValueError(f"impl={impl!r}: expected 'auto', 'torch', 'triton' or 'reference'")
    if impl in ("torch", "reference") or (impl == "auto" and not x.is_cuda):
        return "torch" if impl == "auto" else impl
    support = supported(operation, x, v, *others, lrpe=lrpe)
    if impl == "triton" and not support:
        raise ValueError(f"impl='triton': no kernel for {operation} with {support.reason}")
    empty = any(one is not None and one.numel() == 0 for one in (x, v, *others))
    return "triton" if support and not empty else "torch"


@torch.library.custom_op("ndlightnet::causal", mutates_args=())
def causal(
    f: Tensor, k: Tensor, v: Tensor, w: Tensor | None, top: Tensor, total: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query features, keys, values, key factors and a State -> output and State; see
    parallel.py."""
    out, state = parallel.causal(f, k, v, w, State(top, total, memory))
    return (out.contiguous(), *state)


@causal.register_fake
def _(
    f: Tensor, k: Tensor, v: Tensor, w: Tensor | None, top: Tensor, total: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    acc = parallel.accumulator(k)
    state = [x.new_empty(x.shape, dtype=acc) for x in (top, total, memory)]
    return (v.new_empty(v.shape, dtype=acc), state[0], state[1], state[2])


@torch.library.custom_op("ndlightnet::causal_backward", mutates_args=())
def causal_backward(
    f: Tensor, k: Tensor, v: Tensor, w: Tensor | None, top: Tensor, total: Tensor, memory: Tensor,
    dout: Tensor, dtotal: Tensor, dmemory: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    state = State(top, total, memory)
    grads = parallel.causal_backward(f, k, v, w, state, dout, dtotal, dmemory)
    a, b, c, d, e, g = (x.contiguous() for x in grads)
    return a, b, c, d, e, g


@causal_backward.register_fake
def _(
    f: Tensor, k: Tensor, v: Tensor, w: Tensor | None, top: Tensor, total: Tensor, memory: Tensor,
    dout: Tensor, dtotal: Tensor, dmemory: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    acc = parallel.accumulator(k)
    dw = f.new_empty(0, dtype=acc) if w is None else w.new_empty(w.shape, dtype=acc)
    return (
        f.new_empty(f.shape), k.new_empty(k.shape), v.new_empty(v.shape), dw,
        total.new_empty(total.shape, dtype=acc), memory.new_empty(memory.shape, dtype=acc),
    )  # fmt: skip


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs)
    ctx.mark_non_differentiable(output[1])


@once
def _backward(ctx: Any, dout: Tensor, _: Tensor, dtotal: Tensor, dmemory: Tensor) -> Any:
    saved = ctx.saved_tensors  # once: checkpointing lets them be unpacked a single time
    df, dk, dv, dw, dsum0, dmemory0 = causal_backward(*saved, dout, dtotal, dmemory)
    w = saved[3]
    return df, dk, dv, None if w is None else dw.to(w.dtype), None, dsum0, dmemory0


causal.register_autograd(_backward, setup_context=_save)
