"""The doors to ndlightnet_kernels' attention: operators with schemas, fakes and explicit
backwards. The kernels are imported when they are called, not before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ndlightnet.ops._once import once
from ndlightnet.ops.lrpe import Lrpe, columns


@dataclass(frozen=True)
class Angles:
    """MD-LRPE as the kernels take it. window: the first slot of theta and the number of all, where
    theta holds a part of them."""

    theta: Tensor | None = None
    start: Tensor | None = None
    kind: str = "none"
    shape: tuple[int, ...] = ()
    prefix: int = 0
    window: tuple[int, int] = (0, 0)

    @staticmethod
    def of(lrpe: Lrpe | None) -> Angles:
        """With starts (1 or batch, 2 axes): see Place."""
        if lrpe is None:
            return Angles()
        start = None
        if lrpe.start is not None:
            device, none = lrpe.theta.device, (0,) * len(lrpe.shape)
            parts = columns(lrpe.start, device)
            same = lrpe.origin is lrpe.start
            parts += parts if same else columns(lrpe.origin or none, device)
            start = torch.stack(torch.broadcast_tensors(*parts), 1)
        return Angles(lrpe.theta, start, lrpe.kind, lrpe.shape, lrpe.prefix)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.theta, self.start, self.kind, self.shape, self.prefix, self.window

    def frames(self, batch: int, frames: int) -> Angles:
        """Each frame as a sample of its own."""
        if self.theta is None:
            return self
        axes, start = len(self.shape), self.start
        place = torch.arange(frames, device=self.theta.device)[:, None]
        if start is None:
            start = torch.nn.functional.pad(place, (0, axes - 1)).int()
        else:
            start = start[:, None] + torch.nn.functional.pad(place, (0, 2 * axes - 1))
        start = start.expand(batch, frames, -1).reshape(batch * frames, -1).contiguous()
        return replace(self, start=start, shape=(1, *self.shape[1:]))

    def slots(self, block: slice) -> Angles:
        """For a block of channels of kind "cosine"."""
        if self.theta is None:
            return self
        window = (block.start, self.theta.shape[1])
        return replace(self, theta=self.theta[:, block], window=window)


def _place(
    theta: Tensor | None, start: Tensor | None, kind: str, shape: Sequence[int], prefix: int,
    window: Sequence[int],
) -> Any:  # fmt: skip
    from ndlightnet_kernels.tiles import Place

    return Place(kind, theta, start, tuple(shape), prefix, (window[0], window[1]))


def _fit(dtheta: Tensor, theta: Tensor | None) -> Tensor | None:
    """Gradient of (heads or 1, slots) angles from that of each head."""
    return None if theta is None else dtheta.sum_to_size(theta.shape).to(theta.dtype)


def _fake_state(k: Tensor, v: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    batch, _, heads, dim = k.shape
    rows = dim if kind == "none" else 2 * dim
    total = k.new_empty(batch, heads, dim, dtype=torch.float32)
    memory = k.new_empty(batch, heads, rows, v.shape[-1], dtype=torch.float32)
    return total, torch.empty_like(total), memory


def _slots(theta: Tensor | None, learn: bool) -> int:
    return theta.shape[1] if learn and theta is not None else 0


# -------------------------------------------------------------------------------------- global
@torch.library.custom_op("ndlightnet::triton_global", mutates_args=())
def triton_global(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, theta: Tensor | None,
    start: Tensor | None, kind: str, shape: Sequence[int], prefix: int, window: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, and for the backward the State (max, sum, memory)."""
    from ndlightnet_kernels import attention

    place = _place(theta, start, kind, shape, prefix, window)
    top, total, memory = attention.summarize(k, v, keep, place)
    return attention.read(q, total, memory, place), top, total, memory


@triton_global.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, theta: Tensor | None,
    start: Tensor | None, kind: str, shape: Sequence[int], prefix: int, window: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(*q.shape[:3], v.shape[-1]), *_fake_state(k, v, kind)


