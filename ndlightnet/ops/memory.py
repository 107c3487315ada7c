"""The general memory recurrence: a memory (dim, value_dim) that expands, forgets and is read.

    m_t = f_t . m_(t-1) + e_t i_t^T        y_t = Re(m_t)^T s_t

with e "expand", f "forget", i "input", s "shrink". "." is the element-wise product for
`elementwise_memory` (f broadcasts to (dim, value_dim): full, row, column or scalar; real or
complex) and the matrix product for `matrix_memory` (f is (dim, dim), from the left). All recurrent
mixers of ndlightnet.nn.mixers are instances; those with a row or scalar forget, and the delta
rules, have faster forms in gated.py and delta.py.

Shapes: shrink, expand (batch, length, heads, dim), inputs (batch, length, heads, value_dim), memory
(batch, heads, dim, value_dim). Memories are float32 or wider; outputs have the inputs' dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ndlightnet.ops._once import once
from ndlightnet.ops.chunks import exact
from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.scan import Product, adjoints, before, memories

SEGMENT = 2**24  # numbers in the memories that are held at a time


def elementwise_memory(
    shrink: Tensor, expand: Tensor, forget: Tensor, inputs: Tensor, memory: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(outputs (batch, length, heads, value_dim), last memory). forget: (batch or 1, length or 1,
    heads or 1, dim or 1, value_dim or 1)."""
    return _run(shrink, expand, forget, inputs, memory, torch.mul)


