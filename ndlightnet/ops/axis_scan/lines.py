"""One-dimensional exponential Toeplitz products along lines of tokens, in plain torch.

Per axis and channel:  h_l = lambda * h_(l-1) + x_l  in R^states,   y_l = sum_t c_t h_(l,t),
which is  y_l = sum_(m <= l) T_(l-m) x_m  with  T_l = sum_t c_t lambda_t^l.
The decays lambda are shared by the channels of an axis, so every step below is a matrix product.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ndlightnet.layout.abstract import exporting
from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.empty import empty_result
from ndlightnet.ops.recurrence.exponential import carry_over, even, exponential_filter, toeplitz

Way = tuple[Tensor, Tensor]

EXPORTED = 32  # tokens of a chunk in an exported graph, whose lines may be shorter
CHUNK = 64  # tokens of a chunk: a Toeplitz matrix within a chunk, states between chunks


def _powers(log_decay: Tensor, exponents: Tensor) -> Tensor:
    """Return lambda^l: (states, len(exponents))."""
    return torch.exp(log_decay[:, None] * exponents)


def line_state(x: Tensor, log_decay: Tensor, state: Tensor | None = None) -> Tensor:
    """Return the state after each line's last token: sum_m lambda^(n-1-m) x_m (+ lambda^n state).

    x: (lines, n, dim); log_decay: (states,) <= 0; state and result: (lines, dim, states), float32
    (float64 for float64 inputs).
    """
    n, acc = x.shape[1], accumulator(x)
    back = torch.arange(n - 1, -1, -1, device=x.device, dtype=acc)
    h = torch.einsum("bnd,en->bde", x.to(acc), _powers(log_decay.to(acc), back))
    return h if state is None else h + torch.exp(log_decay.to(acc) * n) * state


def _traced() -> bool:
    return exporting() or torch.compiler.is_compiling()


def _chunks(x: Tensor) -> tuple[int, int]:
    """Return the number of chunks to cut lines (lines, n, dim) into, and their size."""
    n = x.shape[1]
    # torch.export takes a size of 1, and a view of all, as constants, and AOTInductor compiles for
    # minutes where sizes are quotients of quotients
    if exporting():
        return n // EXPORTED + 3, EXPORTED
    # along many short lines a larger Toeplitz matrix takes less time than states
    short = not _traced() and n <= min(3 * CHUNK, 2 * x.shape[0])  # a comparison would be a guard of a graph
    return even(n, 5 * CHUNK // 2 if short else CHUNK)


def both_ways(x: Tensor, way: Way, reverse: Way) -> Tensor:
    """Run one recurrence forward and one backward along lines (lines, n, dim), each `way` a pair of coefficients and
    log decays; a token itself counts once, with the forward weights."""
    acc = accumulator(x)
    u, (coef, log_decay), (rcoef, rlog_decay) = (x.to(acc), *((c.to(acc), d.to(acc)) for c, d in (way, reverse)))
    if not _traced() and x.shape[1] and _chunks(x)[0] == 1:  # one Toeplitz matrix with both, in half the time
        n, lag = x.shape[1], torch.arange(x.shape[1] + 1, device=x.device)
        kernel = torch.cat([coef @ _powers(log_decay, lag[:n]), rcoef @ _powers(rlog_decay, lag[1:].flip(0))], 1)
        y = (u.movedim(-1, 0).contiguous() @ toeplitz(kernel, n)).movedim(0, -1)  # the products are of channels
    else:
        y = line_scan(u, coef, log_decay) + line_scan(u.flip(1), rcoef, rlog_decay).flip(1)
        y = y - u * rcoef.sum(-1)
    return y.to(x.dtype)


def line_scan(x: Tensor, coef: Tensor, log_decay: Tensor, state: Tensor | None = None) -> Tensor:
    """Run the recurrence along lines of tokens: (lines, n, dim) -> same shape.

    coef: (dim, states); log_decay: (states,) <= 0; state: (lines, dim, states) before the first
    token. Under torch.export only sizes depend on the number of tokens.
    """
    n, acc = x.shape[1], accumulator(x)
    if n == 0:
        return empty_result(x, coef, log_decay, state)
    coef, log_decay = coef.to(acc), log_decay.to(acc)
    chunks, size = _chunks(x)
    table = _powers(log_decay, torch.arange(size + 1, device=x.device))[None]
    state = None if state is None else state.to(acc)
    carry = partial(_carry_traced, log_decay * size) if _traced() else carry_over
    y, _ = exponential_filter(x.to(acc), chunks, table, coef, state, carry)
    return y.to(x.dtype)


def _carry_traced(log_decay: Tensor, added: Tensor, decay: Tensor, first: Tensor | None) -> Tensor:
    """Do the same as `carry_over` in a traced graph, which takes any number of chunks: a scan
    has as many steps as that number has bits.

    Within a group of chunks each state has a Toeplitz matrix. The states that enter a group come from the groups before
    it by another Toeplitz matrix, of size tokens / CHUNK^2: exact for any number of tokens, and small beside the rest
    up to millions. An exported graph has one group, and so a matrix of size tokens / EXPORTED.
    """
    if first is not None:
        added = torch.cat([(decay * first)[:, None] + added[:, :1], added[:, 1:]], 1)
    x, n = added.permute(3, 1, 0, 2), added.shape[1]  # states first
    groups, size = (1, n) if exporting() else even(n, CHUNK)
    h = torch.nn.functional.pad(x.flatten(2), (0, 0, 0, groups * size - n))
    h = _toeplitz(log_decay, size)[:, None] @ h.unflatten(1, (groups, size))
    if groups > 1:
        entry = _toeplitz(log_decay * size, groups - 1) @ h[:, :-1, -1]
        since = torch.arange(1, size + 1, device=x.device)
        later = h[:, 1:] + _powers(log_decay, since)[:, None, :, None] * entry[:, :, None]
        h = torch.cat([h[:, :1], later], 1)
    return h.flatten(1, 2)[:, :n].view_as(x).permute(2, 1, 3, 0)


def _toeplitz(log_decay: Tensor, n: int) -> Tensor:
    """Return lambda^(l - m) for m <= l, else 0: (states, n, n)."""
    lag = torch.arange(n, device=log_decay.device)
    offset = lag[:, None] - lag
    return torch.exp(log_decay[:, None, None] * offset.clamp(min=0)) * (offset >= 0)


def line_step(x: Tensor, coef: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Process one token: x (batch, dim), state (batch, dim, states) -> (output, new state)."""
    acc = accumulator(x)
    state = torch.exp(log_decay.to(acc)) * state + x.to(acc)[..., None]
    return (state * coef.to(acc)).sum(-1).to(x.dtype), state
