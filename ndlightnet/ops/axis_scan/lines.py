"""One-dimensional exponential Toeplitz products along lines of tokens, in plain torch.

Per axis and channel:  h_l = lambda * h_(l-1) + x_l  in R^states,   y_l = sum_t c_t h_(l,t),
which is  y_l = sum_(m <= l) T_(l-m) x_m  with  T_l = sum_t c_t lambda_t^l.
The decays lambda are shared by the channels of an axis, so every step below is a matrix product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ndlightnet.ops.dtypes import accumulator

EXPORTED = 32  # tokens of a chunk in an exported graph, whose lines may be shorter
CHUNK = 64  # within a chunk a Toeplitz matrix, between chunks the states


def _powers(log_decay: Tensor, exponents: Tensor) -> Tensor:
    """lambda^l: (states, len(exponents))."""
    return torch.exp(log_decay[:, None] * exponents)


def line_state(x: Tensor, log_decay: Tensor, state: Tensor | None = None) -> Tensor:
    """State after the last token of each line: sum_m lambda^(n-1-m) x_m (+ lambda^n state).

    x: (lines, n, dim); log_decay: (states,) <= 0; state and result: (lines, dim, states), float32.
    """
    n, acc = x.shape[1], accumulator(x)
    back = torch.arange(n - 1, -1, -1, device=x.device, dtype=acc)
    h = torch.einsum("bnd,en->bde", x.to(acc), _powers(log_decay.to(acc), back))
    return h if state is None else h + torch.exp(log_decay.to(acc) * n) * state


def line_scan(x: Tensor, coef: Tensor, log_decay: Tensor, state: Tensor | None = None) -> Tensor:
    """The recurrence along lines of tokens: (lines, n, dim) -> same shape.

    coef: (dim, states); log_decay: (states,) <= 0; state: (lines, dim, states) before the first
    token.

    Tokens go in chunks: inside a chunk y = T x with the Toeplitz matrix of the kernel, and the
    state h before it adds c lambda^(l + 1) h to token l. Where torch.export looks, nothing depends
    on the number of tokens but sizes.
    """
    n, acc = x.shape[1], accumulator(x)
    coef, log_decay = coef.to(acc), log_decay.to(acc)
    parts = _chunks(x.to(acc))
    chunks, chunk = parts.shape[1:3]
    lag = torch.arange(chunk, device=x.device)
    kernel = coef @ _powers(log_decay, lag)  # (dim, chunk)
    offset = lag[:, None] - lag
    toeplitz = kernel[:, offset.clamp(min=0)] * (offset >= 0)  # (dim, chunk, chunk)
    y = torch.einsum("dlm,bnmd->bnld", toeplitz, parts)
    if chunks > 1:
        added = torch.einsum("em,bnmd->enbd", _powers(log_decay, lag.flip(0)), parts[:, :-1])
        entry = _running(added, log_decay * chunk)  # the states before all chunks but the first
        entry = entry * coef.T[:, None, None]
        later = torch.einsum("el,enbd->bnld", _powers(log_decay, lag + 1), entry)
        first, others = y.split((1, chunks - 1), 1)
        y = torch.cat([first, others + later], 1)
    y = y.flatten(1, 2)[:, :n]
    if state is not None:
        since = torch.arange(1, n + 1, device=x.device)
        y = y + torch.einsum("bde,de,el->bld", state.to(acc), coef, _powers(log_decay, since))
    return y.to(x.dtype)


def _chunks(x: Tensor) -> Tensor:
    """(lines, n, ...) -> (lines, chunks, chunk, ...), zeros at the end: evenly, about CHUNK tokens
    at most; in an exported graph EXPORTED."""
    n = x.shape[1]
    if torch.compiler.is_exporting():
        # torch.export takes a size of 1, and a view of all, for constants, and AOTInductor compiles
        # for minutes where sizes are quotients of quotients
        chunks, chunk = n // EXPORTED + 3, EXPORTED
    else:
        chunks = n // (CHUNK + 1) + 1
        chunk = (n + chunks - 1) // chunks
    x = torch.nn.functional.pad(x, (0, 0) * (x.ndim - 2) + (0, chunks * chunk - n))
    return x.unflatten(1, (chunks, chunk))


def _toeplitz(log_decay: Tensor, n: int) -> Tensor:
    """lambda^(l - m) for m <= l, else 0: (states, n, n)."""
    lag = torch.arange(n, device=log_decay.device)
    offset = lag[:, None] - lag
    return torch.exp(log_decay[:, None, None] * offset.clamp(min=0)) * (offset >= 0)


def _running(x: Tensor, log_decay: Tensor) -> Tensor:
    """h_j = lambda h_(j-1) + x_j along axis 1 of x (states, n, lines, dim).

    Within groups of chunks a Toeplitz matrix for each state. Into group g comes
    sum_(f < g) lambda^(size (g - 1 - f)) (what group f adds), a Toeplitz matrix again, whose size
    is n / CHUNK^2 of the tokens: exact for any number, and small beside the rest up to millions.
    An exported graph has one group, and so a matrix of n / EXPORTED of them.
    """
    parts = x.flatten(2)
    parts = parts[:, None] if torch.compiler.is_exporting() else _chunks(parts)
    groups, size = parts.shape[1:3]
    h = _toeplitz(log_decay, size)[:, None] @ parts
    if groups > 1:
        lag = torch.arange(size, device=x.device)
        added = torch.einsum("em,enmd->end", _powers(log_decay, lag.flip(0)), parts[:, :-1])
        entry = _toeplitz(log_decay * size, groups - 1) @ added
        h[:, 1:] += _powers(log_decay, lag + 1)[:, None, :, None] * entry[:, :, None]
    return h.flatten(1, 2)[:, : x.shape[1]].view_as(x)


def line_step(x: Tensor, coef: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: x (batch, dim), state (batch, dim, states) -> (output, new state)."""
    acc = accumulator(x)
    state = torch.exp(log_decay.to(acc)) * state + x.to(acc)[..., None]
    return (state * coef.to(acc)).sum(-1).to(x.dtype), state
