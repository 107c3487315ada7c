"""Linear recurrences m_t = f_t . m_(t-1) + b_t, all t at once, in about 2 log2(length) steps.

Pairs of neighbours join by (f2, b2) o (f1, b1) = (f2 . f1, f2 . b1 + b2), where "." is the
element-wise or the matrix product; every second memory comes from the sequence of pairs, which is
half as long, and those between from one step more. No product of decays is ever divided by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ndlightnet.ops.recurrence.chunks import CHUNK

Product = Callable[[Tensor, Tensor], Tensor]


def memories(f: Tensor | None, b: Tensor, first: Tensor, product: Product = torch.mul) -> Tensor:
    """m_1 .. m_n along axis 1, from m_0 = `first`; no gradients (see `scan`).

    b (batch, n, ...), whose first step is overwritten; first (batch, ...); f (batch or 1, n, ...)
    of a shape that `product` broadcasts; None: nothing is forgotten.
    """
    if b.shape[1] == 0:
        return b
    if f is None:
        b[:, 0] += first
        return b.cumsum(1)
    b[:, 0] = _step(f[:, 0], first, b[:, 0], product)
    return _pairs(f, b, product)


def _step(f: Tensor, m: Tensor, b: Tensor, product: Product) -> Tensor:
    return torch.addcmul(b, f, m) if product is torch.mul else b + product(f, m)


def _pairs(f: Tensor, b: Tensor, product: Product) -> Tensor:
    n = int(b.shape[1])  # a number for torch.compile, too: as many levels as it has bits
    if n == 1:
        return b
    even, odd, between = slice(0, n - n % 2, 2), slice(1, None, 2), slice(2, None, 2)
    joined = _step(f[:, odd], b[:, even], b[:, odd], product)
    late = _pairs(product(f[:, odd], f[:, even]), joined, product)
    out = torch.empty_like(b)
    out[:, 0], out[:, odd] = b[:, 0], late
    if n > 2:
        out[:, between] = _step(f[:, between], late[:, : (n - 1) // 2], b[:, between], product)
    return out


def running_sum(x: Tensor) -> Tensor:
    """x.cumsum(1) of (batch, length, ...), which on a card goes along a long axis that is not the
    last one in as many steps as it has: here in chunks."""
    n = x.shape[1]
    if n <= CHUNK:
        return x.cumsum(1)
    parts = torch.nn.functional.pad(x, (0, 0) * (x.ndim - 2) + (0, -n % CHUNK))
    parts = parts.unflatten(1, (-1, CHUNK)).cumsum(2)
    ends = running_sum(parts[:, :-1, -1])
    return torch.cat([parts[:, :1], parts[:, 1:] + ends[:, :, None]], 1).flatten(1, 2)[:, :n]


def before(m: Tensor, first: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """m_0 .. m_(n-1): what each step starts from."""
    out = torch.empty_like(m, dtype=dtype)
    out[:, :1], out[:, 1:] = first[:, None], m[:, :-1]
    return out


def adjoints(f: Tensor | None, pull: Tensor, last: Tensor, product: Product = torch.mul) -> Tensor:
    """Gradients of m_1 .. m_n, what comes by later memories included: g_t = pull_t + f'_(t+1) .
    g_(t+1), with f' the adjoint of f and `last` the gradient that m_n has from elsewhere."""
    if f is None:
        return memories(None, pull.flip(1), last).flip(1)
    turned = f.expand(-1, pull.shape[1], *f.shape[2:]).flip(1)
    turned = turned.mH if product is torch.matmul else turned.conj()
    if pull.shape[1] == 0:
        return pull
    pull = pull.flip(1)
    head = pull[:, :1] + last[:, None]  # behind the last one lies nothing
    rest = memories(turned[:, :-1], pull[:, 1:], head[:, 0], product)
    return torch.cat([head, rest], 1).flip(1)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, f: Tensor, b: Tensor, first: Tensor) -> Tensor:
        m = memories(f.expand(-1, b.shape[1], *f.shape[2:]), b.clone(), first)
        ctx.save_for_backward(f, m, first)
        return m

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        f, m, first = ctx.saved_tensors
        g = adjoints(f, grads[0], torch.zeros_like(first))
        df = (g * before(m, first).conj()).sum_to_size(f.shape) if ctx.needs_input_grad[0] else None
        if g.shape[1] == 0:
            return df, g, torch.zeros_like(first)
        return df, g, (f[:, 0].conj() * g[:, 0]).sum_to_size(first.shape)


def scan(f: Tensor, b: Tensor, first: Tensor | None = None) -> Tensor:
    """m_t = f_t * m_(t-1) + b_t along axis 1, real or complex, with gradients.

    b (batch, n, ...); f (batch or 1, n or 1, ...) broadcasts against b; first (batch, ...), default
    0. Returns all memories, as b. Saves f and the memories.
    """
    if b.ndim != f.ndim or (f.shape[1] not in (1, b.shape[1])):
        raise ValueError(
            f"f {tuple(f.shape)}: expected a shape that broadcasts to that of b, {tuple(b.shape)}"
        )
    if first is None:
        first = torch.zeros_like(b[:, 0]) if b.shape[1] else b.new_zeros(b.shape[0], *b.shape[2:])
    out: Tensor = _Scan.apply(f, b, first)  # type: ignore[no-untyped-call]
    return out
