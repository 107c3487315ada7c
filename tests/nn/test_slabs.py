"""Convolutions in slabs against torch's of the whole."""

import weakref

import pytest
import torch
from torch.autograd import grad

from ndlightnet.nn import slabs

# kernel, stride, padding
KINDS = [
    ("Conv", 3, 1, 1),
    ("Conv", 1, 1, 0),
    ("Conv", 2, 2, 0),
    ("Conv", 3, 3, 0),
    ("Conv", 3, 2, 1),
    ("Conv", 7, 2, 3),
    ("Conv", 1, 1, 3),
    ("Conv", 2, 1, 9),
    ("ConvTranspose", 2, 2, 0),
    ("ConvTranspose", 3, 3, 0),
]


def made(kind, dims, *how, channels=(2, 5), bias=True):
    kernel, stride, padding = how
    both = [getattr(m, f"{kind}{dims}d") for m in (torch.nn, slabs)]
    torch.manual_seed(1)
    whole, parts = (cls(*channels, kernel, stride, padding, bias=bias).double() for cls in both)
    parts.load_state_dict(whole.state_dict())
    return whole, parts


@pytest.mark.parametrize(("channels", "bias"), [((2, 5), True), ((5, 2), False)])
@pytest.mark.parametrize("planes", [5, 13, 14])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(("kind", "kernel", "stride", "padding"), KINDS)
def test_slabs_as_the_whole(dims, kind, kernel, stride, padding, planes, channels, bias, monkeypatch, close):
    planes = max(planes, kernel)
    net, ours = made(kind, dims, kernel, stride, padding, channels=channels, bias=bias)
    space = (planes, 7, 8)[:dims]
    x = torch.randn(3, channels[0], *space, dtype=torch.float64, requires_grad=True)
    expected = net(x)
    sizes, convolution = [], torch.convolution

    def noted(x, *args):
        y = convolution(x, *args)
        sizes.append(max(x.numel(), y.numel()))
        return y

    monkeypatch.setattr(torch, "convolution", noted)
    plane = max(x[:, :, 0].numel(), expected[:, :, 0].numel())
    monkeypatch.setattr(slabs, "NUMBERS", plane * (kernel + stride) + 1)
    found = ours(x)
    assert bool(sizes) == (max(x.numel(), expected.numel()) >= slabs.NUMBERS)
    assert max([0, *sizes]) < slabs.NUMBERS
    close(found, expected, 1e-12)
    weights = torch.randn_like(expected)
    for one, other in zip(
        grad((found * weights).sum(), [x, *ours.parameters()]),
        grad((expected * weights).sum(), [x, *net.parameters()]),
        strict=True,
    ):
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
        grad(parts.float().sum(), ours.parameters()), grad(whole.float().sum(), net.parameters()), strict=True
    ):
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


@pytest.mark.parametrize(("kind", "kernel", "stride", "padding"), KINDS)
def test_second_derivatives(kind, kernel, stride, padding, monkeypatch, close):
    monkeypatch.setattr(slabs, "NUMBERS", 30)
    x = torch.randn(1, 2, 14, dtype=torch.float64, requires_grad=True)
    second = []
    for net in made(kind, 1, kernel, stride, padding):
        first = grad(net(x).pow(3).sum(), [x, *net.parameters()], create_graph=True)
        total = sum(one.square().sum() for one in first)
        second.append(grad(total, [x, *net.parameters()]))
    for expected, found in zip(*second, strict=True):
        close(found, expected, 1e-12)


def test_in_a_transform_as_a_whole(monkeypatch, close):
    net, ours = made("Conv", 1, 3, 1, 1)
    x = torch.randn(1, 2, 9, dtype=torch.float64)
    monkeypatch.setattr(slabs, "NUMBERS", 30)
    for transform in (torch.func.grad, torch.func.hessian):
        close(*(transform(lambda x, m=m: m(x).pow(3).sum())(x) for m in (ours, net)), 1e-12)


def test_as_autocast_float64_is_left_and_meta_has_none(monkeypatch):
    monkeypatch.setattr(slabs, "NUMBERS", 100)
    ours = made("Conv", 3, 3, 1, 1)[1]
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(torch.randn(1, 2, 9, 4, 5, dtype=torch.float64)).dtype == torch.float64
    x = torch.empty(1, 2, 9, 4, 5, dtype=torch.float64, device="meta")
    assert ours.to("meta")(x).shape == (1, 5, 9, 4, 5)


def test_the_weight_that_is_given(monkeypatch, close):
    """A parametrisation draws or computes it once for a call."""
    torch.manual_seed(1)
    net = torch.nn.utils.parametrizations.spectral_norm(slabs.Conv1d(2, 3, 3, padding=1)).eval()
    x = torch.randn(1, 2, 9)
    whole, calls = net(x), []
    net.parametrizations.weight[0].register_forward_hook(lambda *_: calls.append(1))
    monkeypatch.setattr(slabs, "NUMBERS", 15)
    close(net(x), whole, 1e-6)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Conv", {"padding_mode": "circular", "padding": 1}),
        ("Conv", {"dilation": 2}),
        ("Conv", {"padding": "same"}),
        ("ConvTranspose", {"stride": 2}),
        ("ConvTranspose", {"stride": 3, "padding": 1}),
        ("ConvTranspose", {"stride": 3, "output_padding": 1}),
    ],
)
def test_other_kinds_go_as_a_whole(kind, options, monkeypatch):
    both = (getattr(m, f"{kind}2d") for m in (torch.nn, slabs))
    net, ours = (cls(2, 3, 3, **options) for cls in both)
    ours.load_state_dict(net.state_dict())
    x = torch.randn(1, 2, 9, 8)
    monkeypatch.setattr(slabs, "NUMBERS", 30)
    assert torch.equal(ours(x), net(x))
    assert torch.equal(ours(x[0]), net(x[0]))


def test_a_transposed_convolution_to_a_size_asked_for(monkeypatch):
    net, ours = made("ConvTranspose", 1, 3, 3, 0)
    x = torch.randn(1, 2, 9, dtype=torch.float64)
    monkeypatch.setattr(slabs, "NUMBERS", 30)
    assert torch.equal(ours(x, output_size=[29]), net(x, output_size=[29]))


def test_one_slab_at_a_time(monkeypatch):
    """What a slab needs is freed before the next one, forward and backward."""
    ours, x = made("Conv", 1, 3, 1, 1)[1], torch.randn(1, 2, 40, dtype=torch.float64)
    x.requires_grad_()
    monkeypatch.setattr(slabs, "NUMBERS", 50)
    alive, results = {}, weakref.WeakSet()

    def noted(module, name):
        real, alive[name] = getattr(module, name), []

        def call(*args):
            alive[name].append(len(results))
            out = real(*args)
            results.add(out if isinstance(out, torch.Tensor) else out[0])
            return out

        monkeypatch.setattr(module, name, call)

    noted(torch, "convolution")
    noted(torch.ops.aten, "convolution_backward")
    ours(x).sum().backward()
    for counts in alive.values():
        assert len(counts) > 3 and not any(counts)
