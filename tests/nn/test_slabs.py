"""Convolutions in slabs against torch's of the whole."""

import re
import weakref

import pytest
import torch
from torch.autograd import grad

from ndlightnet.nn import slabs
from ndlightnet.ops import instance_norm_silu

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
    ("Conv", 2, 5, 0),
    ("ConvTranspose", 2, 2, 0),
    ("ConvTranspose", 3, 3, 0),
]


def pair(kind, dims, *sizes, channels=(2, 5), bias=True):
    """torch's layer, and ours with its weights. sizes: kernel, stride, padding."""
    both = [getattr(m, f"{kind}{dims}d") for m in (torch.nn, slabs)]
    torch.manual_seed(1)
    net, ours = (cls(*channels, *sizes, bias=bias).double() for cls in both)
    ours.load_state_dict(net.state_dict())
    return net, ours


def gradients(y, x, layer):
    return grad((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), [x, *layer.parameters()])


@pytest.mark.parametrize(("channels", "bias"), [((2, 5), True), ((5, 2), False)])
@pytest.mark.parametrize("planes", [5, 13, 14])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(("kind", "kernel", "stride", "padding"), KINDS)
def test_slabs_as_the_whole(dims, kind, kernel, stride, padding, planes, channels, bias, monkeypatch, close):
    planes = max(planes, kernel)
    net, ours = pair(kind, dims, kernel, stride, padding, channels=channels, bias=bias)
    space = (planes, 7, 8)[:dims]
    x = torch.randn(3, channels[0], *space, dtype=torch.float64, requires_grad=True)
    expected = net(x)
    sizes, convolve = [], slabs._convolve

    def noted(x, *args):
        y = convolve(x, *args)
        sizes.append(max(x.numel(), y.numel()))
        return y

    monkeypatch.setattr(slabs, "_convolve", noted)
    plane = max(x[:, :, 0].numel(), expected[:, :, 0].numel())
    monkeypatch.setattr(slabs, "NUMBERS", plane * (kernel + stride) + 1)
    monkeypatch.setattr(slabs, "CELLS", 16)
    y = ours(x)
    product = kernel == 1 and padding == 0
    assert bool(sizes) == (product or max(x.numel(), expected.numel()) >= slabs.NUMBERS)
    assert max([0, *sizes]) < slabs.NUMBERS
    close(y, expected, 1e-12)
    for one, two in zip(gradients(y, x, ours), gradients(expected, x, net), strict=True):
        close(one, two, 1e-12)


def test_under_autocast_in_its_dtype(monkeypatch, close):
    """Which leaves out float64, and which device meta does not have."""
    net, ours = pair("Conv", 3, 3, 1, 1)
    x = torch.randn(1, 2, 9, 4, 5, dtype=torch.float64)
    monkeypatch.setattr(slabs, "NUMBERS", 100)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(x).dtype == torch.float64
        expected, y = net.float()(x.float()), ours.float()(x.float())
    assert y.dtype == expected.dtype == torch.bfloat16
    close(y, expected, 2**-8)
    grads = [grad(out.float().sum(), layer.parameters()) for out, layer in ((y, ours), (expected, net))]
    for one, two in zip(*grads, strict=True):
        assert one.dtype == torch.float32
        close(one, two, 2**-7)
    assert ours.to("meta")(x.float().to("meta")).shape == (1, 5, 9, 4, 5)


@pytest.mark.slow
def test_within_a_compiled_graph(monkeypatch, close):
    net, ours = pair("Conv", 2, 3, 1, 1)
    x = torch.randn(1, 2, 9, 4, dtype=torch.float64, requires_grad=True)
    monkeypatch.setattr(slabs, "NUMBERS", 100)
    torch.compiler.reset()
    y = torch.compile(ours, backend="aot_eager", fullgraph=True)(x)
    close(y, net(x), 1e-12)
    close(*(grad(out.square().sum(), x)[0] for out in (y, net(x))), 1e-12)


