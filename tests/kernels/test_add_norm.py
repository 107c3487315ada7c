"""Residual add and LayerNorm in one kernel, against float64, beside torch in the inputs' own precision."""

from functools import partial

import pytest
import torch
from torch.autograd import grad
from torch.nn.functional import layer_norm

from ndlightnet.ops import add_norm
from ndlightnet_kernels import gate, residual_norm

from .kernel_cases import BRAIN, DEVICE, DTYPES, HALF
from .yardstick import compare_with_torch

pytestmark = pytest.mark.usefixtures("poison")

SHAPES = [(1, 5), (3, 24), (2, 7, 100), (41, 64), (1, 384), (2, 3000)]
NAMES = ("stream", "out", "dx", "dweight", "dbias", "dy", "dproj")


def affine(dim):
    weight, bias = torch.randn(2, dim, device=DEVICE)
    return 1 + weight / 4, bias / 4


def round_to(x, dtype):
    """Round float32 as the kernels do: Triton's interpreter cuts bfloat16."""
    if dtype == BRAIN and DEVICE.type == "cpu":
        cut = (x.detach().view(torch.int32) & -65536).view(torch.float32)
        x = x + (cut - x.detach())
    return x.to(dtype)


def rounded(x, y, weight, bias, proj, dtype):
    """The torch form with the norm rounded before weight and bias, as the kernels keep it for the gradients."""
    stream = x if y is None else x + y
    unit = round_to(layer_norm(stream.float(), x.shape[-1:], eps=1e-6), dtype)
    normed = round_to(unit * weight + bias, dtype)
    return stream, normed if proj is None else normed @ proj.T.to(dtype)


def results(impl, dtype, inputs, pulls):
    """Stream, normed tokens and gradients, under autocast to `dtype` if it is one of 16 bits.
    inputs: x, weight, bias, y and proj or None."""
    x, weight, bias, y, proj = (z if z is None else z.detach().requires_grad_() for z in inputs)
    if impl == "rounded":
        stream, out = rounded(x, y, weight, bias, proj, dtype)
    else:
        with torch.autocast(DEVICE.type, dtype, enabled=dtype in (BRAIN, HALF)):
            stream, out = add_norm(x, y, weight, bias, impl=impl, proj=proj)
    leaves = [z for z in (x, weight, bias, y, proj) if z is not None]
    grads = grad((stream, out), leaves, [pull.to(z.dtype) for pull, z in zip(pulls, (stream, out), strict=True)])
    return [stream.detach(), out.detach(), *grads]


def check(dtype, inputs, pulls):
    names = [name for name, z in zip(NAMES, (1, 1, 1, 1, 1, *inputs[3:]), strict=True) if z is not None]
    exact = results("torch", torch.float64, [z if z is None else z.double() for z in inputs], pulls)
    actual, low = (results(impl, dtype, inputs, pulls) for impl in ("triton", "rounded"))
    assert actual[1].dtype == dtype
    for gradients in (actual, low):  # that of the stream is as precise as those of the normed tokens
        gradients[2] = gradients[2].to(dtype)
    compare_with_torch(names, actual, low, exact)


def compare(shape, dtype, branch, out, kind=torch.float32, mean=0.0):
    """kind: of the stream."""
    dim = shape[-1]
    x = (mean + torch.randn(shape, device=DEVICE)).to(kind)
    y = torch.randn(shape, device=DEVICE).to(dtype) if branch else None
    proj = torch.randn(out, dim, device=DEVICE) * dim**-0.5 if out else None
    inputs = x, *affine(dim), y, proj
    pulls = torch.randn(shape, device=DEVICE), torch.randn(*shape[:-1], out or dim, device=DEVICE).to(dtype)
    check(dtype, inputs, pulls)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape, dtype):
    """Of a float32 stream with tokens normed in each dtype, and a branch in it."""
    compare(shape, dtype, branch=True, out=0)
    compare(shape, dtype, branch=False, out=6)


@pytest.mark.parametrize("dtype", [BRAIN, HALF])
def test_streams_in_16_bits(dtype):
    compare((3, 24), dtype, branch=True, out=5, kind=dtype)


def test_a_single_token():
    compare((24,), BRAIN, branch=True, out=5)


@pytest.mark.parametrize("branch", [False, True])
def test_rows_far_from_0(branch):
    """A mean much larger than the spread: not E[x^2] - E[x]^2."""
    compare((4, 100), torch.float32, branch, out=0, mean=1e4)


def test_strided_inputs():
    x, y = torch.randn(24, 7, device=DEVICE).T, torch.randn(24, 7, device=DEVICE).T.to(BRAIN)
    inputs = x, *torch.randn(24, 2, device=DEVICE).unbind(1), y, torch.randn(24, 5, device=DEVICE).T
    pulls = torch.randn(24, 7, device=DEVICE).T, torch.randn(5, 7, device=DEVICE).T
    check(BRAIN, inputs, pulls)


