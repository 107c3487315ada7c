"""The kernels of MD-TPE against a token by token scan in float64.

Two bounds, both derived: every element lies within what rounding the taps and the outputs can do
at worst, and the mean square error is at most twice that of the same roundings done in torch.
"""

import pytest
import torch
from torch import Tensor

from ndlightnet.ops.axis_scan import reference
from ndlightnet_kernels import axis_scan as kernels
from ndlightnet_kernels import axis_states
from ndlightnet_kernels.axis_lines import Lines

from .kernel_cases import BRAIN, DEVICE, HALF

FULL = torch.float32


pytestmark = pytest.mark.usefixtures("poison")


def problem(grid, dim, states, ways, dtype, masked=None, batch=1, skip=0):
    """dy, x, weights and mask; decays of 0.3 to 0.999. skip: axes without a reverse direction."""
    dy, x = (torch.randn(batch, *grid, dim, device=DEVICE).to(dtype) for _ in range(2))
    weights = []
    for way in range(ways):
        axes = len(grid) - way * skip
        weights.append(torch.randn(axes, dim, states, device=DEVICE) / states**0.5)
        weights.append((0.3 + 0.699 * torch.rand(axes, states, device=DEVICE)).log())
    mask = None
    if masked is not None:
        mask = torch.rand(batch, *grid, device=DEVICE) < (0.6 if masked == "holes" else -1)
        x[~mask] = torch.nan
    return dy, x, weights, mask


