"""MD-TPE: a sum over axes of one-dimensional exponential Toeplitz products (LightNet, Eq. 9).

Per axis and channel:  h_l = lambda * h_(l-1) + x_l  in R^states,   y_l = sum_t c_t h_(l,t),
which is  y_l = sum_(m <= l) T_(l-m) x_m  with  T_l = sum_t c_t lambda_t^l.
The decays lambda are shared by the channels of an axis, so every step below is a matrix product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ndlightnet.grid import Grid
from ndlightnet.ops import _registry, _triton_layers
from ndlightnet.ops._registry import Impl
from ndlightnet.ops.chunks import exact

CHUNK = 64  # within a chunk a Toeplitz matrix, between chunks the states


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _powers(log_decay: Tensor, exponents: Tensor) -> Tensor:
    """lambda^l: (states, len(exponents))."""
    return torch.exp(log_decay[:, None] * exponents)


def line_state(x: Tensor, log_decay: Tensor, state: Tensor | None = None) -> Tensor:
    """State after the last token of each line: sum_m lambda^(n-1-m) x_m (+ lambda^n state).

    x: (lines, n, dim); log_decay: (states,) <= 0; state and result: (lines, dim, states), float32.
    """
    n, acc = x.shape[1], _accumulator(x)
    back = torch.arange(n - 1, -1, -1, device=x.device, dtype=acc)
    h = torch.einsum("bnd,en->bde", x.to(acc), _powers(log_decay.to(acc), back))
    return h if state is None else h + torch.exp(log_decay.to(acc) * n) * state


def line_scan(x: Tensor, coef: Tensor, log_decay: Tensor, state: Tensor | None = None) -> Tensor:
    """The recurrence along lines of tokens: (lines, n, dim) -> same shape.

    coef: (dim, states); log_decay: (states,) <= 0; state: (lines, dim, states) before the first
    token.
    """
    n, acc = x.shape[1], _accumulator(x)
    if n == 0:
        return x
    chunk = min(n, CHUNK)
    coef, log_decay = coef.to(acc), log_decay.to(acc)
    lag = torch.arange(chunk, device=x.device)
    kernel = coef @ _powers(log_decay, lag.to(acc))  # (dim, chunk)
    offset = lag[:, None] - lag[None]
    toeplitz = kernel[:, offset.clamp(min=0)] * (offset >= 0)  # (dim, chunk, chunk)
    padded = torch.nn.functional.pad(x.to(acc), (0, 0, 0, -n % chunk))
    parts = padded.unflatten(1, (-1, chunk))
    y = torch.einsum("dlm,bnmd->bnld", toeplitz, parts)
    if n > chunk or state is not None:
        entry = _entries(parts, log_decay, state)
        y = y + torch.einsum("bnde,de,el->bnld", entry, coef, _powers(log_decay, lag + 1.0))
    return y.flatten(1, 2)[:, :n].to(x.dtype)


def _entries(parts: Tensor, log_decay: Tensor, state: Tensor | None) -> Tensor:
    """State before each chunk, (lines, chunks, dim, states), by doubling."""
    lines, chunks, chunk, dim = parts.shape
    back = torch.arange(chunk - 1, -1, -1, device=parts.device, dtype=parts.dtype)
    added = torch.einsum("bnmd,em->bnde", parts[:, :-1], _powers(log_decay, back))
    if state is None:
        state = parts.new_zeros(lines, dim, log_decay.shape[0])
    h = torch.cat([state[:, None].to(parts.dtype), added], dim=1)
    shift = 1
    while shift < chunks:
        carried = torch.exp(log_decay * (chunk * shift)) * h[:, :-shift]
        h = torch.cat([h[:, :shift], h[:, shift:] + carried], dim=1)
        shift *= 2
    return h


def line_step(x: Tensor, coef: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: x (batch, dim), state (batch, dim, states) -> (output, new state)."""
    acc = _accumulator(x)
    state = torch.exp(log_decay.to(acc)) * state + x.to(acc)[..., None]
    return (state * coef.to(acc)).sum(-1).to(x.dtype), state


def both_ways(
    lines: Tensor, axis: int, coef: Tensor, log_decay: Tensor, reverse: tuple[Tensor, Tensor] | None
) -> Tensor:
    """The recurrence along lines (lines, n, dim) of one axis, and back; a token counts once."""
    y = line_scan(lines, coef[axis], log_decay[axis])
    if reverse is None:
        return y
    back, decay = reverse[0][axis], reverse[1][axis]
    y = y + line_scan(lines.flip(1), back, decay).flip(1)
    return y - lines * back.sum(-1).to(lines.dtype)


def axis_scan(
    x: Tensor,
    coef: Tensor,
    log_decay: Tensor,
    reverse: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    *,
    residual: bool = False,
    impl: Impl = "auto",
) -> Tensor:
    """Sum over the axes of the recurrence along each: (batch, *grid, dim) -> same shape.

    residual: x itself is added, without another pass over memory.

    coef: (axes, dim, states); log_decay: (axes, states) <= 0. `reverse`: the same pair for the way
    back (bidirectional; a token itself counts once, with the forward weights). mask: (batch,
    *grid), False where a token is padding and adds nothing.
    """
    grid = Grid.of(x)
    expected = (grid.ndim, x.shape[-1])
    for name, c, decay in (("", coef, log_decay), ("reverse ", *(reverse or (coef, log_decay)))):
        if c.ndim != 3 or tuple(c.shape[:2]) != expected or decay.shape != (grid.ndim, c.shape[2]):
            raise ValueError(
                f"{name}coef {tuple(c.shape)} and log_decay {tuple(decay.shape)}: expected "
                f"{(*expected, 'states')} and {(grid.ndim, 'states')} for x {tuple(x.shape)}"
            )
    chosen = _registry.choose(impl, "axis_scan", x)
    if x.numel() == 0:
        return x
    if chosen == "triton":
        way_back = (None, None) if reverse is None else tuple(w.float() for w in reverse)
        out: Tensor = _triton_layers.triton_axis_scan(
            x, coef.float(), log_decay.float(), *way_back, mask, residual
        )
        return out
    given = x
    if mask is not None:
        x = x.masked_fill(~mask[..., None], 0)  # even NaN in the padding cannot leak
    with exact(x):
        total = given if residual else torch.zeros_like(x)
        for axis in range(grid.ndim):
            y = both_ways(grid.lines(x, axis), axis, coef, log_decay, reverse)
            total = total + grid.unlines(y, axis)
    return total
