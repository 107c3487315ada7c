"""Instance norm, residual and SiLU in one kernel, against float64, beside torch in the inputs' own precision."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ndlightnet.nn import convolutional
from ndlightnet.nn.convolutional import ConvBlock
from ndlightnet.ops import instance_norm
from ndlightnet.ops.instance_norm import instance_norm_silu, instance_norm_silu_
from ndlightnet.ops.recompute import dropped
from ndlightnet.parallel import Exchange, Slab
from ndlightnet_kernels import instance_norm as kernels

from .kernel_cases import DEVICE, DTYPES
from .yardstick import check_operator, largest, with_gradients

SHAPES = [(2, 3, 5), (1, 2, 7, 19), (2, 3, 4, 5, 6), (1, 2, 3, 2, 3, 2)]
NAMES = ("out", "dx", "dweight", "dbias", "dresidual")


pytestmark = pytest.mark.usefixtures("poison")


class Twice(Exchange):
    """Two processes that have the same."""

    rank, count = 0, 2

    def all_to_all(self, sends, shapes):
        return lambda: list(sends)


def result(impl, pull, *inputs):
    return with_gradients(partial(instance_norm_silu, impl=impl), pull, *inputs)


def check(pull, *inputs):
    x, weight, bias, *residual = (x.double() for x in inputs)
    y = torch.group_norm(x, x.shape[1], weight, bias)  # SiLU gets it, and the residual
    check_operator(NAMES, instance_norm_silu, pull, *inputs, exponent=largest(sum(residual, y)))


def random(shape, dtype, *, residual=True):
    pull, x, more = ((scale * torch.randn(shape, device=DEVICE)).to(dtype) for scale in (1, 3, 2))
    weight, bias = torch.randn(2, shape[1], device=DEVICE)
    return pull, x + 1, 1 + weight / 4, bias, *[more] * residual


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape, dtype):
    for residual in (False, True):
        check(*random(shape, dtype, residual=residual))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_single_cell_is_mapped_to_the_bias(dtype):
    """And has no gradient but for rounding: a difference of equal numbers, which two kernels may
    round differently, times 1 / sqrt(eps)."""
    pull, x, weight, bias, residual = random((1, 1, 1), dtype)
    y, dx, dweight, dbias, dresidual = result("triton", pull, x, weight, bias, residual)
    before = (residual.double() + bias.double()).requires_grad_()
    expected = torch.nn.functional.silu(before)
    (d,) = torch.autograd.grad(expected, before, pull.double())
    rounding = 8 * torch.finfo(torch.float32).eps * d.abs().max().item()
    assert dx.abs().max() <= rounding * weight.abs().item() / 1e-5**0.5 and not dweight.any()
    for found, wanted in ((y, expected), (dbias, d.flatten()), (dresidual, d)):
        torch.testing.assert_close(found, wanted.detach().to(found.dtype))


@pytest.mark.parametrize("value", [1.2345678, 12345.678, -1234567.8])
def test_equal_cells_are_mapped_to_the_bias(value, monkeypatch):
    """Of one cell, of a tile in part, and of several chunks, on one process and on slabs of two."""
    monkeypatch.setattr(kernels, "TILE", 128)
    bias = torch.tensor([0.5, -0.25], device=DEVICE)
    for size in (1, 77, 1000):
        x = torch.full((1, 2, size), value, device=DEVICE)
        expected = torch.nn.functional.silu(bias).view(1, 2, 1).expand_as(x)

        def of_two(mean, squares, size=size):
            layout = Slab((size,), sizes=(size, size), exchange=Twice())
            return instance_norm._sample_statistics(mean, squares, size, layout)

        for of_whole in (None, of_two):
            how = {"of_whole": of_whole}
            y, mean, _ = kernels.instance_norm_silu(x, 3 * bias, bias, None, 1e-5, **how)
            torch.testing.assert_close(y, expected, rtol=1e-6, atol=0)
            assert torch.equal(mean, x[..., 0])


@pytest.mark.parametrize("residual", [False, True])
def test_in_place_it_is_the_same(residual):
    _, *given = random((2, 3, 50), torch.bfloat16, residual=residual)
    expected = instance_norm_silu(*given, impl="triton")
    assert instance_norm_silu_(*given) is given[0] and torch.equal(given[0], expected)
    x = given[0].float().requires_grad_()
    held = x.exp()  # exp keeps its result
    with torch.no_grad():
        instance_norm_silu_(held, *given[1:])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        held.sum().backward()


def test_a_block_that_predicts_overwrites(monkeypatch):
    """On a GPU, and here in the interpreter: the values of training."""
    block, x = ConvBlock(2, 3, 4).to(DEVICE), torch.randn(2, 3, 5, 6, device=DEVICE)
    expected, written = block(x).detach(), []

    def overwrite(x, *more):
        written.append(x.data_ptr())
        return instance_norm_silu_(x, *more)

    monkeypatch.setattr(convolutional, "kernel_runs", lambda x: True)
    monkeypatch.setattr(convolutional, "instance_norm_silu_", overwrite)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = block(x)
        assert len(written) == 2 and y.data_ptr() == written[1]
        torch.testing.assert_close(y, expected)
        written.clear()


def test_second_derivatives_are_torchs():
    pull, *given = random((2, 3, 20), torch.float32)
    given = [y.requires_grad_() for y in given]

    def second(impl):
        y = instance_norm_silu(*given, impl=impl)
        first = torch.autograd.grad(y, given, pull, create_graph=True)
        return torch.autograd.grad(sum(g.sin().sum() for g in first), given)

    for a, b in zip(second("triton"), second("torch"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("most", [64, 3])
@pytest.mark.parametrize("size", [257, 1000, 1536])
def test_rows_of_several_chunks_and_tiles(size, most, monkeypatch):
    """Chunks of one or more tiles, the last ones in part; the same bits twice."""
    monkeypatch.setattr(kernels, "TILE", 128)
    monkeypatch.setattr(kernels, "MOST_SPLITS", most)
    given = random((2, 2, size), torch.float32)
    check(*given)
    one, two = (result("triton", *given) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_mean_far_from_zero_and_constant_rows():
    """Not E[x^2] - E[x]^2: of numbers near 1e4 the deviations are left, of a constant none."""
    x = torch.randn(1, 3, 999, device=DEVICE) + 1e4
    x[:, 1] = 3
    x[:, 2, 0] = -1e5  # the first cell is far from the others
    ones, zeros = torch.ones(3, device=DEVICE), torch.zeros(3, device=DEVICE)
    _, mean, rstd = kernels.instance_norm_silu(x, ones, zeros, None, 1e-5)
    exact = x.double()
    torch.testing.assert_close(mean, exact.mean(-1).float())
    variance = exact.var(-1, correction=0)
    torch.testing.assert_close(rstd, (variance + 1e-5).rsqrt().float(), rtol=1e-4, atol=0)


def test_wide_residuals_are_finite():
    pull, x, weight, bias, _ = random((1, 2, 96), torch.float32)
    wide = torch.linspace(-6e4, 6e4, 192, device=DEVICE).view(1, 2, 96)
    outputs = result("triton", pull, x, weight, bias, wide)
    torch.testing.assert_close(outputs, result("torch", pull, x, weight, bias, wide))


def test_strided_inputs_and_other_dtypes_of_weights():
    pull, x, weight, bias, more = random((6, 5, 4), torch.float32)
    check(pull.transpose(0, 2), x.transpose(0, 2), weight, bias, more.transpose(0, 2))
    check(pull, x, torch.randn(5, 2, device=DEVICE)[:, 0], torch.zeros(1, device=DEVICE).expand(5))
    pull, x, weight, bias, more = random((2, 5, 40), torch.bfloat16)
    check(pull, x, weight.bfloat16(), bias.bfloat16(), more)


@pytest.mark.parametrize("residual", [False, True])
def test_operators(residual):
    pull, *given = random((2, 3, 5, 4), torch.float32, residual=residual)
    given = [y.requires_grad_() for y in given] + [None] * (not residual)
    operators = torch.ops.ndlightnet
    torch.library.opcheck(operators.instance_norm_silu.default, (*given, 1e-5))
    _, *saved = kernels.instance_norm_silu(*given, 1e-5)
    still = [y if y is None else y.detach() for y in given]
    torch.library.opcheck(operators.instance_norm_silu_.default, (*still, 1e-5))
    backward = operators.instance_norm_silu_backward.default
    torch.library.opcheck(backward, (pull, *still, *saved))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    pull, *given = random((2, 3, 5, 4), torch.float32)
    run = torch.compile(lambda *xs: instance_norm_silu(*xs, impl="triton").sin(), fullgraph=True, backend=backend)
    given = [y.requires_grad_() for y in given]
    for a, b in zip(
        torch.autograd.grad(run(*given), given, pull),
        torch.autograd.grad(instance_norm_silu(*given, impl="torch").sin(), given, pull),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("impl, numbers", [("triton", 2 * 2 * 3), ("torch", 0)])
def test_it_keeps_its_inputs_and_at_most_two_numbers_a_row(impl, numbers):
    pull, *inputs = random((2, 3, 50), torch.float32)
    inputs = [x.requires_grad_() for x in inputs]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = instance_norm_silu(*inputs, impl=impl)
    known = {x.data_ptr() for x in inputs}
    assert sum(t.numel() for t in kept if t.data_ptr() not in known) == numbers
    again = checkpoint(lambda *xs: instance_norm_silu(*xs, impl=impl), *inputs, use_reentrant=False)
    for a, b in zip(*(torch.autograd.grad(z, inputs, pull) for z in (y, again)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("residual", [False, True])
def test_again_from_its_statistics_to_the_same_bits(residual, monkeypatch):
    monkeypatch.setattr(kernels, "TILE", 128)
    _, *inputs = random((2, 3, 300), torch.bfloat16, residual=residual)
    inputs = [*inputs, None] if not residual else inputs
    y, mean, rstd = kernels.instance_norm_silu(*inputs, 1e-5)
    assert torch.equal(kernels.apply_statistics(*inputs, mean, rstd), y)


@pytest.mark.parametrize("shared", [False, True])
def test_a_block_of_kernels_keeps_no_output(shared, monkeypatch):
    """Nor the residual that is a convolution of kernel size 1: gradients as with all of it, on a slab too."""

    class Alone(Exchange):
        rank, count = 0, 1

        def all_to_all(self, sends, shapes):
            return lambda: list(sends)

    block, read = ConvBlock(2, 3, 4).to(DEVICE), torch.nn.Conv2d(4, 2, 1).to(DEVICE)
    layout = Slab((5, 6), sizes=(5,), exchange=Alone()) if shared else None
    x = torch.randn(2, 3, 5, 6, device=DEVICE, requires_grad=True)
    sources, again = [x, *block.parameters(), *read.parameters()], kernels.apply_statistics
    calls = []
    monkeypatch.setattr(instance_norm, "kernel_runs", lambda x: True)
    monkeypatch.setattr(kernels, "apply_statistics", lambda *args: calls.append(args[3] is None) or again(*args))
    y = block(x, layout)
    with dropped(y):
        out = read(y)
    grads = torch.autograd.grad(out.square().sum(), sources)
    assert calls == [False, True]  # for what reads the block, and for its second convolution
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda packed: packed):
        expected = torch.autograd.grad(read(block(x, layout)).square().sum(), sources)
    assert len(calls) == 2
    for one, two in zip(grads, expected, strict=True):
        torch.testing.assert_close(one, two)


def test_other_shapes_are_refused():
    x, ones = torch.ones(1, 2, 3), torch.ones(2)
    with pytest.raises(ValueError, match=r"residual \(1, 2, 4\): expected \(1, 2, 3\), as x"):
        instance_norm_silu(x, ones, ones, torch.ones(1, 2, 4))
    with pytest.raises(ValueError, match=r"bias \(3,\): expected \(2,\), as x has"):
        instance_norm_silu(x, ones, torch.ones(3))


@pytest.mark.parametrize("residual", [False, True])
def test_slabs_have_the_statistics_of_the_whole(residual):
    """The kernels on two uneven slabs, forward and backward, against torch on the whole."""
    x, pull, more = (torch.randn(2, 3, 7, 4, 5, device=DEVICE) + 2 for _ in range(3))
    weight, bias = torch.randn(2, 3, device=DEVICE)
    expected = result("torch", pull, *((x, weight, bias, more) if residual else (x, weight, bias)))
    sizes, length = (4, 3), 7 * 4 * 5
    slabs = [[y.split(sizes, 2)[i].contiguous() for y in (x, pull, more)] for i in range(2)]
    variance, mean = torch.var_mean(x, (2, 3, 4), correction=0)
    own: list[torch.Tensor] = []

    def noted(sums):
        own.append(sums.clone())
        return sums

    for last in (False, True):  # the second time with the sums of both
        found = []
        for slab, dout, add in slabs:
            add = add if residual else None
            y, mu, rstd = kernels.instance_norm_silu(
                slab, weight, bias, add, 1e-5, of_whole=lambda *_: (mean, variance)
            )
            share = slab[0, 0].numel() / length
            total = (lambda _, share=share: sum(own) * share) if last else noted
            inputs = (dout, slab, weight, bias, add, mu, rstd)
            found.append([y, *kernels.instance_norm_silu_backward(*inputs, total)])
    assert torch.allclose(mu, mean, rtol=1e-5, atol=1e-6)
    for i, wanted in enumerate(expected):
        parts = [one[i] for one in found]
        # gradients of weight and bias are those of each slab's cells
        joined = sum(parts) if wanted.ndim == 1 else torch.cat(parts, 2)
        error = (joined - wanted).abs().max() / wanted.abs().max()
        assert error <= 1e-5, (NAMES[i], error)


def test_second_derivatives_and_checkpointing_of_a_slab(close):
    """By the kernels' node, of a slab that is all of the grid, against torch."""
    x = torch.randn(1, 2, 4, 6, device=DEVICE, requires_grad=True)
    weight, bias = (torch.rand(2, device=DEVICE, requires_grad=True) for _ in range(2))

    class Alone(Exchange):
        rank, count = 0, 1

        def all_to_all(self, sends, shapes):
            return lambda: list(sends)

    layout = Slab((4, 6), sizes=(4,), exchange=Alone())

    def penalty(y):
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), (x, weight, bias))

    def slab(x):
        return instance_norm._SlabKernels.apply(x, weight, bias, None, 1e-5, layout)

    again = checkpoint(slab, x, use_reentrant=False)
    pair = [torch.autograd.grad(y.square().sum(), x)[0] for y in (again, slab(x))]
    assert torch.equal(*pair)
    found = penalty(slab(x))
    for ours, theirs in zip(found, penalty(instance_norm_silu(x, weight, bias)), strict=True):
        close(ours, theirs, 1e-5)
