"""The doors to ndlightnet_kernels: operators with schemas, fakes and explicit backwards, and what
the kernels support. The kernels are imported when they are called, not before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ndlightnet.ops.lrpe import Lrpe

OPERATIONS = (
    "summarize", "read", "global_attention", "causal_attention", "attention_step", "axis_scan",
    "norm_gate",
)  # fmt: skip
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_CHANNELS, MOST_ROW, MOST_AXES = 256, 4096, 8


@dataclass(frozen=True)
class Support:
    """Whether there is a kernel; false with the reason why not."""

    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason


def _device_reason(device: torch.device) -> str:
    return _device_reason_once(device)


# what torch.compiler.assume_constant_result does, but without importing torch._dynamo and Triton
_device_reason._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _device_reason_once(device: torch.device) -> str:
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return "" if major >= 8 else f"compute capability {major}.{minor}: expected 8.0 or more"
    from ndlightnet_kernels import interpreted

    if device.type == "cpu" and interpreted():
        return ""
    return f"tensors on {device.type}: expected cuda"


def supported(
    operation: str, x: Tensor, v: Tensor | None = None, *, lrpe: Lrpe | None = None
) -> Support:
    """Whether `operation`, a name in ndlightnet.ops, has a Triton kernel for these tensors.

    x: queries or keys (batch, length, heads, dim), or tokens (batch, *grid, dim) for "axis_scan",
    (..., dim) for "norm_gate". v: values. A Support is true, or false with a `reason`.
    """
    if operation not in OPERATIONS:
        raise ValueError(f"operation={operation!r}: expected one of {', '.join(OPERATIONS)}")
    if reason := _device_reason(x.device):
        return Support(reason)
    dtypes = {x.dtype} | ({v.dtype} if v is not None else set())
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        names = " and ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        return Support(f"{names}: expected bfloat16, float16 or float32, the same for all")
    axes = x.ndim - 2 if operation == "axis_scan" else len(lrpe.shape) if lrpe else 1
    if axes > MOST_AXES:
        return Support(f"{axes} axes: expected {MOST_AXES} or fewer")
    if operation == "norm_gate":
        return Support(
            f"{x.shape[-1]} channels: expected {MOST_ROW} or fewer"
            if x.shape[-1] > MOST_ROW
            else ""
        )
    if operation == "axis_scan":
        from ndlightnet_kernels import axis_scan

        return Support(axis_scan.supported(x))
    if operation == "attention_step" and torch.is_grad_enabled() and x.requires_grad:
        return Support("a gradient: the kernel of a step has no backward; use torch.no_grad()")
    wide = max(x.shape[-1], 0 if v is None else v.shape[-1])
    if wide > MOST_CHANNELS:
        return Support(f"{wide} channels a head: expected {MOST_CHANNELS} or fewer")
    if lrpe is not None and lrpe.kind == "rotary":
        if operation in ("causal_attention", "attention_step"):
            return Support(f"kind='rotary' in {operation}: expected 'cosine' or no lrpe")
        if x.shape[-1] % 2:
            return Support(f"kind='rotary' and {x.shape[-1]} channels: expected an even number")
    return Support()


# ------------------------------------------------------------------------------------- MD-LRPE
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
        if lrpe is None:
            return Angles()
        start = None
        if lrpe.start is not None:  # by torch.full: no copy from the host, so it can be captured
            device = lrpe.theta.device
            parts = [
                s.to(device, torch.int64).reshape(())
                if isinstance(s, Tensor)
                else torch.full((), s, dtype=torch.int64, device=device)
                for s in lrpe.start
            ]
            start = torch.stack(parts)
        return Angles(lrpe.theta, start, lrpe.kind, lrpe.shape, lrpe.prefix)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.theta, self.start, self.kind, self.shape, self.prefix, self.window

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


# -------------------------------------------------------------------------------------- global
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
    batch, _, heads, dim = k.shape
    rows = dim if kind == "none" else 2 * dim
    total = k.new_empty(batch, heads, dim, dtype=torch.float32)
    memory = k.new_empty(batch, heads, rows, v.shape[-1], dtype=torch.float32)
    return total, torch.empty_like(total), memory


@torch.library.custom_op("ndlightnet::triton_summarize_backward", mutates_args=())
def triton_summarize_backward(
    k: Tensor, v: Tensor, keep: Tensor | None, top: Tensor, dtotal: Tensor, dmemory: Tensor,
    theta: Tensor | None, start: Tensor | None, kind: str, shape: Sequence[int], prefix: int,
    window: Sequence[int], learn: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from ndlightnet_kernels import attention_backward

    place = _place(theta, start, kind, shape, prefix, window)
    return attention_backward.summarize_backward(k, v, keep, top, dtotal, dmemory, place, learn)


def _slots(theta: Tensor | None, learn: bool) -> int:
    return theta.shape[1] if learn and theta is not None else 0


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
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, top: Tensor, total: Tensor,
    memory: Tensor, theta: Tensor | None, start: Tensor | None, kind: str,
    shape: Sequence[int], prefix: int, window: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, final State (max, sum, memory), and for the backward the States of all segments."""
    from ndlightnet_kernels import causal

    place = _place(theta, start, kind, shape, prefix, window)
    out, last, entry = causal.forward(q, k, v, keep, (top, total, memory), place)
    return out, *last, *entry  # type: ignore[return-value]


