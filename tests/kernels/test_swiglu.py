"""SwiGLU: the gated product in one kernel, and the map behind it, against float64, beside torch in the inputs' own
precision."""

import pytest
import torch

from ndlightnet.ops import swiglu

from .kernel_cases import DEVICE, DTYPES
from .yardstick import check_operator, with_gradients

pytestmark = pytest.mark.usefixtures("poison")


def check(x, pull, weight):
    check_operator(("y", "dx", "dweight"), swiglu, pull, x, weight)


def random(shape, dtype, out=6):
    """Return x, the gradient of the result, and the weight."""
    shapes = shape, (*shape[:-1], out), (out, shape[-1] // 2)
    return [(scale * torch.randn(s, device=DEVICE)).to(dtype) for s, scale in zip(shapes, (2, 1, 1), strict=True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 10), (2, 7, 200), (41, 128), (3, 2 * 1500)])
def test_values_and_gradients(shape, dtype):
    check(*random(shape, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_wide_open_and_shut(dtype):
    gate = torch.linspace(-2e4, 2e4, 96, device=DEVICE).view(4, 24)
    x = torch.cat([gate, 2 * torch.rand_like(gate) - 1], 1).to(dtype)
    _, pull, weight = random(x.shape, dtype)
    # sums within the range of float16, whose largest number is 65,504: of 4 products up to 20,000 times a pull, and of
    # 24 products, 15,000 in the mean, times a weight
    check(x, pull.clamp(-3, 3) / 4, weight.clamp(-4, 4) / 32)


def test_strided_inputs_and_no_rows():
    x, pull = torch.randn(24, 7, device=DEVICE).T, torch.randn(5, 7, device=DEVICE).T
    weight = torch.randn(12, 5, device=DEVICE).T
    check(x, pull, weight)
    y, dx, dweight = with_gradients(lambda x, w: swiglu(x, w, "triton"), pull[:0], x[:0], weight)
    assert y.shape == (0, 5) and dx.shape == (0, 24) and dweight.shape == (5, 12) and not dweight.any()


@pytest.mark.parametrize("frozen", ["x", "weight", None])
def test_a_gradient_is_differentiated_again(frozen):
    x, pull, weight = (y.requires_grad_() for y in random((3, 10), torch.float32))
    learnt = [y for y, name in ((x, "x"), (weight, "weight")) if name != frozen]
    inputs = [y.requires_grad_(any(y is z for z in learnt)) for y in (x, weight)]

    def second(impl):
        first = torch.autograd.grad(swiglu(*inputs, impl), learnt, pull, create_graph=True)
        return torch.autograd.grad(sum(y.square().sum() for y in first), (*learnt, pull), allow_unused=True)

    for a, b in zip(second("triton"), second("torch"), strict=True):
        torch.testing.assert_close(a, b)


def test_the_product_is_not_kept():
    """Between forward and backward lie the inputs alone; a frozen weight's gradient is not computed."""
    x, pull, weight = random((3, 10), torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = swiglu(x.requires_grad_(), weight, "triton")
    assert sum(t.numel() for t in kept) == x.numel() + weight.numel()
    y.backward(pull)
    assert x.grad is not None and weight.grad is None


def test_operator():
    x, _, weight = random((3, 10), torch.float32)
    torch.library.opcheck(torch.ops.ndlightnet.swiglu.default, (x.requires_grad_(), weight.requires_grad_()))
    compiled = torch.compile(lambda x, w: swiglu(x, w, "triton").sin(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight), swiglu(x, weight, "torch").sin())


def test_a_single_token():
    x, pull, weight = random((1, 10), torch.float32)
    check(x[0], pull[0], weight)


def test_another_width_is_refused():
    with pytest.raises(ValueError, match=r"\(3, 5\): expected \(\.\.\., 2 \* dim\), with a weight \(4, 2\)"):
        swiglu(torch.randn(3, 5), torch.randn(4, 2))
