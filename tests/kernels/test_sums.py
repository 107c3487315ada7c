"""Sums of what programs leave."""

import pytest
import torch

from ndlightnet_kernels.sums import sum_rows

from .kernel_cases import DEVICE


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 2, 5, 7), (1, 3, 300, 33), (2, 1, 64, 100)], ids=str)
def test_sum_rows(shape):
    """A sum of n numbers in any order is off by n - 1 roundings of the sum of their sizes at most."""
    x = torch.randn(shape, device=DEVICE)
    bound = shape[0] * shape[2] * torch.finfo(torch.float32).eps / 2 * x.double().abs().sum((0, 2))
    assert ((sum_rows(x) - x.double().sum((0, 2))).abs() <= bound).all()
