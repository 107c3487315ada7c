"""Linear recurrences m_t = f_t . m_(t-1) + b_t, all t at once, in about 2 log2(length) steps.

Pairs of neighbours join by (f2, b2) o (f1, b1) = (f2 . f1, f2 . b1 + b2), which is associative.
Every second memory comes from the sequence of joined pairs, which is half as long, and those
between from one step more. Nothing is divided by a product of decays. A `Rule` defines "." and "+";
all operators of this folder, MD-TPE and LightNet's States run on this one scan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ndlightnet.layout.abstract import exporting
from ndlightnet.ops.plain import plain
from ndlightnet.ops.recurrence.chunks import CHUNK, exact

DOUBLINGS = 20  # of an exported scan of any length: up to a million steps


class Rule(NamedTuple):
    compose: Callable[[Tensor, Tensor], Tensor]  # (f2, f1) -> f2 . f1
    step: Callable[[Tensor, Tensor, Tensor], Tensor]  # (f, m, b) -> f . m + b
    zero: float = 0  # f of it forgets: zero . f = f . zero = zero, zero . m + b = b


ELEMENTWISE = Rule(torch.mul, lambda f, m, b: torch.addcmul(b, f, m))
MATRIX = Rule(torch.matmul, lambda f, m, b: b + f @ m)
MAXIMUM = Rule(torch.add, lambda f, m, b: torch.maximum(b, f + m), -torch.inf)  # of logarithms


def memories(f: Tensor | None, b: Tensor, first: Tensor, rule: Rule = ELEMENTWISE) -> Tensor:
    """Return m_1 .. m_n along axis 1, from m_0 = `first`; no gradients (see `scan`) except as plain operations.

    b (batch, n, ...), whose first step is overwritten; first (batch, ...); f (batch or 1, n, ...)
    of a shape that the rule broadcasts; None: no decay.
    """
    if b.shape[1] == 0:
        return b
    if plain():
        if f is None:
            return b.cumsum(1) + first[:, None]
        if exporting():
            return _doubling(f, b, first, rule)
        b = torch.cat([rule.step(f[:, :1], first[:, None], b[:, :1]), b[:, 1:]], 1)
        return _pairs(f, b, rule)
    if f is None:
        b[:, 0] += first
        return prefix_sum(b)
    b[:, 0] = rule.step(f[:, 0], first, b[:, 0])
    return _pairs(f, b, rule)


def _pairs(f: Tensor, b: Tensor, rule: Rule) -> Tensor:
    n = int(b.shape[1])  # an int under torch.compile, too: as many levels as it has bits
    if n == 1:
        return b
    even, odd, between = slice(0, n - n % 2, 2), slice(1, None, 2), slice(2, None, 2)
    joined = rule.step(f[:, odd], b[:, even], b[:, odd])
    late = _pairs(rule.compose(f[:, odd], f[:, even]), joined, rule)
    if plain():
        rest = rule.step(f[:, between], late[:, : (n - 1) // 2], b[:, between])
        early = torch.cat([b[:, :1], rest], 1)
        both = torch.stack([early[:, : n // 2], late], 2).flatten(1, 2)
        return torch.cat([both, early[:, n // 2 :]], 1)
    out = torch.empty_like(b)
    out[:, 0], out[:, odd] = b[:, 0], late
    if n > 2:
        out[:, between] = rule.step(f[:, between], late[:, : (n - 1) // 2], b[:, between])
    return out


def _lags(n: int | torch.SymInt) -> list[int]:
    """Return 1, 2, 4, ... for a scan of n steps, or of any number of them."""
    if not isinstance(n, int):
        return [1 << i for i in range(DOUBLINGS)]
    lags = [1]  # by comparisons, which a strict export with a symbol for n takes for a range
    while 2 * lags[-1] < n:
        lags.append(2 * lags[-1])
    return lags if n > 1 else []


def _doubling(f: Tensor, b: Tensor, first: Tensor, rule: Rule) -> Tensor:
    """Do the same as `memories` for any n in an exported graph: each step joins with the one that
    is 1, 2, 4, ... steps before it, or with the first one, which forgets, if there is none. A slice
    of n - 1 steps would make torch.export refuse n = 2."""
    at = torch.arange(b.shape[1], device=b.device)
    of_b, of_f = ((at == 0).view(-1, *[1] * (x.ndim - 2)) for x in (b, f))
    b = torch.where(of_b, rule.step(f, first[:, None], b), b)
    f = f.masked_fill(of_f, rule.zero)
    for lag in _lags(at.shape[0]):
        source = (at - lag).clamp(min=0)
        b = rule.step(f, b.index_select(1, source), b)
        f = rule.compose(f, f.index_select(1, source))
    return b


def prefix_maximum(x: Tensor) -> Tensor:
    """Return the maximum up to each token of (batch, length, ...); ONNX has no cummax."""
    if not exporting():
        return x.cummax(1).values
    at = torch.arange(x.shape[1], device=x.device)
    for lag in _lags(at.shape[0]):
        x = torch.maximum(x, x.index_select(1, (at - lag).clamp(min=0)))
    return x


def prefix_sum(x: Tensor) -> Tensor:
    """Return x.cumsum(1) of (batch, length, ...), in chunks: on a GPU, cumsum along an axis that is
    not the last one takes as many steps as the axis is long."""
    n = x.shape[1]
    if exporting() or n <= CHUNK:
        return x.cumsum(1)
    pieces = torch.nn.functional.pad(x, (0, 0) * (x.ndim - 2) + (0, -n % CHUNK))
    pieces = pieces.unflatten(1, (-1, CHUNK)).cumsum(2)
    ends = prefix_sum(pieces[:, :-1, -1])
    return torch.cat([pieces[:, :1], pieces[:, 1:] + ends[:, :, None]], 1).flatten(1, 2)[:, :n]


def before(m: Tensor, first: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return m_0 .. m_(n-1): the memory before each step."""
    if plain():
        return torch.cat([first[:, None].to(m.dtype), m], 1)[:, :-1].to(dtype or m.dtype)
    out = torch.empty_like(m, dtype=dtype)
    out[:, :1], out[:, 1:] = first[:, None], m[:, :-1]
    return out