def scan(x: Tensor, weights: list[Tensor], mask: Tensor | None, residual: bool) -> Tensor:
    """Token by token: (batch, *grid, dim) -> same shape."""
    seen = x if mask is None else x.masked_fill(~mask[..., None], 0)
    total = x.nan_to_num() if residual else torch.zeros_like(x)
    for axis in range(x.ndim - 2):
        for way in range(len(weights) // 2):
            pair, last = weights[2 * way : 2 * way + 2], axis - x.ndim + 2
            if -last > len(pair[0]):
                continue
            c, decay = (w[last] for w in pair)
            lines = seen.movedim(1 + axis, -2)
            turned = lines.flip(-2) if way else lines
            flat = turned.reshape(-1, *turned.shape[-2:])
            start = flat.new_zeros(len(flat), *c.shape)
            y = reference.line_scan(flat, c, decay.exp(), start)[0].view(turned.shape)
            y = y.flip(-2) - lines * c.sum(-1) if way else y
            total = total + y.movedim(-2, 1 + axis)
    return total


def gradients(pull, x, weights, mask, residual):
    """Output and gradients, float64."""
    leaves = [t.double().requires_grad_() for t in (x, *weights)]
    y = scan(leaves[0], leaves[1:], mask, residual)
    return [y.detach(), *torch.autograd.grad(y, leaves, pull.double())]


def rounded(x, weights, mask, residual, transposed, products, dtype):
    """What the roundings of operands, taps and outputs do to the product or its adjoint."""
    exact, n = x.double(), max(x.shape[1:-1])
    hidden = None if mask is None else ~mask[..., None]
    seen = exact.masked_fill(hidden, 0) if mask is not None and not transposed else exact
    lag = torch.arange(n, device=x.device)
    lag = lag[:, None] - lag[None]
    seen = seen.to(products).double()
    total = exact.nan_to_num() if residual else torch.zeros_like(exact)
    for axis in range(x.ndim - 2):
        taps = 0
        for way in range(len(weights) // 2):
            pair = weights[2 * way : 2 * way + 2]
            last = axis - x.ndim + 2  # the reverse direction may belong to the last axes only
            if -last > len(pair[0]):
                continue
            c, decay = (w[last].double() for w in pair)
            far = -lag if way else lag
            powers = (decay[:, None, None] * far.clamp(min=0)).exp() * (far >= way)
            taps = taps + torch.einsum("dt,tlm->dlm", c, powers)
        taps = taps.to(products).double()[:, : x.shape[1 + axis], : x.shape[1 + axis]]
        rule = "dml,...md->...ld" if transposed else "dlm,...md->...ld"
        y = torch.einsum(rule, taps, seen.movedim(1 + axis, -2)).movedim(-2, 1 + axis)
        if transposed and mask is not None:
            y = y.masked_fill(hidden, 0)
        total = (total + y.to(products).double()).to(dtype).double()
    return total


def check(case, residual=False, products=None, dtype=None):
    dy, x, weights, mask = case
    products, dtype = products or x.dtype, dtype or x.dtype
    dy = dy.to(dtype)
    padded = [*weights, *[None] * (4 - len(weights))]
    clean = x.nan_to_num()  # padding is NaN: with a residual it shows in the output, and only there
    out = kernels.forward(clean if residual else x, *padded, mask, residual, products, dtype)
    actual = [out, *kernels.backward(dy, x, *padded, mask, residual, products)]
    assert actual[len(weights) + 2 :] == [None] * (4 - len(weights))
    actual = actual[: len(weights) + 2]
    exact = gradients(dy, clean, weights, mask, residual)
    sizes = [t.abs() for t in (dy, clean)], [w.abs() if w.ndim == 3 else w for w in weights]
    largest = gradients(*sizes[0], sizes[1], mask, residual)
    unit = torch.finfo(products).eps * (1 if DEVICE.type == "cpu" else 0.5)  # the interpreter cuts
    exactly = 2.0**-20  # float32 sums, and products of float32 in three parts
    cut = int(products != x.dtype) + int(products != dtype)  # operands that are rounded
    long = sum(n > kernels._longest(products) for n in x.shape[1:-1])
    for i, (a, b, bound) in enumerate(zip(actual, exact, largest, strict=True)):
        assert a.shape == b.shape and a.dtype == ((dtype, x.dtype)[i] if i < 2 else FULL)
        assert a.isfinite().all()
        # Results: the taps, each product, the sum so far; of long lines the powers before and after a cut, a tile's
        # sum, the state, the sum so far. Gradients of weights, of long lines: powers, sum and state of x and of dy,
        # and powers again.
        roundings = 2 * x.ndim - 3 + 5 * long if i < 2 else 7 * (long > 0)
        error = (a.double() - b).abs()
        assert (error <= ((roundings + cut) * unit + exactly) * bound + 1e-7 * bound.max()).all(), i
        if i < 2:
            low = rounded((clean, dy)[i], weights, mask, residual, i == 1, products, (dtype, x.dtype)[i])
            band = exactly * bound.square().mean().sqrt()
            factor = 2 if DEVICE.type == "cuda" or products != BRAIN else 8
            factor *= 5**0.5 if long else 1  # as many roundings as a tap's, and four
            assert error.square().mean().sqrt() <= factor * (low - b).square().mean().sqrt() + band
    return actual


@pytest.mark.slow
@pytest.mark.parametrize(
    "grid, dim, states, ways, dtype, masked, residual, batch",
    [
        ((7,), 5, 3, 1, FULL, None, False, 2),
        ((1,), 5, 3, 2, FULL, None, True, 1),
        ((4, 6), 24, 4, 2, BRAIN, "holes", True, 2),
        ((4, 6), 5, 4, 1, HALF, "holes", False, 1),
        ((3, 4, 5), 24, 20, 2, HALF, None, True, 1),
        ((3, 1, 5), 5, 4, 2, BRAIN, "all", False, 2),
        ((2, 3, 2, 4), 5, 4, 2, FULL, "holes", False, 1),
        ((2, 3, 2, 4), 5, 1, 1, BRAIN, None, False, 1),
        ((40, 20), 5, 16, 2, BRAIN, None, False, 1),
        ((2, 33), 3, 4, 1, FULL, "holes", True, 1),
        ((70, 2), 3, 4, 1, HALF, None, False, 1),
        ((17,), 5, 1, 2, FULL, "holes", True, 2),
        ((100,), 3, 40, 2, BRAIN, None, False, 1),
    ],
    ids=str,
)
def test_outputs_and_gradients(grid, dim, states, ways, dtype, masked, residual, batch):
    check(problem(grid, dim, states, ways, dtype, masked, batch), residual)


@pytest.mark.slow
@pytest.mark.parametrize(
    "grid, dim, states, ways, dtype, masked, residual, batch, skip, products, out, longest, numbers",
    [
        ((140,), 5, 3, 1, BRAIN, None, False, 2, 0, None, None, 16, 23),  # three runs of three tiles
        ((50, 2), 24, 4, 2, BRAIN, "holes", True, 1, 0, None, None, 16, 192),
        ((3, 33), 5, 20, 2, HALF, "holes", False, 1, 1, None, None, 16, 1),
        ((50,), 70, 3, 2, FULL, None, True, 1, 0, None, None, 32, 1),
        ((290,), 2, 3, 2, FULL, "holes", False, 1, 0, None, None, 16, 4096),  # more runs than are carried at once
        ((33, 2), 5, 2, 2, BRAIN, None, True, 1, 1, BRAIN, FULL, 16, 4096),
        ((7, 35), 3, 140, 2, FULL, "holes", True, 1, 0, HALF, FULL, 16, 1),
        ((3, 4), 5, 3, 2, FULL, None, True, 2, 1, BRAIN, FULL, 16, 1),
        ((70, 3), 5, 3, 2, BRAIN, "holes", True, 2, 0, None, None, 32, 1),  # last tiles are shorter
        ((2, 40), 3, 3, 1, FULL, "holes", False, 2, 0, None, None, 32, 4096),
    ],
    ids=str,
)
def test_lines_of_several_tiles(
    monkeypatch, grid, dim, states, ways, dtype, masked, residual, batch, skip, products, out, longest, numbers
):
    """Lines of one run and of several: the more numbers, the more programs share runs."""
    monkeypatch.setattr(kernels, "_longest", lambda products: longest)
    monkeypatch.setattr(axis_states, "NUMBERS", numbers)
    check(problem(grid, dim, states, ways, dtype, masked, batch, skip), residual, products, out)


def test_a_decay_of_zero_forgets_all_earlier_tiles(monkeypatch):
    monkeypatch.setattr(kernels, "LONGEST", 32)
    _, x, (coef, log_decay), _ = problem((40,), 5, 1, 1, FULL)
    y = kernels.forward(x, coef, torch.full_like(log_decay, -torch.inf))
    torch.testing.assert_close(y, x * coef[0, :, 0])


@pytest.mark.slow
def test_padding_shows_in_no_output():
    dy, x, weights, mask = problem((4, 6), 5, 4, 2, FULL, "holes")
    first = kernels.forward(x, *weights, mask)
    assert torch.equal(first, kernels.forward(torch.where(mask[..., None], x, 1e9), *weights, mask))
    assert not kernels.backward(dy, x, *weights, mask)[0][~mask].any()
    again = kernels.backward(dy, x, *weights, mask)
    for a, b in zip(again, kernels.backward(dy, x, *weights, mask), strict=True):
        assert torch.equal(a, b)


def test_later_tokens_do_not_leak():
    _, x, weights, _ = problem((40,), 5, 4, 1, FULL)
    changed = x.clone()
    changed[:, 17:] *= 1e9
    ours, theirs = (kernels.forward(t, *weights) for t in (x, changed))
    assert torch.equal(ours[:, :17], theirs[:, :17])
    assert not torch.equal(ours[:, 17], theirs[:, 17])


def test_views_and_no_tokens():
    _, x, weights, _ = problem((4, 6), 5, 4, 2, FULL)
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(kernels.forward(turned, *weights), kernels.forward(x, *weights))
    nothing = x[:0]
    assert kernels.forward(nothing, *weights).shape == nothing.shape
    dx, *rest = kernels.backward(nothing, nothing, *weights)
    assert dx.shape == nothing.shape and not any(g.any() for g in rest)


def test_supported():
    x = torch.zeros(1, 2, 3)
    assert kernels.supported(x) == kernels.supported(torch.zeros(0, 2, 10**6, 3)) == ""
    assert "float64" in kernels.supported(x.double())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "grid, dim, states, ways, dtype, masked",
    [
        ((32, 64, 64), 48, 16, 2, BRAIN, None),
        ((16, 56, 56), 40, 64, 1, BRAIN, "holes"),
        ((128, 20), 24, 16, 2, HALF, "holes"),
        ((100, 110), 24, 16, 2, BRAIN, None),
        ((64, 33), 24, 16, 2, FULL, None),
        ((8, 14, 14), 384, 128, 2, BRAIN, None),
        ((129,), 384, 64, 2, BRAIN, "holes"),
        ((257, 65), 40, 64, 2, HALF, None),
        ((1000,), 48, 128, 1, BRAIN, None),
        ((5, 300), 72, 64, 2, FULL, "holes"),
        ((2500,), 16, 20, 2, BRAIN, "holes"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_larger(grid, dim, states, ways, dtype, masked, stream):
    """stream: tokens and results are in float32, products in 16 bits."""
    case = problem(grid, dim, states, ways, FULL if stream else dtype, masked, batch=2)
    check(case, residual=True, products=dtype, dtype=FULL if stream else dtype)


@pytest.mark.parametrize("batch, wide", [(2**17 - 1, False), (2**17, True)])
def test_addresses_of_two_to_the_31_numbers_have_64_bits(batch, wide):
    x = torch.empty(batch, 128, 128, dtype=BRAIN, device="meta")
    assert kernels._launch(x, Lines(0, 8, 1), BRAIN, 8, kernels.PRODUCT)[2]["LONG"] == wide


@pytest.mark.gpu
def test_the_end_of_more_than_two_to_the_31_numbers():
    """Only the last lines hold numbers: their results, and the gradients of weights, are those of these
    lines alone. Two tensors of 4.3 GB at a time."""
    batch, n, dim, last = 2**17 + 8, 128, 128, 8
    x = torch.zeros(batch, n, dim, dtype=torch.bfloat16, device="cuda")
    assert x[:-last].numel() >= 2**31
    x[-last:] = torch.randn_like(x[-last:])
    weights = []
    for _ in range(2):
        weights.append(torch.randn(1, dim, 4, device="cuda"))
        weights.append((0.3 + 0.699 * torch.rand(1, 4, device="cuda")).log())
    y = kernels.forward(x, *weights)
    assert not y[:-last].any()
    torch.testing.assert_close(y[-last:], kernels.forward(x[-last:].contiguous(), *weights), rtol=0, atol=0)
    del y
    end = x[-last:].contiguous()
    dx, *parameter_grads = kernels.backward(x, x, *weights)
    dx_alone, *alone = kernels.backward(end, end, *weights)
    torch.testing.assert_close(dx[-last:], dx_alone, rtol=0, atol=0)
    for a, b in zip(parameter_grads, alone, strict=True):  # summed in another order
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())