def test_more_rows_than_programs_and_the_same_bits(monkeypatch):
    """Every program of the backward takes several tiles, the last one in part."""
    monkeypatch.setattr(gate, "BACKWARD", (64, 4, 3, 1))
    compare((37, 24), BRAIN, branch=True, out=6)
    inputs = torch.randn(37, 24, device=DEVICE), *affine(24), torch.randn(37, 24, device=DEVICE).to(BRAIN), None
    one, two = (results("triton", BRAIN, inputs, (inputs[0], inputs[0])) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("used", ["stream", "out"])
def test_a_result_that_is_not_used(used):
    x, y, (weight, bias) = torch.randn(3, 24, device=DEVICE), torch.randn(3, 24, device=DEVICE).to(BRAIN), affine(24)
    leaves = [z.requires_grad_() for z in (x, y, weight, bias)]

    def grads(impl):
        with torch.autocast(DEVICE.type, BRAIN):
            result = dict(zip(("stream", "out"), add_norm(*leaves, impl=impl), strict=True))[used]
        return grad(result.float().square().sum(), leaves, allow_unused=True, materialize_grads=True)

    for a, b in zip(grads("triton"), grads("torch"), strict=True):
        torch.testing.assert_close(a, b, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("dtype, size", [(torch.float32, 4), (BRAIN, 2)])
def test_what_is_kept(dtype, size):
    """The norm before weight and bias, 1 / standard deviation, the parameters; neither the stream nor what is mapped.
    Without gradients nothing."""
    x, (weight, bias), proj = torch.randn(8, 24, device=DEVICE), affine(24), torch.randn(6, 24, device=DEVICE)
    kept = {}
    for z in (x, weight, bias, proj):
        z.requires_grad_()
    with (
        torch.autocast(DEVICE.type, dtype, enabled=size == 2),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t),
    ):
        add_norm(x, x.to(dtype), weight, bias, impl="triton", proj=proj)
    params = weight.nbytes + bias.nbytes + size * proj.numel()
    assert sum(t.nbytes for t in kept.values()) == size * x.numel() + 4 * 8 + params
    with torch.no_grad():
        _, _, unit, rstd = residual_norm.add_norm(x, None, weight, bias, 1e-6, dtype, False)
    assert unit is None and rstd is None


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("proj", [False, True])
def test_a_gradient_is_differentiated_again(branch, proj):
    """Some 30 operations in a row round, each about as far as the inputs: by chance sqrt(30) times what a rounding of
    the inputs changes, at most 16 times. (Terms cancel: it changes results by up to 270 of their roundings.)"""
    inputs = [torch.randn(3, 8, device=DEVICE), *affine(8), torch.randn(3, 8, device=DEVICE) if branch else None]
    inputs.append(torch.randn(5, 8, device=DEVICE) if proj else None)

    def second(impl, dtype, step=0.0):
        x, weight, bias, y, p = (
            z if z is None else (z.to(dtype) * (1 + step * torch.randn_like(z).sign())).requires_grad_() for z in inputs
        )
        leaves = [z for z in (x, weight, bias, y, p) if z is not None]
        stream, out = add_norm(x, y, weight, bias, impl=impl, proj=p)
        first = grad(stream.sin().sum() + out.sin().sum(), leaves, create_graph=True)
        return grad(sum(z.square().sum() for z in first), leaves)

    exact = second("torch", torch.float64)
    moved = [second("torch", torch.float64, torch.finfo(torch.float32).eps / 2) for _ in range(4)]
    for actual, c, *others in zip(second("triton", torch.float32), exact, *moved, strict=True):
        assert (actual - c).abs().max() <= 16 * max((z - c).abs().max() for z in others)


@pytest.mark.parametrize("branch", [False, True])
def test_operator(branch):
    x, (weight, bias), proj = torch.randn(3, 8, device=DEVICE), affine(8), torch.randn(5, 8, device=DEVICE)
    leaves = [z.requires_grad_() for z in (x, weight, bias, proj.to(BRAIN))]
    y = x.detach().to(BRAIN).requires_grad_() if branch else None
    arguments = (leaves[0], y, *leaves[1:], 1e-6, BRAIN, torch.float32, True)
    torch.library.opcheck(torch.ops.ndlightnet.add_norm.default, arguments)

    def f(x, y):
        stream, out = add_norm(x, y, weight, bias, impl="triton")
        return stream.sin() + out.cos()

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, y), f(x, y))
    a, b = (grad(g(x, y).sum(), [x, weight, bias]) for g in (compiled, partial(f)))
    torch.testing.assert_close(a, b)


def test_another_shape_is_refused():
    x, (weight, bias) = torch.randn(3, 8), (torch.ones(8), torch.zeros(8))
    with pytest.raises(ValueError, match=r"y \(4, 8\): expected the shape of x, \(3, 8\)"):
        add_norm(x, torch.randn(4, 8), weight, bias)
    with pytest.raises(ValueError, match=r"bias \(7,\): expected \(8,\) of x \(3, 8\)"):
        add_norm(x, None, weight, bias[:7])
