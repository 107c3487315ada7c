"""The general memory recurrence: a memory (dim, value_dim) that expands, decays and is read.

    m_t = f_t . m_(t-1) + e_t i_t^T        y_t = Re(m_t)^T s_t

with e "expand", f "forget", i "input", s "shrink". "." is the element-wise product for `elementwise_memory` (f
broadcasts to (dim, value_dim): full, row, column or scalar; real or complex) and the matrix product for `matrix_memory`
(f is (dim, dim), from the left). All recurrent mixers of ndlightnet.nn.mixers are instances, and are tested as such;
they have other forms that do not store all memories at once.

Shapes: shrink, expand (batch, length, heads, dim), inputs (batch, length, heads, value_dim), memory
(batch, heads, dim, value_dim). Memories are float32 or wider; outputs have the inputs' dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ndlightnet.ops.dtypes import accumulator, check_floats
from ndlightnet.ops.recurrence.chunks import exact, first_memory
from ndlightnet.ops.recurrence.scan import ELEMENTWISE, MATRIX, Rule, scan


def elementwise_memory(
    shrink: Tensor, expand: Tensor, forget: Tensor, inputs: Tensor, memory: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return outputs (batch, length, heads, value_dim) and the last memory. forget: (batch or 1,
    length or 1, heads or 1, dim or 1, value_dim or 1). All memories are stored at once."""
    return _run(shrink, expand, forget, inputs, memory, ELEMENTWISE)


def matrix_memory(
    shrink: Tensor, expand: Tensor, forget: Tensor, inputs: Tensor, memory: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return outputs (batch, length, heads, value_dim) and the last memory. forget: (batch or 1,
    length or 1, heads or 1, dim, dim). All memories are stored at once."""
    return _run(shrink, expand, forget, inputs, memory, MATRIX)


def reference(
    shrink: Tensor,
    expand: Tensor,
    forget: Tensor,
    inputs: Tensor,
    memory: Tensor | None = None,
    product: Callable[[Tensor, Tensor], Tensor] = torch.mul,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence token by token, by torch.mul or torch.matmul: the specification. Gradients by autograd."""
    memory = _check(shrink, expand, forget, inputs, memory, product is torch.matmul)
    dtype, real = inputs.dtype, accumulator(inputs)
    shrink, expand, inputs = (x.to(real) for x in (shrink, expand, inputs))
    forget, outputs = forget.expand(-1, shrink.shape[1], -1, -1, -1), []
    with exact(inputs):
        for t in range(shrink.shape[1]):
            added = expand[:, t, :, :, None] * inputs[:, t, :, None]
            memory = product(forget[:, t].to(memory.dtype), memory) + added
            outputs.append((memory.real * shrink[:, t, :, :, None]).sum(-2))
    y = torch.stack(outputs, 1) if outputs else torch.zeros_like(inputs)
    return y.to(dtype), memory


def _run(
    shrink: Tensor, expand: Tensor, forget: Tensor, inputs: Tensor, memory: Tensor | None, rule: Rule
) -> tuple[Tensor, Tensor]:
    memory = _check(shrink, expand, forget, inputs, memory, rule is MATRIX)
    dtype, real = inputs.dtype, accumulator(inputs)
    shrink, expand, inputs = (x.to(real)[..., None] for x in (shrink, expand, inputs))
    added = (expand * inputs.mT).to(memory.dtype)
    m = scan(forget.to(memory.dtype), added, memory, rule)
    y = (m.real * shrink).sum(-2).to(dtype)
    return y, m[:, -1] if m.shape[1] else memory


def _check(
    shrink: Tensor, expand: Tensor, forget: Tensor, inputs: Tensor, memory: Tensor | None, matrix: bool
) -> Tensor:
    """Check the inputs and return the memory to start from."""
    check_floats(shrink=shrink, expand=expand, inputs=inputs)
    if expand.ndim != 4 or shrink.shape != expand.shape or inputs.shape[:3] != expand.shape[:3]:
        raise ValueError(
            f"shrink {tuple(shrink.shape)}, expand {tuple(expand.shape)}, inputs "
            f"{tuple(inputs.shape)}: expected (batch, length, heads, dim) twice and (batch, length,"
            " heads, value_dim)"
        )
    (batch, n, heads, dim), value_dim = expand.shape, inputs.shape[-1]
    most = (batch, n, heads, dim, dim if matrix else value_dim)
    least = (1, 1, 1, dim, dim) if matrix else (1,) * 5
    if forget.ndim != 5 or any(size not in pair for size, *pair in zip(forget.shape, least, most, strict=True)):
        raise ValueError(
            f"forget {tuple(forget.shape)}: expected {most}; 1 where it is the same for all, down to {least}"
        )
    kind = accumulator(inputs)
    if forget.is_complex() or (memory is not None and memory.is_complex()):
        kind = torch.complex128 if kind == torch.float64 else torch.complex64
    return first_memory("memory", memory, (batch, heads, dim, value_dim), kind, inputs.device)
