"""Convolutions in slabs against torch's of the whole."""

import pytest
import torch
from torch.autograd import grad

from ndlightnet.nn import slabs

# kernel, stride, padding
KINDS = [("Conv", 3, 1, 1), ("Conv", 1, 1, 0), ("Conv", 2, 2, 0), ("Conv", 3, 3, 0),
         ("Conv", 3, 2, 1), ("Conv", 7, 2, 3), ("ConvTranspose", 2, 2, 0),
         ("ConvTranspose", 3, 3, 0)]  # fmt: skip


def made(kind, dims, *how, channels=(2, 5), bias=True):
    kernel, stride, padding = how
    both = [getattr(m, f"{kind}{dims}d") for m in (torch.nn, slabs)]
    torch.manual_seed(1)
    whole, parts = (cls(*channels, kernel, stride, padding, bias=bias).double() for cls in both)
    parts.load_state_dict(whole.state_dict())
    return whole, parts


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("planes", [5, 13, 14])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(("kind", "kernel", "stride", "padding"), KINDS)
def test_slabs_as_the_whole(
    dims, kind, kernel, stride, padding, planes, bias, monkeypatch, close
):  # fmt: skip
    planes = max(planes, kernel)
    net, ours = made(kind, dims, kernel, stride, padding, bias=bias)
    space = (planes, 7, 8)[:dims]
    x = torch.randn(3, 2, *space, dtype=torch.float64, requires_grad=True)
    expected = net(x)
    sizes, convolution = [], torch.convolution

    def noted(x, *args):
        y = convolution(x, *args)
        sizes.append(max(x.numel(), y.numel()))
        return y

    monkeypatch.setattr(torch, "convolution", noted)
    plane = 3 * 5 * x[0, 0, 0].numel() * (stride**dims if kind == "ConvTranspose" else 1)
    monkeypatch.setattr(slabs, "NUMBERS", plane * (kernel + stride) + 1)
    found = ours(x)
    assert bool(sizes) == (planes > kernel + stride) and max([0, *sizes]) < slabs.NUMBERS
    close(found, expected, 1e-12)
    weights = torch.randn_like(expected)
    for one, other in zip(
        grad((found * weights).sum(), [x, *ours.parameters()]),
        grad((expected * weights).sum(), [x, *net.parameters()]), strict=True,
    ):  # fmt: skip
        close(one, other, 1e-12)


def test_under_autocast_in_its_dtype(monkeypatch, close):
    net, ours = made("Conv", 3, 3, 1, 1)
    net, ours, x = net.float(), ours.float(), torch.randn(1, 2, 9, 4, 5)
    monkeypatch.setattr(slabs, "NUMBERS", 500)
    with torch.autocast("cpu", torch.bfloat16):
        whole, parts = net(x), ours(x)
    assert parts.dtype == whole.dtype == torch.bfloat16
    close(parts, whole, 2**-8)
    for one, other in zip(
        grad(parts.float().sum(), ours.parameters()), grad(whole.float().sum(), net.parameters()),
        strict=True,
    ):  # fmt: skip
        assert one.dtype == torch.float32
        close(one, other, 2**-7)


def test_within_a_compiled_graph(monkeypatch, close):
    net, ours = made("Conv", 2, 3, 1, 1)
    x = torch.randn(1, 2, 9, 4, dtype=torch.float64, requires_grad=True)
    monkeypatch.setattr(slabs, "NUMBERS", 100)
    torch.compiler.reset()
    found = torch.compile(ours, backend="aot_eager", fullgraph=True)(x)
    close(found, net(x), 1e-12)
    close(*(grad(y.square().sum(), x)[0] for y in (found, net(x))), 1e-12)


def test_a_second_derivative_raises(monkeypatch):
    ours = made("Conv", 1, 3, 1, 1)[1]
    x = torch.randn(1, 2, 9, dtype=torch.float64, requires_grad=True)
    monkeypatch.setattr(slabs, "NUMBERS", 30)
    (first,) = grad(ours(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad(first.sum(), x)


def test_in_a_transform_as_a_whole(monkeypatch, close):
    net, ours = made("Conv", 1, 3, 1, 1)
    x = torch.randn(1, 2, 9, dtype=torch.float64)
    monkeypatch.setattr(slabs, "NUMBERS", 30)
    for transform in (torch.func.grad, torch.func.hessian):
        close(*(transform(lambda x, m=m: m(x).pow(3).sum())(x) for m in (ours, net)), 1e-12)