def matrix_memory(
    shrink: Tensor, expand: Tensor, forget: Tensor, inputs: Tensor, memory: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(outputs (batch, length, heads, value_dim), last memory). forget: (batch or 1, length or 1,
    heads or 1, dim, dim)."""
    return _run(shrink, expand, forget, inputs, memory, torch.matmul)


def reference(
    shrink: Tensor, expand: Tensor, forget: Tensor, inputs: Tensor, memory: Tensor | None = None,
    product: Product = torch.mul,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same token by token: the specification. Gradients by autograd."""
    memory = _check(shrink, expand, forget, inputs, memory, product)
    dtype, real = inputs.dtype, accumulator(inputs)
    shrink, expand, inputs = (x.to(real) for x in (shrink, expand, inputs))
    forget, outputs = forget.expand(-1, shrink.shape[1], -1, -1, -1), []
    with exact(inputs):
        for t in range(shrink.shape[1]):
            added = expand[:, t, :, :, None] * inputs[:, t, :, None]
            memory = product(forget[:, t].to(memory.dtype), memory) + added
            outputs.append((_real(memory) * shrink[:, t, :, :, None]).sum(-2))
    y = torch.stack(outputs, 1) if outputs else torch.zeros_like(inputs)
    return y.to(dtype), memory


def _check(
    shrink: Tensor, expand: Tensor, forget: Tensor, inputs: Tensor, memory: Tensor | None,
    product: Product,
) -> Tensor:  # fmt: skip
    """The memory to start from."""
    if expand.ndim != 4 or shrink.shape != expand.shape or inputs.shape[:3] != expand.shape[:3]:
        raise ValueError(
            f"shrink {tuple(shrink.shape)}, expand {tuple(expand.shape)}, inputs "
            f"{tuple(inputs.shape)}: expected (batch, length, heads, dim) twice and (batch, length,"
            " heads, value_dim)"
        )
    (batch, n, heads, dim), wide = expand.shape, inputs.shape[-1]
    most = (batch, n, heads, dim, dim if product is torch.matmul else wide)
    least = (1, 1, 1, dim, dim) if product is torch.matmul else (1,) * 5
    if forget.ndim != 5 or any(
        size not in pair for size, *pair in zip(forget.shape, least, most, strict=True)
    ):
        raise ValueError(
            f"forget {tuple(forget.shape)}: expected {most}; 1 where it is the same for all, "
            f"down to {least}"
        )
    kind = accumulator(inputs)
    if forget.is_complex() or (memory is not None and memory.is_complex()):
        kind = torch.complex128 if kind == torch.float64 else torch.complex64
    if memory is None:
        return torch.zeros(batch, heads, dim, wide, dtype=kind, device=inputs.device)
    if tuple(memory.shape) != (batch, heads, dim, wide):
        raise ValueError(
            f"memory {tuple(memory.shape)}: expected (batch, heads, dim, value_dim), "
            f"{(batch, heads, dim, wide)}"
        )
    return memory.to(kind)


def _real(x: Tensor) -> Tensor:
    return x.real if x.is_complex() else x


def _run(
    shrink: Tensor, expand: Tensor, forget: Tensor, inputs: Tensor, memory: Tensor | None,
    product: Product,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    memory = _check(shrink, expand, forget, inputs, memory, product)
    if shrink.shape[1] == 0:
        return torch.zeros_like(inputs), memory
    with exact(inputs):
        y, last = _Memory.apply(shrink, expand, forget, inputs, memory, product)  # type: ignore
    return y, last


class _Memory(torch.autograd.Function):
    """Segment by segment; keeps the memory before each and makes the others anew backwards."""

    @staticmethod
    def forward(
        ctx: Any, shrink: Tensor, expand: Tensor, forget: Tensor, inputs: Tensor, memory: Tensor,
        product: Product,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        n = shrink.shape[1]
        ctx.product, ctx.step = product, max(1, min(n, SEGMENT // max(1, memory.numel())))
        starts, outputs = [], []
        for at in range(0, n, ctx.step):
            starts.append(memory)
            s, e, f, i = _segment((shrink, expand, forget, inputs), at, ctx.step, memory)
            m = memories(f, (e[..., None] * i[..., None, :]).to(memory.dtype), memory, product)
            outputs.append((_real(m) * s[..., None]).sum(-2))
            memory = m[:, -1].clone()
        ctx.save_for_backward(shrink, expand, forget, inputs, *starts)
        return torch.cat(outputs, 1).to(inputs.dtype), memory

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with exact(grads[0]):
            return _Memory.gradients(ctx, *grads)

    @staticmethod
    def gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shrink, expand, forget, inputs, *starts = ctx.saved_tensors
        (dy, dlast), product = grads, ctx.product
        parts: list[tuple[Tensor, ...]] = []
        kept = forget.shape[1] > 1
        for at, start in reversed(list(zip(range(0, dy.shape[1], ctx.step), starts, strict=True))):
            s, e, f, i = _segment((shrink, expand, forget, inputs), at, ctx.step, start)
            pull = dy[:, at : at + ctx.step].to(s.dtype)
            m = memories(f, (e[..., None] * i[..., None, :]).to(start.dtype), start, product)
            ds = (_real(m) * pull[..., None, :]).sum(-1)
            g = adjoints(f, (s[..., None] * pull[..., None, :]).to(m.dtype), dlast, product)
            m = before(m, start)
            if product is torch.matmul:
                df, dlast = g @ m.mH, f[:, 0].mH @ g[:, 0]
            else:
                df, dlast = g * m.conj(), f[:, 0].conj() * g[:, 0]
            df = df.sum_to_size(*forget.shape[:1], df.shape[1] if kept else 1, *forget.shape[2:])
            de, di = (_real(g) * i[..., None, :]).sum(-1), (_real(g) * e[..., None]).sum(-2)
            parts.append((ds, de, df if forget.is_complex() else _real(df), di))
        ds, de, df, di = (torch.cat(part[::-1], 1) for part in zip(*parts, strict=True))
        df = df if kept else df.sum(1, keepdim=True)
        together = zip((ds, de, df, di), (shrink, expand, forget, inputs), strict=True)
        return (*(grad.to(x.dtype) for grad, x in together), dlast, None)


def _segment(xs: tuple[Tensor, ...], at: int, step: int, memory: Tensor) -> list[Tensor]:
    """`step` tokens of each from `at` on: shrink, expand, inputs real, forget as the memory."""
    n, dtype, real = xs[0].shape[1], memory.dtype, _real(memory).dtype
    parts = [x.expand(-1, n, *x.shape[2:])[:, at : at + step] for x in xs]
    return [part.to(dtype if number == 2 else real) for number, part in enumerate(parts)]
