"""Causal attention to the last tokens: a window over frames of one token, in plain torch.

The length is cut into blocks of `window` tokens. A token sees its block up to itself, and the block
before from the token after that with its number in the block. Both are causal attention, the second
backward in time. A memory is normalised per key channel, so queries are weighed: times the share of
each part's sum in the sum of both, they read the memory of all.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.lightnet import parallel
from ndlightnet.ops.lightnet.parallel import LEAST, count
from ndlightnet.ops.lightnet.state import State, decay, tile
from ndlightnet.ops.recurrence.scan import before, prefix_maximum, scan


def attention(f: Tensor, k: Tensor, v: Tensor, w: Tensor | None, rates: Tensor | None, window: int) -> Tensor:
    """Let tokens attend to the last `window` tokens, themselves included.

    f (batch, length, heads, rows): query features; k, v as in causal attention; w: key factors
    ([batch,] length, heads or 1, rows), or None; rates: decay rates () or (heads, 1), or None.
    Chunks have `CHUNK` tokens: blocks of fewer are padded.
    """
    batch, n = k.shape[:2]

    def blocks(x: Tensor, fill: float = 0.0) -> Tensor:
        x = pad(x, (0, 0, 0, 0, 0, -n % window), value=fill)
        return x.unflatten(1, (-1, window)).flatten(0, 1)

    def prior(x: Tensor, fill: float = 0.0) -> Tensor:
        """Return the block before each block, backward in time."""
        x = x.unflatten(0, (batch, -1))
        x = torch.cat([torch.full_like(x[:, :1], fill), x[:, :-1]], 1)
        return x.flatten(0, 1).flip(1)

    if w is not None:
        w = blocks((w if w.ndim == 4 else w[None]).expand(batch, *w.shape[-3:]))
    f, k, v = blocks(f), blocks(k, -torch.inf), blocks(v)
    past, back = prior(k, -torch.inf), None if rates is None else -rates
    top, rest = _log_of_sum(k, rates)
    # a token with number i reads the block before, backward in time, up to number window - 2 - i
    old, old_rest = _log_of_sum(past, back)
    old, old_rest = _shifted(old.flip(1), -1, LEAST), _shifted(old_rest.flip(1), -1)
    lag = 0 if rates is None else rates  # numbers backward in time count from the last token
    gap = (top - old + lag).to(f.dtype) + rest - old_rest
    near, far = (f * tile(x.sigmoid(), f.shape[-1], -1) for x in (gap, -gap))
    out = _run(near, k, v, w, rates)
    turned = None if w is None else prior(w)
    past_out = _run(_shifted(far.flip(1), -1), past, prior(v), turned, back)
    out = out + _shifted(past_out, 1).flip(1)
    return out.unflatten(0, (batch, -1)).flatten(1, 2)[:, :n]


def _run(f: Tensor, k: Tensor, v: Tensor, w: Tensor | None, rates: Tensor | None) -> Tensor:
    rotated, device = w is not None, k.device
    sizes = (k.shape[0], k.shape[2], k.shape[3], v.shape[3], rotated)
    empty = State.empty(*sizes, dtype=accumulator(k), device=device)
    return parallel.causal(f, k, v, w, rates, empty)[0]


def _shifted(x: Tensor, by: int, fill: float = 0.0) -> Tensor:
    """Shift tokens (batch, length, heads, dim) by one: later with 1, earlier with -1."""
    x = x[:, :-1] if by > 0 else x[:, 1:]
    return pad(x, (0, 0, 0, 0, by > 0, by < 0), value=fill)


def _log_of_sum(k: Tensor, rates: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the maximum of logits up to each token, and the log of the sum of exp(k - maximum)."""
    x = k.to(accumulator(k))
    if rates is not None:
        x = x + rates * count(x)[:, None, None]
    top = prefix_maximum(x.detach())
    fall = decay(before(top, torch.full_like(top[:, 0], -torch.inf)), top, accumulator(k))
    total = scan(fall, decay(x, top, accumulator(k)))
    return top.clamp(min=LEAST), torch.where(total > 0, total, 1).log()