def adjoints(f: Tensor | None, grad: Tensor, last: Tensor, rule: Rule = ELEMENTWISE) -> Tensor:
    """Return the gradients of m_1 .. m_n, with the part from later memories: g_t = grad_t +
    f'_(t+1) . g_(t+1), with f' the adjoint of f and `last` a further gradient of m_n."""
    if f is None:
        return memories(None, grad.flip(1), last).flip(1)
    reverse = f.expand(-1, grad.shape[1], *f.shape[2:]).flip(1)
    reverse = reverse.mH if rule is MATRIX else reverse.conj()
    if grad.shape[1] == 0:
        return grad
    grad = grad.flip(1)
    head = grad[:, :1] + last[:, None]  # no memory follows the last one
    rest = memories(reverse[:, :-1], grad[:, 1:], head[:, 0], rule)
    return torch.cat([head, rest], 1).flip(1)


class _Scan(torch.autograd.Function):
    """Autograd function of `scan`; saves f and the memories. Its gradient is differentiable."""

    @staticmethod
    def forward(ctx: Any, f: Tensor, b: Tensor, first: Tensor, rule: Rule) -> Tensor:
        with exact(b):
            m = memories(f.expand(-1, b.shape[1], *f.shape[2:]), b.clone(), first, rule)
        ctx.rule = rule
        ctx.save_for_backward(f, m, first)
        return m

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (f, m, first), rule, df = ctx.saved_tensors, ctx.rule, None
        with exact(m):
            g = adjoints(f, grads[0], torch.zeros_like(first), rule)
            if g.shape[1] == 0:
                return torch.zeros_like(f), g, torch.zeros_like(first), None
            if ctx.needs_input_grad[0]:
                start = before(m, first)
                df = g @ start.mH if rule is MATRIX else g * start.conj()
                df = df.sum_to_size(f.shape)
            f = f[:, 0].mH if rule is MATRIX else f[:, 0].conj()
            return df, g, rule.compose(f, g[:, 0]).sum_to_size(first.shape), None


def scan(f: Tensor, b: Tensor, first: Tensor | None = None, rule: Rule = ELEMENTWISE) -> Tensor:
    """Return m_t = f_t . m_(t-1) + b_t along axis 1, real or complex, with gradients.

    b (batch, n, ...); f (batch or 1, n or 1, ...) broadcasts against b, or is a matrix (..., dim,
    dim) from the left with rule MATRIX; first (batch, ...), default 0. Returns all m_t, like b.
    """
    if b.ndim != f.ndim or (f.shape[1] not in (1, b.shape[1])):
        raise ValueError(f"f {tuple(f.shape)}: expected a shape that broadcasts to that of b, {tuple(b.shape)}")
    if first is None:
        first = b.new_zeros(b.shape[0], *b.shape[2:])
    if plain():
        with exact(b):
            return memories(f.expand(-1, b.shape[1], *f.shape[2:]), b, first, rule)
    out: Tensor = _Scan.apply(f, b, first, rule)  # type: ignore[no-untyped-call]
    return out