@torch.library.custom_op("ndlightnet::triton_global_backward", mutates_args=())
def triton_global_backward(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, top: Tensor, total: Tensor,
    memory: Tensor, dout: Tensor, theta: Tensor | None, start: Tensor | None, kind: str,
    shape: Sequence[int], prefix: int, window: Sequence[int], learn: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from ndlightnet_kernels import attention_backward as kernels

    place = _place(theta, start, kind, shape, prefix, window)
    dq, dtotal, dmemory, by_q = kernels.read_backward(q, total, memory, dout, place, learn)
    dk, dv, by_k = kernels.summarize_backward(k, v, keep, top, dtotal, dmemory, place, learn)
    return dq, dk, dv, by_q + by_k


@triton_global_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, top: Tensor, total: Tensor,
    memory: Tensor, dout: Tensor, theta: Tensor | None, start: Tensor | None, kind: str,
    shape: Sequence[int], prefix: int, window: Sequence[int], learn: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(q.shape[2], _slots(theta, learn), dtype=torch.float32)


def _global_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, keep, theta, start, *ctx.where = inputs
    ctx.save_for_backward(q, k, v, keep, theta, start, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


@once
def _global_grads(ctx: Any, dout: Tensor, *_: Tensor) -> Any:
    q, k, v, keep, theta, start, *state = ctx.saved_tensors
    learn = theta is not None and ctx.needs_input_grad[4]
    dq, dk, dv, dtheta = triton_global_backward(
        q, k, v, keep, *state, dout, theta, start, *ctx.where, learn
    )
    return dq, dk, dv, None, _fit(dtheta, theta) if learn else None, *[None] * 5


triton_global.register_autograd(_global_grads, setup_context=_global_save)


# ----------------------------------------------------------------------------- State and queries
@torch.library.custom_op("ndlightnet::triton_summarize", mutates_args=())
def triton_summarize(
    k: Tensor, v: Tensor, keep: Tensor | None, theta: Tensor | None, start: Tensor | None,
    kind: str, shape: Sequence[int], prefix: int, window: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from ndlightnet_kernels import attention

    return attention.summarize(k, v, keep, _place(theta, start, kind, shape, prefix, window))


@triton_summarize.register_fake
def _(
    k: Tensor, v: Tensor, keep: Tensor | None, theta: Tensor | None, start: Tensor | None,
    kind: str, shape: Sequence[int], prefix: int, window: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _fake_state(k, v, kind)


@torch.library.custom_op("ndlightnet::triton_summarize_backward", mutates_args=())
def triton_summarize_backward(
    k: Tensor, v: Tensor, keep: Tensor | None, top: Tensor, dtotal: Tensor, dmemory: Tensor,
    theta: Tensor | None, start: Tensor | None, kind: str, shape: Sequence[int], prefix: int,
    window: Sequence[int], learn: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from ndlightnet_kernels import attention_backward

    place = _place(theta, start, kind, shape, prefix, window)
    return attention_backward.summarize_backward(k, v, keep, top, dtotal, dmemory, place, learn)


@triton_summarize_backward.register_fake
def _(
    k: Tensor, v: Tensor, keep: Tensor | None, top: Tensor, dtotal: Tensor, dmemory: Tensor,
    theta: Tensor | None, start: Tensor | None, kind: str, shape: Sequence[int], prefix: int,
    window: Sequence[int], learn: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dtheta = k.new_empty(k.shape[2], _slots(theta, learn), dtype=torch.float32)
    return k.new_empty(k.shape), v.new_empty(v.shape), dtheta


def _summarize_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    k, v, keep, theta, start, *ctx.where = inputs
    ctx.save_for_backward(k, v, keep, theta, start, output[0])
    ctx.mark_non_differentiable(output[0])


@once
def _summarize_grads(ctx: Any, _: Tensor, dtotal: Tensor, dmemory: Tensor) -> Any:
    k, v, keep, theta, start, top = ctx.saved_tensors
    learn = theta is not None and ctx.needs_input_grad[3]
    dk, dv, dtheta = triton_summarize_backward(
        k, v, keep, top, dtotal, dmemory, theta, start, *ctx.where, learn
    )
    return dk, dv, None, _fit(dtheta, theta) if learn else None, *[None] * 5


triton_summarize.register_autograd(_summarize_grads, setup_context=_summarize_save)


@torch.library.custom_op("ndlightnet::triton_read", mutates_args=())
def triton_read(
    q: Tensor, total: Tensor, memory: Tensor, theta: Tensor | None, start: Tensor | None,
    kind: str, shape: Sequence[int], prefix: int, window: Sequence[int],
) -> Tensor:  # fmt: skip
    from ndlightnet_kernels import attention

    return attention.read(q, total, memory, _place(theta, start, kind, shape, prefix, window))


@triton_read.register_fake
def _(
    q: Tensor, total: Tensor, memory: Tensor, theta: Tensor | None, start: Tensor | None,
    kind: str, shape: Sequence[int], prefix: int, window: Sequence[int],
) -> Tensor:  # fmt: skip
    return q.new_empty(*q.shape[:3], memory.shape[-1])


@torch.library.custom_op("ndlightnet::triton_read_backward", mutates_args=())
def triton_read_backward(
    q: Tensor, total: Tensor, memory: Tensor, dout: Tensor, theta: Tensor | None,
    start: Tensor | None, kind: str, shape: Sequence[int], prefix: int, window: Sequence[int],
    learn: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from ndlightnet_kernels import attention_backward

    place = _place(theta, start, kind, shape, prefix, window)
    return attention_backward.read_backward(q, total, memory, dout, place, learn)


@triton_read_backward.register_fake
def _(
    q: Tensor, total: Tensor, memory: Tensor, dout: Tensor, theta: Tensor | None,
    start: Tensor | None, kind: str, shape: Sequence[int], prefix: int, window: Sequence[int],
    learn: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dtheta = q.new_empty(q.shape[2], _slots(theta, learn), dtype=torch.float32)
    return (
        q.new_empty(q.shape),
        total.new_empty(total.shape),
        memory.new_empty(memory.shape),
        dtheta,
    )


def _read_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, total, memory, theta, start, *ctx.where = inputs
    ctx.save_for_backward(q, total, memory, theta, start)


@once
def _read_grads(ctx: Any, dout: Tensor) -> Any:
    q, total, memory, theta, start = ctx.saved_tensors
    learn = theta is not None and ctx.needs_input_grad[3]
    dq, dtotal, dmemory, dtheta = triton_read_backward(
        q, total, memory, dout, theta, start, *ctx.where, learn
    )
    return dq, dtotal, dmemory, _fit(dtheta, theta) if learn else None, *[None] * 5


triton_read.register_autograd(_read_grads, setup_context=_read_save)


# -------------------------------------------------------------------------------------- causal
@torch.library.custom_op("ndlightnet::triton_causal", mutates_args=())
def triton_causal(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, top: Tensor | None,
    total: Tensor | None, memory: Tensor | None, theta: Tensor | None, start: Tensor | None,
    kind: str, shape: Sequence[int], prefix: int, window: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, final State (max, sum, memory), and for the backward the States of all segments.
    Without a first State (top, total, memory) it is empty."""
    from ndlightnet_kernels import causal

    place = _place(theta, start, kind, shape, prefix, window)
    out, last, entry = causal.forward(q, k, v, keep, (top, total, memory), place)
    return out, *last, *entry  # type: ignore[return-value]


@triton_causal.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, top: Tensor | None,
    total: Tensor | None, memory: Tensor | None, theta: Tensor | None, start: Tensor | None,
    kind: str, shape: Sequence[int], prefix: int, window: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from ndlightnet_kernels import plans

    parts, rows = plans.cut(k, v.shape[-1], kind)[0], k.shape[0] * k.shape[2]
    last = _fake_state(k, v, kind)
    states = zip(last, (parts + 1, parts, parts), strict=True)
    entry = [x.new_empty(rows, n, *x.shape[2:]) for x, n in states]
    flag = k.new_empty(rows, parts, dtype=torch.int32)
    return q.new_empty(v.shape), *last, entry[0], entry[1], entry[2], flag


@torch.library.custom_op("ndlightnet::triton_causal_backward", mutates_args=())
def triton_causal_backward(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, top: Tensor, total: Tensor,
    memory: Tensor, flag: Tensor, dout: Tensor, dtotal: Tensor | None, dmemory: Tensor | None,
    theta: Tensor | None, start: Tensor | None, kind: str, shape: Sequence[int], prefix: int,
    window: Sequence[int], past: bool, learn: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from ndlightnet_kernels import causal_backward

    place, entry = _place(theta, start, kind, shape, prefix, window), (top, total, memory, flag)
    return causal_backward.backward(  # type: ignore[return-value]
        q, k, v, keep, entry, place, dout, dtotal, dmemory, past, learn
    )


@triton_causal_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, top: Tensor, total: Tensor,
    memory: Tensor, flag: Tensor, dout: Tensor, dtotal: Tensor | None, dmemory: Tensor | None,
    theta: Tensor | None, start: Tensor | None, kind: str, shape: Sequence[int], prefix: int,
    window: Sequence[int], past: bool, learn: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    _, dtotal0, dmemory0 = _fake_state(k, v, kind)
    dtheta = q.new_empty(q.shape[2], _slots(theta, learn), dtype=torch.float32)
    if past:
        return dq, dk, dv, dtotal0, dmemory0, dtheta
    return dq, dk, dv, dtotal0.new_empty(0), dtotal0.new_empty(0), dtheta


def _causal_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, keep, top, _, _, theta, start, *ctx.where = inputs
    ctx.past = top is not None
    ctx.save_for_backward(q, k, v, keep, theta, start, *output[4:])
    ctx.mark_non_differentiable(output[1], *output[4:])
    ctx.set_materialize_grads(False)  # mostly nothing depends on the final State


@once
def _causal_grads(
    ctx: Any, dout: Tensor | None, _: None, dtotal: Tensor | None, dmemory: Tensor | None,
    *__: None,
) -> Any:  # fmt: skip
    q, k, v, keep, theta, start, *entry = ctx.saved_tensors
    dout = torch.zeros_like(v, dtype=q.dtype) if dout is None else dout
    learn = theta is not None and ctx.needs_input_grad[7]
    dq, dk, dv, dsum0, dmemory0, dtheta = triton_causal_backward(
        q, k, v, keep, *entry, dout, dtotal, dmemory, theta, start, *ctx.where, ctx.past, learn
    )
    past = (None, dsum0, dmemory0) if ctx.past else (None, None, None)
    return dq, dk, dv, None, *past, _fit(dtheta, theta) if learn else None, *[None] * 5


triton_causal.register_autograd(_causal_grads, setup_context=_causal_save)


# ---------------------------------------------------------------------------------------- step
@torch.library.custom_op("ndlightnet::triton_step", mutates_args=())
def triton_step(
    q: Tensor, k: Tensor, v: Tensor, top: Tensor, total: Tensor, memory: Tensor,
    theta: Tensor | None, start: Tensor | None, kind: str, shape: Sequence[int], prefix: int,
    window: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from ndlightnet_kernels import step

    place = _place(theta, start, kind, shape, prefix, window)
    return step.step(q, k, v, top, total, memory, place)


@triton_step.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, top: Tensor, total: Tensor, memory: Tensor,
    theta: Tensor | None, start: Tensor | None, kind: str, shape: Sequence[int], prefix: int,
    window: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    state = [x.new_empty(x.shape) for x in (top, total, memory)]
    return q.new_empty(v.shape), state[0], state[1], state[2]
