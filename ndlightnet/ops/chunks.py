"""What the chunkwise forms share: chunks of tokens, and scores with a decay between two tokens.

A weight exp(g_r - g_i), with g the running sum of log decays, has exponents of 0 or less wherever
it counts. It is a product of two factors only with an anchor between the two tokens,
exp(g_r - g_a) exp(g_a - g_i): both at most 1. So a chunk is halved again and again: rows of the
later half meet columns of the earlier half, with the later half's first row as the anchor.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64  # a power of two
FLOOR = -30.0  # of log decays in float32: a sum of deeper ones would lose the digits of small ones


def exact(x: Tensor) -> torch.autocast:
    """Sums, decays and memories keep their precision under autocast, backwards too."""
    return torch.autocast(x.device.type, enabled=False)


def to_chunks(x: Tensor, dtype: torch.dtype, chunk: int = CHUNK) -> Tensor:
    """(batch, length, heads, dim) -> (batch, chunks, heads, chunk, dim), zeros at the end."""
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % chunk))
    return x.unflatten(1, (-1, chunk)).transpose(2, 3).to(dtype).contiguous()


def from_chunks(x: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Inverse of `to_chunks`."""
    return x.transpose(2, 3).flatten(1, 2)[:, :length].to(dtype)


def floor_of(dtype: torch.dtype) -> float:
    return 2 * FLOOR if dtype == torch.float64 else FLOOR


def later_first(x: Tensor) -> Tensor:
    """Sums from each token of a chunk to its end."""
    return x.flip(-2).cumsum(-2).flip(-2)


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """(..., chunk, dim) -> earlier and later halves (..., pairs, half, dim)."""
    early, late = x.unflatten(-2, (-1, 2, half)).unbind(-3)
    return early, late


def _blocks(a: Tensor, half: int) -> Tensor:
    """The blocks later rows x earlier columns of (..., chunk, chunk), as a view (..., pairs, half,
    half)."""
    a = a.unflatten(-1, (-1, 2, half)).unflatten(-4, (-1, 2, half))
    return a.diagonal(dim1=-6, dim2=-3)[..., 1, :, 0, :, :].movedim(-1, -3)


def _factors(g: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """exp(g_anchor - g) of the earlier halves, exp(g - g_anchor) of the later ones."""
    early, late = _halves(g, half)
    anchor = late[..., :1, :]
    return (anchor - early).exp(), (late - anchor).exp()


def _spread(g: Tensor) -> Tensor:
    """exp(g_r - g_i) for i <= r, else 0, of scalar decays (..., chunk, 1)."""
    low = torch.ones(g.shape[-2], g.shape[-2], dtype=torch.bool, device=g.device).tril()
    return (g - g.mT).masked_fill(~low, -torch.inf).exp()


def _sizes(chunk: int) -> list[int]:
    return [1 << i for i in range(chunk.bit_length() - 1)]


def scores(q: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """a[r, i] = sum_j q[r, j] k[i, j] exp(g[r, j] - g[i, j]) for i <= r, else 0.

    q, k (..., chunk, dim), g (..., chunk, dim or 1) not increasing -> (..., chunk, chunk).
    """
    if g.shape[-1] == 1:
        return (q @ k.mT) * _spread(g)
    a = q.new_zeros(*q.shape[:-1], q.shape[-2])
    a.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
    for half in _sizes(q.shape[-2]):
        early, late = _factors(g, half)
        block = (_halves(q, half)[1] * late) @ (_halves(k, half)[0] * early).mT
        _blocks(a, half).copy_(block)
    return a


def scores_backward(da: Tensor, q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of q and k from that of `scores`, whose upper triangle is not looked at."""
    if g.shape[-1] == 1:
        da = da * _spread(g)
        return da @ k, da.mT @ q
    own = da.diagonal(dim1=-2, dim2=-1)[..., None]
    dq, dk = own * k, own * q
    for half in _sizes(q.shape[-2]):
        early, late = _factors(g, half)
        block = _blocks(da, half)
        _halves(dq, half)[1].add_((block @ (_halves(k, half)[0] * early)) * late)
        _halves(dk, half)[0].add_((block.mT @ (_halves(q, half)[1] * late)) * early)
    return dq, dk


def inverse(lower: Tensor) -> Tensor:
    """(I + lower)^-1 for a strictly lower triangle (..., chunk, chunk), by blocks that double.

    Substitution, so as stable as that; powers of `lower` may be huge where its inverse is not.
    """
    x = torch.zeros_like(lower)
    x.diagonal(dim1=-2, dim2=-1).fill_(1)
    for half in _sizes(lower.shape[-1]):
        own = x.unflatten(-1, (-1, 2, half)).unflatten(-4, (-1, 2, half))
        own = own.diagonal(dim1=-6, dim2=-3).movedim(-1, -5)  # (..., pairs, 2, half, 2, half)
        early, late = own[..., 0, :, 0, :], own[..., 1, :, 1, :]
        _blocks(x, half).copy_(-(late @ _blocks(lower, half) @ early))
    return x
