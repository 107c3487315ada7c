"""The full Toeplitz product on a grid (LightNet, Eq. 8), which MD-TPE simplifies to sums along the axes (Eq. 9)."""

from __future__ import annotations

import torch
from torch import Tensor

from ndlightnet.ops.dtypes import accumulator, check_floats
from ndlightnet.ops.empty import empty_result
from ndlightnet.ops.recurrence.chunks import exact


def toeplitz(x: Tensor, kernel: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return y_n = sum_m kernel_(n - m) x_m over the tokens m with m_a <= n_a on every axis, by fast Fourier transforms
    padded with zeros: of order N log N for N tokens.

    x: (batch, *grid, dim). kernel: (*lags, dim), from lag 0; further lags weigh nothing. mask: bool (batch, *grid),
    False = padding, which adds nothing. Returns x's shape and dtype; sums are float32 or wider. All results have the
    rounding of the largest one, also those before it.

    MD-TPE is this with a kernel that is 0 off the axes, where it is sum_t coef_t exp(lag log_decay_t): see `axis_scan`.
    """
    check_floats(x=x, kernel=kernel)
    grid, dim = x.shape[1:-1], x.shape[-1]
    if not grid or kernel.ndim != x.ndim - 1 or kernel.shape[-1] != dim or 0 in kernel.shape[:-1]:
        expected = f"1 or more lags along each of {len(grid)} axes, and {dim} channels"
        raise ValueError(f"kernel {tuple(kernel.shape)}, x {tuple(x.shape)}: expected {expected}")
    if mask is not None:
        if mask.shape != x.shape[:-1] or mask.dtype != torch.bool:
            raise ValueError(f"mask {tuple(mask.shape)} {mask.dtype}: expected bool {tuple(x.shape[:-1])}")
        x = x.masked_fill(~mask[..., None], 0)
    if x.numel() == 0:
        return empty_result(x, kernel)
    kernel = kernel[tuple(slice(n) for n in grid)]  # no token has a later one
    sizes = [n + lags - 1 for n, lags in zip(grid, kernel.shape[:-1], strict=True)]
    axes = list(range(1, x.ndim - 1))
    with exact(x):
        tokens, weights = (torch.fft.rfftn(y.to(accumulator(x)), sizes, axes) for y in (x, kernel[None]))
        y = torch.fft.irfftn(tokens * weights, sizes, axes)
    return y[(slice(None), *(slice(n) for n in grid))].to(x.dtype)
