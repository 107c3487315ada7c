"""Norm and gate in one kernel, against float64, beside torch in the inputs' own precision."""

import pytest
import torch
from torch.nn.functional import layer_norm, silu

from ndlightnet.ops import norm_gate
from ndlightnet_kernels import gate

from .kernel_cases import DEVICE, DTYPES
from .yardstick import compare_with_torch, largest, with_gradients

SHAPES = [(1, 5), (3, 24), (2, 7, 100), (41, 64), (1, 384)]
EPS = 1e-6


pytestmark = pytest.mark.usefixtures("poison")


def gated_norm(y, u, weight, bias, local=None):
    """As the layer does it: the norm in its weights' precision, the gate in its own."""
    norm = layer_norm(y.to(weight.dtype), y.shape[-1:], weight, bias, EPS)
    out = norm * u.sigmoid()
    return (out if local is None else out + silu(local)).to(y.dtype)


def ours_norm(pull, y, u, weight, bias, local=None):
    out, *saved = gate.norm_gate(y, u, weight, bias, local, EPS)
    assert saved[0].untyped_storage()._cdata != saved[1].untyped_storage()._cdata
    *grads, dlocal, none = gate.norm_gate_backward(pull, y, u, weight, bias, local, *saved, again=False)
    assert none is None
    assert (dlocal is None) == (local is None)
    return out, *grads, *([] if local is None else [dlocal])


def compare(ours, function, pull, *inputs):
    actual = ours(pull, *inputs)
    assert len({x.untyped_storage()._cdata for x in actual}) == len(actual)  # as operators must
    low = with_gradients(function, pull, *inputs)
    exact = with_gradients(function, pull.double(), *(x.double() for x in inputs))
    names = ("out", "dy", "du", "dweight", "dbias", "dlocal")
    compare_with_torch(names, actual, low, exact, largest(inputs[4]) if len(inputs) > 4 else 0)


def random(shape, dtype, *scales):
    return [(scale * torch.randn(shape, device=DEVICE)).to(dtype) for scale in scales]


def affine(dim, dtype=torch.float32):
    weight, bias = torch.randn(2, dim, device=DEVICE)
    return (1 + weight / 4).to(dtype), (bias / 4).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_gate(shape, dtype):
    pull, y, u, local = random(shape, dtype, 1, 1e-3, 2, 3)
    compare(ours_norm, gated_norm, pull, y, u, *affine(shape[-1]))
    compare(ours_norm, gated_norm, pull, y, u, *affine(shape[-1]), local)


def test_norm_weights_in_the_inputs_precision():
    pull, y, u = random((9, 24), torch.bfloat16, 1, 1, 1)
    compare(ours_norm, gated_norm, pull, y, u, *affine(24, torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_wide_open_and_shut(dtype):
    """No overflow in the exponentials, and NaN nowhere."""
    pull, y, _ = random((4, 24), dtype, 1, 1, 1)
    logits = torch.linspace(-6e4, 6e4, 96, device=DEVICE).to(dtype).view(4, 24)
    compare(ours_norm, gated_norm, pull, y, logits, *affine(24))


def test_norm_of_constant_and_of_far_rows():
    """Variance 0, and a mean much larger than the spread: not E[y^2] - E[y]^2."""
    pull, y, u = random((6, 100), torch.float32, 1, 1, 1)
    y[0] = 0
    y[1] = 3
    y[2:] += 1e4
    out, mean, rstd = gate.norm_gate(y, u, *affine(100), None, EPS)
    assert out.isfinite().all()
    torch.testing.assert_close(mean, y.double().mean(-1).float())
    expected = (y[2:].double().var(-1, correction=0) + EPS).rsqrt().float()
    torch.testing.assert_close(rstd[2:], expected, rtol=1e-3, atol=0)
    y, u, pull = y[2:], u[2:], pull[2:]
    compare(ours_norm, gated_norm, pull, y, u, *affine(100))


@pytest.mark.slow
def test_more_rows_than_programs_and_the_same_bits(monkeypatch):
    """Every program of the backward takes several tiles, the last one in part."""
    monkeypatch.setattr(gate, "BACKWARD", (64, 4, 3, 1))
    pull, y, u = random((37, 24), torch.bfloat16, 1, 1, 1)
    weight, bias = affine(24)
    compare(ours_norm, gated_norm, pull, y, u, weight, bias)
    one, two = (ours_norm(pull, y, u, weight, bias) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_strided_inputs():
    pull, y, u = (x.transpose(0, 1) for x in random((24, 7), torch.float32, 1, 1, 1))
    compare(ours_norm, gated_norm, pull, y, u, *affine(24))
    weight, bias = torch.randn(24, 2, device=DEVICE).unbind(1)
    compare(ours_norm, gated_norm, pull, y, u, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_maps_before_and_behind(dtype):
    """Of a gate of rank 3, and of the output: computed again in the backward."""
    y, u, local, pull = random((7, 24), dtype, 1, 2, 3, 1)
    up, proj = random((24, 24), dtype, 0.5, 0.2)
    inputs = y, u[:, :3], *affine(24, dtype), local, up[:, :3], proj[:5]

    def results(impl, kind):
        leaves = [x.to(kind).requires_grad_() for x in inputs]
        out = norm_gate(*leaves[:4], EPS, impl, *leaves[4:])
        return out.detach(), *torch.autograd.grad(out, leaves, pull[:, :5].to(kind))

    names = ("out", "dy", "dgate", "dweight", "dbias", "dlocal", "dup", "dproj")
    exact, low = results("torch", torch.float64), results("torch", dtype)
    compare_with_torch(names, results("triton", dtype), low, exact, largest(local))


def test_other_shapes_are_refused():
    """Before a kernel reads beyond them."""
    y, (weight, bias), up = torch.randn(3, 24, device=DEVICE), affine(24), torch.randn(24, 5, device=DEVICE)
    for shape, maps, got in (((2, 24), {}, r"gate \(2, 24\)"), ((2, 5), {"up": up}, r"gate mapped by up \(2, 24\)")):
        for impl in ("torch", "triton"):
            with pytest.raises(ValueError, match=got + r": expected the shape of y, \(3, 24\)"):
                norm_gate(y, torch.randn(shape, device=DEVICE), weight, bias, impl=impl, **maps)
    with pytest.raises(ValueError, match=r"local \(24,\): expected the shape of y"):
        norm_gate(y, y, weight, bias, local=y[0])


def test_no_rows():
    y = torch.zeros(0, 24, device=DEVICE)
    out, _, _, dweight, dbias = ours_norm(y, y, y, *affine(24))
    assert out.shape == (0, 24) and not dweight.any() and not dbias.any()
