"""Convolution with a sum of decaying exponentials, y_t = sum_(s <= t) K_(t-s) u_s with
K_l = Re sum_j weight_j lambda_j^l: the output of a diagonal linear system (S4), and the Toeplitz product of MD-TPE.

It runs in chunks: a Toeplitz matrix inside a chunk, and for earlier chunks states, one for each
lambda. (With an FFT every output would have rounding errors of later tokens.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from ndlightnet.ops.recurrence.scan import scan


def carry_over(added: Tensor, decay: Tensor, first: Tensor | None) -> Tensor:
    """Return h_p = decay h_(p-1) + added_p along axis 1 of (batch, chunks, channels, states)."""
    return scan(decay[None, None], added, first)


def even(n: int, most: int) -> tuple[int, int]:
    """Return the number of chunks to cut n tokens into evenly, and their size, about `most`."""
    chunks = n // (most + 1) + 1
    return chunks, (n + chunks - 1) // chunks


def toeplitz(kernel: Tensor, size: int) -> Tensor:
    """Return the matrices (channels, s, t) of K_(t - s), given (channels, length) that begins with K_0, K_1, ... and
    ends with ..., K_-2, K_-1; they may share one zero or more between."""
    n = kernel.shape[1]
    rows = kernel[:, None].expand(-1, size, -1).flatten(1)  # read in rows of one less, row s is shifted by s
    return rows[:, : size * (n - 1)].unflatten(1, (size, n - 1))[..., :size]


def gather(pieces: Tensor, powers: Tensor) -> Tensor:
    """Return what each chunk adds to the states, sum_s lambda^(size - 1 - s) u_s: (batch, chunks,
    size, channels) and (channels or 1, states, size) -> (batch, chunks, channels, states)."""
    out = torch.einsum("bpsc,cjsz->bpcjz", pieces, _real(powers.flip(-1)))
    return torch.view_as_complex(out.contiguous()) if powers.is_complex() else out[..., 0]


def exponential_filter(
    u: Tensor,
    chunks: int,
    table: Tensor,
    weight: Tensor,
    first: Tensor | None = None,
    carry: Callable[[Tensor, Tensor, Tensor | None], Tensor] = carry_over,
) -> tuple[Tensor, Tensor | None]:
    """Filter u (batch, length, channels), real, in `chunks` chunks. table (channels or 1, states,
    1 + chunk size): lambda^0, lambda^1, ..; weight (channels, states); first (batch, channels,
    states): the initial h of h_t = lambda h_(t-1) + u_t. These three are all real or all complex.

    Returns y, and h before the last chunk (None: zeros).
    """
    n, size = u.shape[1], table.shape[-1] - 1
    u = u.movedim(-1, 0).contiguous().movedim(0, -1)  # the products are of channels
    pieces = pad(u, (0, 0, 0, chunks * size - n)).unflatten(1, (chunks, size))
    powers = table[..., :size]
    kernel = torch.einsum("cjz,cjtz->ct", _real(weight.conj_physical()), _real(powers))
    y = torch.einsum("bpsc,cst->bptc", pieces, toeplitz(pad(kernel, (0, size)), size))
    starts = None if first is None else first[:, None]
    if chunks > 1:
        entries = carry(gather(pieces[:, :-1], powers), table[..., -1], first)
        starts = entries if starts is None else torch.cat([starts, entries], 1)
    if starts is None:
        return y.flatten(1, 2)[:, :n], None
    since = _real(table[..., 1:].conj_physical())
    read = torch.einsum("bpcjz,cjtz->bptc", _real(starts * weight), since)
    if first is None:
        head, later = y.split((1, chunks - 1), 1)
        y = torch.cat([head, later + read], 1)
    else:
        y = y + read
    return y.flatten(1, 2)[:, :n], starts[:, -1]


def _real(x: Tensor) -> Tensor:
    """Return (..., real and imaginary part): Re(a b) = dot product of those of conj(a) and b."""
    return torch.view_as_real(x) if x.is_complex() else x[..., None]
