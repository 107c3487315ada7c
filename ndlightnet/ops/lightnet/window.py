"""Causal attention to the last tokens: a window over frames of one token, in plain torch.

The length is cut into blocks of `window` tokens. A token sees its block up to itself, and the block
before from the token after that with its number in the block. Both are causal attention, the second
backward in time; where the last block has fewer tokens, from the State of those that all of them see.
A memory is normalised per key channel, so queries are weighed: times the share of each part's sum in
the sum of both, they read the memory of all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ndlightnet.layout.abstract import exporting
from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.lightnet import parallel
from ndlightnet.ops.lightnet.parallel import LEAST, count
from ndlightnet.ops.lightnet.state import State, decay, tile
from ndlightnet.ops.recurrence.scan import before, prefix_maximum, scan


class _Tokens(NamedTuple):
    """Query features, keys, values and key factors: (batch, length, heads, .)."""

    f: Tensor
    k: Tensor
    v: Tensor
    w: Tensor | None

    def map(self, function: Callable[[Tensor], Tensor]) -> _Tokens:
        f, k, v, w = self
        return _Tokens(function(f), function(k), function(v), None if w is None else function(w))

    def part(self, first: int, last: int) -> _Tokens:
        return self.map(lambda x: x[:, first:last])

    def blocks(self, size: int) -> _Tokens:
        """Cut into blocks of `size` tokens: (batch * blocks, size, ...)."""
        return self.map(lambda x: x.unflatten(1, (-1, size)).flatten(0, 1))


def attention(f: Tensor, k: Tensor, v: Tensor, w: Tensor | None, rates: Tensor | None, window: int) -> Tensor:
    """Let tokens attend to the last `window` tokens, themselves included.

    f (batch, length, heads, rows): query features; k, v as in causal attention, of more than `window`
    tokens; w: key factors ([batch,] length, heads or 1, rows), or None; rates: decay rates () or (heads, 1), or None.
    """
    batch, n = k.shape[:2]
    if w is not None:
        w = (w if w.ndim == 4 else w[None]).expand(batch, *w.shape[-3:])
    tokens = _Tokens(f, k, v, w)
    length, end = n, n - n % window
    if torch.compiler.is_compiling() and not exporting():  # a shorter last block would be a graph for each length
        more = (0, 0, 0, 0, 0, -n % window)
        tokens = tokens.map(lambda x: pad(x, more))._replace(k=pad(k, more, value=-torch.inf))
        end = n = n + -n % window  # with what is padded
    outs = [parallel.causal_alone(*tokens.part(0, window), rates)]
    if end > window:
        now, past = (tokens.part(at, at + end - window).blocks(window) for at in (window, 0))
        outs.append(_block(now, past, rates).unflatten(0, (batch, -1)).flatten(1, 2))
    if end < n:
        outs.append(_block(tokens.part(end, n), tokens.part(end - window, end), rates))
    return torch.cat(outs, 1)[:, :length]


def _block(now: _Tokens, past: _Tokens, rates: Tensor | None) -> Tensor:
    """Let tokens of a block attend to those up to themselves, and number i to numbers i + 1, ... of the block before,
    which is as long or longer."""
    window, length = past.k.shape[1], now.k.shape[1]
    reach, back = min(length, window - 1), None if rates is None else -rates  # `reach` tokens read the block before
    if not reach:
        return parallel.causal_alone(*now, rates)
    state = _summarize(past.part(reach + 1, window), rates) if reach + 1 < window else None
    past = past.part(1, reach + 1).map(lambda x: x.flip(1))  # number i is last what token i reads
    top, rest = _log_of_sum(now.k[:, :reach], rates)
    old, old_rest = (x.flip(1) for x in _log_of_sum(past.k, back, state))
    lag = 0 if rates is None else rates * (window - reach)  # numbers backward in time count from `reach`
    gap = (top - old + lag).to(now.f.dtype) + rest - old_rest
    near, far = (now.f[:, :reach] * tile(x.sigmoid(), now.f.shape[-1], -1) for x in (gap, -gap))
    out = parallel.causal_alone(*now._replace(f=torch.cat([near, now.f[:, reach:]], 1)), rates)
    past = past._replace(f=far.flip(1))
    old_out = parallel.causal_alone(*past, back) if state is None else parallel.causal(*past, back, state)[0]
    return out + pad(old_out.flip(1), (0, 0, 0, 0, 0, length - reach))


def _summarize(tokens: _Tokens, rates: Tensor | None) -> State:
    """Return the State of tokens whose weights grow by exp(rates) from one to the next."""
    k, acc = tokens.k, accumulator(tokens.k)
    if rates is not None:
        k = k + rates * count(k)[:, None, None]
    top, total, memory = parallel.summarize(k, tokens.v, tokens.w)
    return State(top, total.to(acc), memory.to(acc))


def _log_of_sum(k: Tensor, rates: Tensor | None, state: State | None = None) -> tuple[Tensor, Tensor]:
    """Return the maximum of logits up to each token, from a State on, and the log of the sum of exp(k - maximum)."""
    x = k.to(accumulator(k))
    first, total = (torch.full_like(x[:, 0], -torch.inf), torch.zeros_like(x[:, 0])) if state is None else state[:2]
    if rates is not None:
        x, first = x + rates * count(x)[:, None, None], first - rates
    top = torch.maximum(prefix_maximum(x.detach()), first[:, None])
    fall = decay(before(top, first), top, accumulator(k))
    total = scan(fall, decay(x, top, accumulator(k)), total)
    return top.clamp(min=LEAST), torch.where(total > 0, total, 1).log()
