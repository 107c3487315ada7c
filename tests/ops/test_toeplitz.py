"""The full Toeplitz product against its sum, token by token, and MD-TPE as a case of it."""

import itertools

import pytest
import torch

from ndlightnet.ops import axis_scan, toeplitz

GRIDS = [((7,), (7,)), ((5,), (9,)), ((6,), (1,)), ((3, 4), (2, 4)), ((1, 5), (3, 3)), ((2, 3, 4), (2, 2, 9))]


def token_by_token(x, kernel, mask=None):
    if mask is not None:
        x = x * mask[..., None]
    grid, y = x.shape[1:-1], torch.zeros_like(x)
    for n in itertools.product(*map(range, grid)):
        for m in itertools.product(*map(range, grid)):
            lag = tuple(i - j for i, j in zip(n, m, strict=True))
            if all(0 <= step < most for step, most in zip(lag, kernel.shape, strict=False)):
                y[(slice(None), *n)] += kernel[lag] * x[(slice(None), *m)]
    return y


@pytest.mark.parametrize("grid, lags", GRIDS, ids=str)
def test_it_is_the_sum_over_earlier_tokens(close, close_grads, grid, lags):
    x = torch.randn(2, *grid, 3, dtype=torch.float64, requires_grad=True)
    kernel = torch.randn(*lags, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(2, *grid) < 0.7
    for real in (None, mask):
        y, expected = toeplitz(x, kernel, real), token_by_token(x, kernel, real)
        close(y, expected, 1e-12)
        close_grads(y, expected, [x, kernel], 1e-12)


def test_what_is_masked_is_not_read():
    x, kernel = torch.randn(1, 4, 2), torch.randn(4, 2)
    mask = torch.tensor([[True, False, True, True]])
    assert toeplitz(x.masked_fill(~mask[..., None], torch.nan), kernel, mask).isfinite().all()


def test_md_tpe_is_a_kernel_on_the_axes(close):
    """Lag 0 has the weights of all axes."""
    grid, states = (4, 5, 3), 6
    x = torch.randn(2, *grid, 2, dtype=torch.float64)
    coef = torch.randn(3, 2, states, dtype=torch.float64)
    log_decay = -torch.rand(3, states, dtype=torch.float64)
    kernel = torch.zeros(*grid, 2, dtype=torch.float64)
    for axis, n in enumerate(grid):
        line = torch.einsum("dt,lt->ld", coef[axis], (torch.arange(n)[:, None] * log_decay[axis]).exp())
        at = [0, 0, 0]
        at[axis] = slice(None)
        kernel[tuple(at)] += line
    close(toeplitz(x, kernel), axis_scan(x, coef, log_decay), 1e-12)


def test_16_bits_and_nothing_at_all():
    x, kernel = torch.randn(2, 6, 4).bfloat16(), torch.randn(6, 4).bfloat16()
    y = toeplitz(x, kernel)
    assert y.dtype == x.dtype
    torch.testing.assert_close(y, token_by_token(x.float(), kernel.float()).bfloat16(), rtol=2e-2, atol=2e-2)
    assert toeplitz(x[:, :0], kernel).shape == (2, 0, 4) and toeplitz(x[:0], kernel).shape == (0, 6, 4)


def test_shapes_are_checked():
    x = torch.randn(2, 6, 4)
    for kernel in (torch.randn(6, 3), torch.randn(6, 6, 4), torch.randn(0, 4)):
        with pytest.raises(ValueError, match=r"kernel .*expected 1 or more lags along each of 1 axes, and 4 channels"):
            toeplitz(x, kernel)
    with pytest.raises(ValueError, match=r"mask \(2, 5\) torch.bool: expected bool \(2, 6\)"):
        toeplitz(x, torch.randn(6, 4), torch.ones(2, 5, dtype=torch.bool))
