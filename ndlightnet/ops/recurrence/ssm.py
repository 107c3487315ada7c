"""Diagonal state-space models: x'(t) = a x(t) + u(t), with u held constant over steps of length dt
(zero-order hold), and HiPPO-LegS, the initial values of their eigenvalues a.

    x_t = exp(dt a) x_(t-1) + expm1(dt a) / a . u_t

States come in conjugate pairs, of which one is stored: a real output is 2 Re sum_j c_j x_j.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ndlightnet.ops.dtypes import accumulator
from ndlightnet.ops.empty import empty_result
from ndlightnet.ops.recurrence.chunks import CHUNK, exact, first_memory
from ndlightnet.ops.recurrence.exponential import even, exponential_filter, gather

COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


def pairs(state: int) -> int:
    """Return the number of conjugate pairs of a state of this real size."""
    if state < 2 or state % 2:
        raise ValueError(f"state={state}: expected an even number, 2 or more")
    return state // 2


def legs(state: int) -> tuple[Tensor, Tensor]:
    """Decompose the normal part of HiPPO-LegS, A + p p^T with A_nj = -sqrt((2n + 1)(2j + 1)) for
    n > j, -(n + 1) for n = j, 0 for n < j, and p_n = sqrt(n + 1/2): -I/2 + a skew-symmetric matrix.

    Returns its eigenvalues with positive imaginary part (state / 2,), slowest first, and their
    eigenvectors (state, state / 2), complex128.
    """
    half = pairs(state)
    # on the CPU, whatever default device a caller has set: eigenvectors differ in their phases
    root = (2 * torch.arange(state, dtype=torch.float64, device="cpu") + 1).sqrt()
    low = (root[:, None] * root).tril(-1) / 2
    frequency, vectors = torch.linalg.eigh(1j * (low - low.mT))  # of a Hermitian matrix: real
    frequency = frequency[half:]
    return torch.complex(torch.full_like(frequency, -0.5), frequency), vectors[:, half:]


def zero_order_hold(z: Tensor) -> Tensor:
    """Return expm1(z) / z, which a step of constant input adds to a state, in steps; 1 at z = 0."""
    near = z.abs() < 1e-2
    series = 1 + z / 2 * (1 + z / 3 * (1 + z / 4 * (1 + z / 5 * (1 + z / 6))))
    far = torch.where(near, 1, z)
    return torch.where(near, series, torch.expm1(far) / far)


def discretize(A_log: Tensor, A_imag: Tensor, log_dt: Tensor) -> Tensor:
    """Return dt a = exp(log_dt) (-exp(A_log) + i A_imag), complex128: phases of many steps lose
    their digits in float32."""
    real = -(A_log.double() + log_dt.double()).exp()
    return torch.complex(real, A_imag.double() * log_dt.double().exp())


def powers(z: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return exp(z t) for t = 0 .. count - 1, (..., count) complex, in the precision of `dtype`."""
    t = torch.arange(count, dtype=torch.float64, device=z.device)
    size, phase = z.real[..., None] * t, (z.imag[..., None] * t).remainder(2 * math.pi)
    return torch.polar(size.to(dtype).exp(), phase.to(dtype))


def diagonal_ssm(u: Tensor, z: Tensor, weight: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Run x_t = exp(z) x_(t-1) + u_t, y_t = 2 Re sum_j weight_j x_tj, each channel by itself.

    u (batch, length, channels), real; z, weight (channels, pairs), complex; memory (batch,
    channels, pairs), complex: x before the first token. Returns y, like u, and the last x.

    It is a convolution with K_l = 2 Re sum_j weight_j exp(z_j l), l = 0, 1, ..., in chunks.
    """
    (batch, n, channels), acc = u.shape, accumulator(u)
    if z.ndim != 2 or z.shape != weight.shape or len(z) != channels:
        raise ValueError(
            f"u {tuple(u.shape)}, z {tuple(z.shape)}, weight {tuple(weight.shape)}: expected "
            "(batch, length, channels) and (channels, pairs) twice"
        )
    memory = first_memory("memory", memory, (batch, *z.shape), COMPLEX[acc], u.device)
    if n == 0:
        return empty_result(u, z, weight), memory
    chunks, size = even(n, CHUNK)
    last_size = n - (chunks - 1) * size  # tokens in the last chunk
    with exact(u):
        x, table = u.to(acc), powers(z, size + 1, acc)
        y, entry = exponential_filter(x, chunks, table, 2 * weight.to(COMPLEX[acc]), memory)
        assert entry is not None  # since `memory` is given
        added = gather(x[:, None, n - last_size :], table[..., :last_size])
        last = table[..., last_size] * entry + added[:, 0]
    return y.to(u.dtype), last
