"""Instance norm, residual and SiLU in torch: gradients of any order, and what may be missing."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from ndlightnet.ops import instance_norm_silu


@pytest.mark.parametrize("residual", [False, True])
def test_gradients_of_both_orders(residual):
    torch.manual_seed(0)
    x, more = torch.randn(2, 2, 3, 5, dtype=torch.float64, requires_grad=True).chunk(1)[0], None
    weight, bias = torch.randn(2, 2, dtype=torch.float64, requires_grad=True).unbind()
    if residual:
        more = torch.randn(2, 3, 5, 2, dtype=torch.float64, requires_grad=True).movedim(-1, 1)
    inputs = [y for y in (x, weight, bias, more) if y is not None]
    assert gradcheck(instance_norm_silu, inputs) and gradgradcheck(instance_norm_silu, inputs)


def test_only_what_is_trained_gets_a_gradient():
    x, weight = torch.randn(1, 2, 4), torch.ones(2, requires_grad=True)
    y = instance_norm_silu(x, weight, torch.zeros(2), x)
    y.sum().backward()
    assert weight.grad is not None and x.grad is None and not torch.equal(y, x)


def test_under_autocast_and_by_functorch_the_same(close):
    x, weight, bias = torch.randn(3, 2, 4, 5), torch.randn(2), torch.randn(2)
    expected = instance_norm_silu(x, weight, bias, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(instance_norm_silu(x, weight, bias, x), expected)
        assert instance_norm_silu(x.bfloat16(), weight, bias).dtype == torch.bfloat16

    def loss(x):
        return instance_norm_silu(x, weight, bias, x).square().sum()

    (g,) = torch.autograd.grad(loss(y := x.clone().requires_grad_()), y)
    close(torch.func.grad(loss)(x), g, 1e-5)
    residuals = torch.randn(5, *x.shape)
    mapped = torch.func.vmap(lambda r: instance_norm_silu(x, weight, bias, r))(residuals)
    close(mapped[3], instance_norm_silu(x, weight, bias, residuals[3]), 1e-6)


def test_the_memory_format_stays():
    x = torch.randn(2, 4, 5, 6).to(memory_format=torch.channels_last)
    y = instance_norm_silu(x, torch.ones(4), torch.zeros(4))
    assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_formula_is_what_autograd_finds(dtype, close):
    """Of contiguous tensors, with the gradients that are wanted; other formats by autograd."""
    torch.manual_seed(0)
    x, more, pull = (torch.randn(2, 4, 5, 6).to(dtype) for _ in range(3))
    weight, bias = torch.randn(2, 4, dtype=torch.promote_types(dtype, torch.float32)).unbind()
    for kept in (range(4), (0,), (1, 3), (2,)):
        runs = []
        for form in (torch.contiguous_format, torch.channels_last):
            inputs = [y.clone() for y in (x, weight, bias, more)]
            inputs[0] = inputs[0].contiguous(memory_format=form)
            sources = [inputs[n].requires_grad_() for n in kept]
            runs.append(torch.autograd.grad(instance_norm_silu(*inputs), sources, pull))
        for a, b in zip(*runs, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            close(a, b, max(1e-12, 3 * torch.finfo(dtype).eps))  # three roundings


@pytest.mark.parametrize("mean", [0, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_statistics_are_not_rounded_to_16_bits(form, dtype, mean):
    """Values and gradients of numbers far from 0, against float64."""
    x, pull = (torch.randn(1, 2, 32, 8).to(dtype) for _ in range(2))
    x = (x + mean).contiguous(memory_format=form)
    runs = []
    for to in (dtype, torch.float64):
        inputs = [x.to(to), torch.ones(2, dtype=to), torch.zeros(2, dtype=to)]
        inputs = [y.requires_grad_() for y in inputs]
        y = instance_norm_silu(*inputs, impl="torch")
        runs.append([y, *torch.autograd.grad(y, inputs, pull.to(to))])
    for actual, expected in zip(*runs, strict=True):
        error = (actual - expected).abs().max() / expected.abs().max()
        assert actual.dtype == dtype and error <= max(1e-5, torch.finfo(dtype).eps / 2)


def test_a_row_without_axes_is_a_single_cell():
    x = torch.tensor([[torch.nan, 1e4], [2.0, -3e4]])
    y = instance_norm_silu(x, torch.ones(2), torch.zeros(2), impl="torch")
    assert y.isnan().tolist() == [[True, False], [False, False]] and y[~y.isnan()].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cells", [1, 7, 1000])
@pytest.mark.parametrize("value", [1.2345678, 123.45678, 12345.678, -1234567.8])
def test_equal_cells_are_mapped_to_the_bias(value, cells, dtype):
    x = torch.full((2, 3, cells), value, dtype=dtype, requires_grad=True)
    weight = torch.full((3,), 2.0, dtype=dtype, requires_grad=True)
    y = instance_norm_silu(x, weight, torch.zeros(3, dtype=dtype), impl="torch")
    dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
    bound = 0 if cells == 1 else 1e-9 * abs(value)
    assert max(y.abs().max(), dweight.abs().max() / cells) <= bound
    assert dx.abs().max() <= 1e-3  # a difference of equal numbers times 1 / sqrt(eps)