@pytest.mark.parametrize(("inputs", "bias"), [(1, False), (8, False), (8, True)])
def test_a_product_may_be_changed_in_place(inputs, bias):
    net, ours = pair("Conv", 3, 1, 1, 0, channels=(inputs, 4), bias=bias)
    x = torch.randn(2, inputs, 3, 4, 5, dtype=torch.float64)
    (expected, *grads), *more = (
        [y := layer(x).mul_(2), *grad(y.square().sum(), layer.parameters())] for layer in (net, ours)
    )
    for one, two in zip(more[0], [expected, *grads], strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("inputs", [1, 8])
def test_a_product_of_other_channels_or_dtypes_is_refused_as_torch_does(inputs):
    net, ours = (m.Conv3d(inputs, 5, 1, bias=False) for m in (torch.nn, slabs))
    x = torch.randn(1, inputs, 3, 4, 5)
    for wrong in (torch.randn(1, 5, 3, 4, 5), x.double(), x.bfloat16(), x.long()):
        with pytest.raises(RuntimeError) as expected:
            net(wrong)
        with pytest.raises(RuntimeError, match=re.escape(str(expected.value))):
            ours(wrong)


def test_products_of_many_samples_are_not_cut(monkeypatch, close):
    """Nor is there a product for each of them."""
    net, ours = pair("Conv", 2, 1, 1, 0)
    monkeypatch.setattr(slabs, "CELLS", 16)
    x, bmm, calls = torch.randn(slabs.SAMPLES, 2, 9, 5, dtype=torch.float64, requires_grad=True), torch.bmm, []
    monkeypatch.setattr(torch, "bmm", lambda *args: calls.append(1) or bmm(*args))
    for one, two in zip(gradients(ours(x), x, ours), gradients(net(x), x, net), strict=True):
        close(one, two, 1e-12)
    assert len(calls) == 3  # the result, two gradients


@pytest.mark.parametrize(("kind", "kernel", "stride", "padding"), KINDS)
def test_second_derivatives(kind, kernel, stride, padding, monkeypatch, close):
    monkeypatch.setattr(slabs, "NUMBERS", 30)
    monkeypatch.setattr(slabs, "CELLS", 4)
    x = torch.randn(1, 2, 14, dtype=torch.float64, requires_grad=True)
    second = []
    for net in pair(kind, 1, kernel, stride, padding):
        first = grad(net(x).pow(3).sum(), [x, *net.parameters()], create_graph=True)
        total = sum(one.square().sum() for one in first)
        second.append(grad(total, [x, *net.parameters()]))
    for expected, ours in zip(*second, strict=True):
        close(ours, expected, 1e-12)


def test_in_a_transform_as_a_whole(monkeypatch, close):
    net, ours = pair("Conv", 1, 3, 1, 1)
    x = torch.randn(1, 2, 9, dtype=torch.float64)
    monkeypatch.setattr(slabs, "NUMBERS", 30)
    for transform in (torch.func.grad, torch.func.hessian):
        close(*(transform(lambda x, m=m: m(x).pow(3).sum())(x) for m in (ours, net)), 1e-12)


def test_the_weight_that_is_given(monkeypatch, close):
    """A parametrisation draws or computes it once for a call."""
    torch.manual_seed(1)
    net = torch.nn.utils.parametrizations.spectral_norm(slabs.Conv1d(2, 3, 3, padding=1)).eval()
    x = torch.randn(1, 2, 9)
    expected, calls = net(x), []
    net.parametrizations.weight[0].register_forward_hook(lambda *_: calls.append(1))
    monkeypatch.setattr(slabs, "NUMBERS", 15)
    close(net(x), expected, 1e-6)
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
    net, ours = pair("ConvTranspose", 1, 3, 3, 0)
    x = torch.randn(1, 2, 9, dtype=torch.float64)
    monkeypatch.setattr(slabs, "NUMBERS", 30)
    assert torch.equal(ours(x, output_size=[29]), net(x, output_size=[29]))


def test_one_slab_at_a_time(monkeypatch):
    """What a slab needs is freed before the next one, forward and backward."""
    ours, x = pair("Conv", 1, 3, 1, 1)[1], torch.randn(1, 2, 40, dtype=torch.float64)
    x.requires_grad_()
    monkeypatch.setattr(slabs, "NUMBERS", 50)
    alive, results = {}, weakref.WeakSet()

    def noted(module, name):
        real, alive[name] = getattr(module, name), []

        def call(*args):
            alive[name].append(len(results))
            out = real(*args)
            large = out if isinstance(out, torch.Tensor) else out[0]
            if large is not None:  # not of weights alone
                results.add(large)
            return out

        monkeypatch.setattr(module, name, call)

    noted(torch, "convolution")
    noted(torch.ops.aten, "convolution_backward")
    ours(x).sum().backward()
    for counts in alive.values():
        assert len(counts) > 3 and not any(counts)


def backend(x, weight, sizes):
    backend = torch._C._select_conv_backend(x, weight, None, *sizes, [1] * 3, False, [0] * 3, 1, None)
    return backend.name


@pytest.mark.parametrize("kernel", [(3, 3, 3), (1, 3, 3), (3, 1, 3), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("shape", [(1, 40, 16, 32, 5), (1, 40, 16, 33, 5), (2, 4, 8, 8, 5), (1, 32, 6, 4, 6)], ids=str)
def test_small_samples_are_those_that_torch_convolves_without_onednn(shape, kernel):
    """Of three axes, and as a batch of two it convolves them with it."""
    x, weight, space = torch.randn(shape), torch.randn(64, shape[1], *kernel), [5, 5, 5]
    sizes = [1, 1, 1], [0, 0, 0]
    assert slabs._without_onednn(x, weight, space) == (backend(x, weight, sizes) == "Slow3d")
    assert backend(torch.cat([x, x]), weight, sizes) == "Mkldnn"
    assert not slabs._without_onednn(x, weight[..., :1, :1], space)  # one thread convolves two without it


def derivatives(layer, x):
    """What a layer returns, its gradients and second derivatives, in float64."""
    inputs = [x.clone().requires_grad_(), *layer.parameters()]
    y = layer(inputs[0])
    first = grad(y.pow(3).sum(), inputs, create_graph=True)
    second = grad(sum(one.square().sum() for one in first), inputs)
    return [y.double(), *(one.double() for one in (*first, *second))]


@pytest.mark.parametrize("space", [(6, 7, 5), (7, 4, 5), (2, 5, 6), (2, 4, 5), (4, 5, 9)], ids=str)
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 1, 1), (2, 2, 0), (3, 2, 1), ((1, 7, 7), 2, (0, 3, 3))])
def test_a_small_sample_as_a_batch_of_two(kernel, stride, padding, space, monkeypatch, close):
    net, ours = pair("Conv", 3, kernel, stride, padding, channels=(5, 6))
    x, batches, convolve = torch.randn(1, 5, *space), [], torch.nn.functional.conv3d
    expected = derivatives(net, x.double())
    monkeypatch.setattr(torch.nn.functional, "conv3d", lambda x, *args: (batches.append(len(x)), convolve(x, *args))[1])
    for products, batch in ((2**20, 1), (0, 2)):
        monkeypatch.setattr(slabs, "PRODUCTS", products)
        for one, two in zip(derivatives(ours.float(), x), expected, strict=True):
            close(one / two.abs().max(), two / two.abs().max(), 1e-5)
        assert batches.pop() == batch
    with torch.autocast("cpu", torch.bfloat16):
        close(ours(x).double(), expected[0], 2**-6)
    assert batches == [1]