@triton_causal.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, top: Tensor, total: Tensor,
    memory: Tensor, theta: Tensor | None, start: Tensor | None, kind: str,
    shape: Sequence[int], prefix: int, window: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from ndlightnet_kernels import causal

    parts, rows = causal.cut(k, v.shape[-1])[0], k.shape[0] * k.shape[2]
    entry = [top.new_empty(rows, parts + 1, *x.shape[2:]) for x in (top, total, memory)]
    flag = top.new_empty(rows, parts, dtype=torch.int32)
    last = [torch.empty_like(x) for x in (top, total, memory)]
    out = q.new_empty(v.shape)
    return out, last[0], last[1], last[2], entry[0], entry[1], entry[2], flag


@torch.library.custom_op("ndlightnet::triton_causal_backward", mutates_args=())
def triton_causal_backward(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, top: Tensor, total: Tensor,
    memory: Tensor, flag: Tensor, dout: Tensor, dtotal: Tensor, dmemory: Tensor,
    theta: Tensor | None, start: Tensor | None, kind: str, shape: Sequence[int], prefix: int,
    window: Sequence[int], learn: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from ndlightnet_kernels import causal_backward

    place, entry = _place(theta, start, kind, shape, prefix, window), (top, total, memory, flag)
    return causal_backward.backward(  # type: ignore[return-value]
        q, k, v, keep, entry, place, dout, dtotal, dmemory, learn
    )


@triton_causal_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, top: Tensor, total: Tensor,
    memory: Tensor, flag: Tensor, dout: Tensor, dtotal: Tensor, dmemory: Tensor,
    theta: Tensor | None, start: Tensor | None, kind: str, shape: Sequence[int], prefix: int,
    window: Sequence[int], learn: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    dtheta = q.new_empty(q.shape[2], _slots(theta, learn), dtype=torch.float32)
    return dq, dk, dv, dtotal.new_empty(dtotal.shape), dmemory.new_empty(dmemory.shape), dtheta


def _causal_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, keep, _, _, _, theta, start, *ctx.where = inputs
    ctx.save_for_backward(q, k, v, keep, theta, start, *output[4:])
    ctx.mark_non_differentiable(output[1], *output[4:])


def _causal_grads(
    ctx: Any, dout: Tensor, _: Tensor, dtotal: Tensor, dmemory: Tensor, *__: Tensor
) -> Any:
    q, k, v, keep, theta, start, *entry = ctx.saved_tensors
    learn = theta is not None and ctx.needs_input_grad[7]
    dq, dk, dv, dsum0, dmemory0, dtheta = triton_causal_backward(
        q, k, v, keep, *entry, dout, dtotal, dmemory, theta, start, *ctx.where, learn
    )
    dtheta = _fit(dtheta, theta) if learn else None
    return dq, dk, dv, None, None, dsum0, dmemory0, dtheta, *[None] * 5


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


# ------------------------------------------------------------------------------ output norm, gate
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


def _norm_gate_grads(ctx: Any, dout: Tensor, *_: Tensor) -> Any:
    return *triton_norm_gate_backward(dout, *ctx.saved_tensors), None


triton_norm_gate.register_autograd(_norm_gate_grads, setup_context=_norm_gate_save)


# -------------------------------------------------------------------------------------- MD-TPE
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


def _axis_scan_grads(ctx: Any, dy: Tensor) -> Any:
    saved = ctx.saved_tensors
    dx, dcoef, dlog, drcoef, drlog = triton_axis_scan_backward(dy, *saved, ctx.residual)
    back = (None, None) if saved[3] is None else (drcoef, drlog)
    return dx, dcoef, dlog, *back, None, None


triton_axis_scan.register_autograd(_axis_scan_grads, setup_context=_axis_scan_save)
