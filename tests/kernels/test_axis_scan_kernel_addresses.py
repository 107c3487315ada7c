"""MD-TPE on a tensor of more than 2**31 numbers."""

import pytest
import torch

from ndlightnet_kernels import axis_scan as kernels

pytestmark = pytest.mark.gpu


def test_the_end_of_more_than_two_to_the_31_numbers():
    """Only the last lines hold numbers: their results, and the gradients of weights, are those of these
    lines alone. Two tensors of 4.3 GB at a time."""
    batch, n, dim, last = 2**17 + 8, 128, 128, 8
    x = torch.zeros(batch, n, dim, dtype=torch.bfloat16, device="cuda")
    assert x[:-last].numel() >= 2**31
    x[-last:] = torch.randn_like(x[-last:])
    weights = []
    for _ in range(2):
        weights.append(torch.randn(1, dim, 4, device="cuda"))
        weights.append((0.3 + 0.699 * torch.rand(1, 4, device="cuda")).log())
    y = kernels.forward(x, *weights)
    assert not y[:-last].any()
    torch.testing.assert_close(y[-last:], kernels.forward(x[-last:].contiguous(), *weights), rtol=0, atol=0)
    del y
    end = x[-last:].contiguous()
    dx, *found = kernels.backward(x, x, *weights)
    dx_alone, *alone = kernels.backward(end, end, *weights)
    torch.testing.assert_close(dx[-last:], dx_alone, rtol=0, atol=0)
    for a, b in zip(found, alone, strict=True):  # summed in another order
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())