@pytest.mark.slow
def test_a_small_sample_in_a_compiled_and_in_an_exported_graph(monkeypatch, close):
    net, ours = pair("Conv", 3, 3, 1, 1)
    ours.float()
    x = torch.randn(1, 2, 9, 4, 5)
    monkeypatch.setattr(slabs, "PRODUCTS", 0)
    torch.compiler.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    close(compiled(x).double(), net(x.double()), 1e-5)
    exported = torch.export.export(ours, (x,))
    close(exported.module()(x).double(), net(x.double()), 1e-5)
    assert not any("cat" in str(node.target) for node in exported.graph.nodes)


@pytest.mark.parametrize(("kind", "kernel", "stride", "padding"), KINDS)
def test_gradients_one_after_the_other(kind, kernel, stride, padding, monkeypatch, close):
    """On a GPU: that of the weight, then that of x, which is computed again for the first and freed then."""
    net, ours = pair(kind, 2, kernel, stride, padding, channels=(4, 4))
    z = torch.randn(2, 4, 9, 6, dtype=torch.float64, requires_grad=True)
    ones, zeros = torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    expected = gradients(net(instance_norm_silu(z, ones, zeros)), z, net)
    monkeypatch.setattr(slabs, "GPUS", ("cpu",))
    backward, inputs = torch.ops.aten.convolution_backward, []

    def noted(dy, x, *args):
        inputs.append((x.untyped_storage().size(), weakref.ref(x), inputs[-1][1]() is None if inputs else None))
        return backward(dy, x, *args)

    monkeypatch.setattr(torch.ops.aten, "convolution_backward", noted)
    for one, two in zip(gradients(ours(instance_norm_silu(z, ones, zeros)), z, ours), expected, strict=True):
        close(one, two, 1e-12)
    if kernel > 1 or padding:  # others are products
        (_, _, _), (stub, _, freed) = inputs
        assert freed and stub == 8
