"""Planes that are added to those at the edge of a slab, against float64."""

import pytest
import torch

from ndlightnet_kernels import planes

from .kernel_cases import DEVICE, DTYPES

SHAPES = [(1, 1, 1), (2, 5, 7), (3, 70, 24), (2, 9, 200)]
FINE = torch.finfo(torch.float32).eps


def rounded(dtype, result, *terms):
    """By how much a sum in float32 of terms, which are rounded as well, in `dtype`, is off at most."""
    spacing = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    return torch.finfo(dtype).eps * result.abs() + 2 * FINE * sum(x.abs() for x in terms) + spacing


def part(dtype, outer, rows, dim):
    """Rows of some channels of a larger tensor, and all of it."""
    larger = torch.randn(outer, rows + 3, 2 * dim + 1, device=DEVICE).to(dtype)
    return larger[:, 2 : 2 + rows, dim : 2 * dim], larger


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_add(shape, dtype, weighted):
    """Off by the rounding of the product, of the sum, and of the result; nothing beside is written."""
    (out, larger), x = part(dtype, *shape), part(dtype, *shape)[0]
    weight = torch.randn(shape[2], device=DEVICE) if weighted else None
    product = x.double() * (1 if weight is None else weight.double())
    expected, before = out.double() + product, larger.clone()
    planes.add(x, out, weight)
    assert ((out - expected).abs() <= rounded(dtype, expected, product, expected)).all()
    out.copy_(before[:, 2 : 2 + shape[1], shape[2] : 2 * shape[2]])
    assert torch.equal(larger, before)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("more", [False, True])
def test_gradients(shape, dtype, more):
    dout, x = part(dtype, *shape)[0], part(dtype, *shape)[0]
    weight, dx = torch.randn(shape[2], device=DEVICE), torch.randn(shape, device=DEVICE).to(dtype)
    before = dx.double() if more else torch.zeros_like(dx, dtype=torch.float64)
    if not more:
        dx.fill_(torch.nan)
    dweight = planes.gradients(dout, x, weight, dx, more)
    product = dout.double() * weight.double()
    expected = before + product
    assert ((dx - expected).abs() <= rounded(dtype, expected, before, product)).all()
    terms = dout.double() * x.double()
    assert dweight.shape == (1, shape[2]) and dweight.dtype == torch.float32
    # a sum of n products, in any order
    assert ((dweight[0] - terms.sum((0, 1))).abs() <= shape[0] * shape[1] * FINE * terms.abs().sum((0, 1))).all()


def test_more_tiles_than_programs(monkeypatch):
    monkeypatch.setattr(planes, "PROGRAMS", 2)
    test_gradients((3, 200, 130), torch.float32, False)
