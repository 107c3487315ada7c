"""SwiGLU's product in one kernel, against float64, beside torch in the inputs' own precision."""

import pytest
import torch

from ndlightnet.ops import swiglu

from .kernel_cases import DEVICE, DTYPES
from .yardstick import check_operator, with_gradients

pytestmark = pytest.mark.usefixtures("poison")


def check(x, pull):
    check_operator(("y", "dx"), swiglu, pull, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 10), (2, 7, 200), (41, 128), (3, 2 * 1500)])
def test_values_and_gradients(shape, dtype):
    x = (2 * torch.randn(shape, device=DEVICE)).to(dtype)
    check(x, torch.randn(*shape[:-1], shape[-1] // 2, device=DEVICE).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_wide_open_and_shut(dtype):
    gate = torch.linspace(-2e4, 2e4, 96, device=DEVICE).view(4, 24)
    x = torch.cat([gate, torch.randn_like(gate)], 1).to(dtype)
    check(x, torch.randn_like(gate).to(dtype))


def test_strided_inputs_and_no_rows():
    x, pull = torch.randn(24, 7, device=DEVICE).T, torch.randn(12, 7, device=DEVICE).T
    check(x, pull)
    y, dx = with_gradients(lambda x: swiglu(x, "triton"), pull[:0], x[:0])
    assert y.shape == (0, 12) and dx.shape == (0, 24)


def test_a_gradient_is_differentiated_again():
    x = torch.randn(3, 10, device=DEVICE, dtype=torch.float32, requires_grad=True)
    pull = torch.randn(3, 5, device=DEVICE, requires_grad=True)

    def second(impl):
        (first,) = torch.autograd.grad(swiglu(x, impl), x, pull, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (x, pull))

    for a, b in zip(second("triton"), second("torch"), strict=True):
        torch.testing.assert_close(a, b)


def test_operator():
    x = torch.randn(3, 10, device=DEVICE, requires_grad=True)
    torch.library.opcheck(torch.ops.ndlightnet.swiglu.default, (x,))
    compiled = torch.compile(lambda x: swiglu(x, "triton").sin(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), swiglu(x, "torch").sin())


def test_an_odd_width_is_refused():
    with pytest.raises(ValueError, match=r"\(3, 5\): expected \(\.\.\., 2 \* dim\)"):
        swiglu(torch.randn(3, 5))
