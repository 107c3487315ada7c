"""The rotary position code in one kernel, against float64, beside torch in the inputs' own precision."""

import pytest
import torch

from ndlightnet.layout import Ragged
from ndlightnet.nn.position import MDLRPE
from ndlightnet.ops import rotate, supported, tables

from .kernel_cases import DEVICE, DTYPES
from .yardstick import check_operator, with_gradients

pytestmark = pytest.mark.usefixtures("poison")
NAMES = ("y", "dx", "dcos", "dsin")


def random(shape, dtype, shared=False):
    """Return x, the gradient of the result, and tables that are no rotation: each of their values counts."""
    _, length, heads, dim = shape
    table = (length, 1 if shared else heads, dim)
    return [torch.randn(s, device=DEVICE).to(dtype) for s in (shape, shape, table, table)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (3, 7, 2, 6), (2, 70, 1, 34), (1, 33, 3, 64), (5, 2, 2, 200)])
def test_values_and_gradients(shape, shared, dtype):
    x, pull, *table = random(shape, dtype, shared)
    check_operator(NAMES, rotate, pull, x, *table)


def test_samples_are_shared_among_programs(monkeypatch):
    """Sums over samples are those of all programs."""
    monkeypatch.setattr("ndlightnet_kernels.rotate.PROGRAMS", 3)
    x, pull, *table = random((7, 5, 1, 6), torch.float32)
    check_operator(NAMES, rotate, pull, x, *table)


def test_strided_inputs_and_no_rows():
    x, pull, cos, sin = random((2, 7, 2, 6), torch.float32)
    wide = torch.cat([pull, x, pull], -1)[..., 6:12]  # a part of a joint projection
    both = torch.cat([cos, sin], -1)  # as `tables` returns them
    check_operator(NAMES, rotate, pull.transpose(1, 2).contiguous().transpose(1, 2), wide, *both.chunk(2, -1))
    check_operator(NAMES, rotate, pull.mT.contiguous().mT, x.mT.contiguous().mT, cos.mT.contiguous().mT, sin)
    y, *grads = with_gradients(lambda *xs: rotate(*xs, "triton"), pull[:0], x[:0], cos, sin)
    assert y.shape == (0, 7, 2, 6) and [grad.shape for grad in grads] == [x[:0].shape, cos.shape, sin.shape]


@pytest.mark.parametrize("layout", [(5, 4), Ragged([(3, 2), (1, 7)])])
def test_positions_of_a_layout(layout):
    """A pack's tokens turn as those of each sample do; the gradient reaches the angles."""
    code = MDLRPE(2, 8, "rotary").to(DEVICE)
    x = torch.randn(1, 20 if isinstance(layout, tuple) else layout.length, 2, 8, device=DEVICE)

    def run(impl):
        y = rotate(x, *tables(code(layout), 8, x.dtype), impl)
        return y, *torch.autograd.grad(y.square()[..., :3].sum(), [*code.parameters()])

    for a, b in zip(run("triton"), run("torch"), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("frozen", ["x", "tables", None])
def test_a_gradient_is_differentiated_again(frozen):
    x, pull, cos, sin = random((2, 3, 2, 6), torch.float32)
    learnt = [y.requires_grad_() for y in ((x,) if frozen == "tables" else (cos, sin) if frozen else (x, cos, sin))]

    def second(impl):
        first = torch.autograd.grad(rotate(x, cos, sin, impl), learnt, pull.requires_grad_(), create_graph=True)
        return torch.autograd.grad(sum(y.square().sum() for y in first), (*learnt, pull), allow_unused=True)

    for a, b in zip(second("triton"), second("torch"), strict=True):
        torch.testing.assert_close(a, b)


def test_operator():
    x, _, cos, sin = random((2, 3, 2, 6), torch.float32)
    for learnt in ((x,), (x, cos, sin)):
        inputs = [y.detach().requires_grad_(any(y is z for z in learnt)) for y in (x, cos, sin)]
        torch.library.opcheck(torch.ops.ndlightnet.rotate.default, tuple(inputs))
    compiled = torch.compile(lambda *xs: rotate(*xs, "triton").sin(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, cos, sin), rotate(x, cos, sin, "torch").sin())


def test_what_has_no_kernel():
    x, _, cos, _ = random((2, 3, 2, 6), torch.float32)
    assert supported("rotate", x, cos).reason == ("" if DEVICE.type == "cuda" else supported("swiglu", x).reason)
    with pytest.raises(ValueError, match="heads of 5 channels: expected an even number"):
        rotate(x[..., :5], cos[..., :5], cos[..., :5], "triton")
    for table in (cos[None], cos[..., :1], cos[:2]):
        with pytest.raises(
            ValueError, match=r"a table \(.*\) for x \(2, 3, 2, 6\): expected \(length, heads or 1, dim\)"
        ):
            rotate(x, table, table, "triton")
    for sin in (cos[:, :1], cos.double()):
        with pytest.raises(ValueError, match=r"sin \(3, [12], 6\) .*: expected \(3, 2, 6\) torch.float32, as cos"):
            rotate(x, cos, sin, "triton")


def test_tables_that_follow_from_the_tokens():
    """A gradient that will be differentiated again counts each path once."""
    x, pull, _, _ = random((2, 3, 2, 6), torch.float32)
    x.requires_grad_()

    def grad(impl, **how):
        cos = x.mean(0).cos()
        return torch.autograd.grad(rotate(x, cos, (1 - cos.square()).sqrt(), impl), x, pull, **how)[0]

    torch.testing.assert_close(grad("triton", create_graph=True), grad("torch"))
