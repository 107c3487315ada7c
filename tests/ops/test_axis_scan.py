"""MD-TPE: the chunked recurrence against Toeplitz matrices built by hand, and step by step."""

from functools import partial

import pytest
import torch

from ndlightnet.layout import Boxes, Grid
from ndlightnet.nn import MDTPE
from ndlightnet.ops import axis_scan, line_scan, line_state, line_step
from ndlightnet.ops.axis_scan import api, lines, reference

from .largest_tensor import LargestTensor

LENGTHS = (1, 5, 63, 64, 65, 200)
GRIDS = ((7,), (4, 6), (3, 1, 5), (2, 3, 2, 4), (130, 2))  # the last one: more than a chunk


def sample(n, lines=3, dim=5, states=4, grads=False):
    """x, c, log decays of 0.4 to 0.999, and a first state."""
    x = torch.randn(lines, n, dim, dtype=torch.float64)
    c = torch.randn(dim, states, dtype=torch.float64)
    log_decay = torch.linspace(0.4, 0.999, states, dtype=torch.float64).log()
    h = torch.randn(lines, dim, states, dtype=torch.float64)
    return [t.requires_grad_(grads) for t in (x, c, log_decay, h)]


def toeplitz(c, log_decay, n, reverse=False):
    """(dim, n, n): T[d, l, m] = sum_t c[d, t] lambda_t^(l - m) for m <= l, and its mirror image."""
    lag = torch.arange(n, dtype=c.dtype)
    lag = lag[:, None] - lag[None]
    lag = -lag if reverse else lag
    powers = (log_decay.exp()[:, None, None] ** lag.clamp(min=0)) * (lag >= 0)
    return torch.einsum("dt,tlm->dlm", c, powers)


@pytest.mark.parametrize("n", LENGTHS)
def test_line_scan_and_line_state(close, close_grads, n):
    x, c, log_decay, h = inputs = sample(n, grads=True)
    y, after = line_scan(x, c, log_decay, h), line_state(x, log_decay, h)
    expected, last = reference.line_scan(x, c, log_decay.exp(), h)
    close(y, expected, 1e-11)
    close(after, last, 1e-11)
    close_grads((y, after), (expected, last), inputs, 1e-10)
    by_hand = torch.einsum("dlm,bmd->bld", toeplitz(c, log_decay, n), x)
    close(line_scan(x, c, log_decay), by_hand, 1e-11)
    close(line_state(x, log_decay), reference.line_scan(x, c, log_decay.exp(), 0 * h)[1], 1e-11)


@pytest.mark.parametrize("n", (1, 65))
def test_line_scan_is_the_oracles(oracle, float64, close, n):
    x, c, log_decay, _ = sample(n)
    y = line_scan(x, c, log_decay)
    for d in range(x.shape[-1]):
        close(y[..., d], oracle.ssm_scan(x[..., d], log_decay.exp(), c[d]), 1e-11)


@pytest.mark.parametrize("n", [1, 2, 4, 5, 10, 30, 70])
def test_any_number_of_chunks(close, close_grads, monkeypatch, n):
    """Of four tokens or fewer: one and many, by a scan and as in a graph that is compiled (up to
    four groups of chunks) or exported."""
    monkeypatch.setattr(lines, "CHUNK", 4)
    monkeypatch.setattr(lines, "EXPORTED", 4)
    x, c, log_decay, h = inputs = sample(n, lines=1, dim=2, states=2, grads=True)
    with torch.no_grad():
        log_decay[-1] = -1e-4  # a memory that lasts through all groups
    expected = reference.line_scan(x, c, log_decay.exp(), h)[0]
    pull = torch.randn_like(expected)
    pulled = torch.autograd.grad(expected, inputs, pull)
    for traced in (None, "is_compiling", "_is_exporting_flag"):
        with monkeypatch.context() as patch:
            if traced:
                patch.setattr(torch.compiler, traced, lambda: True)  # a flag is true as well
            y = line_scan(*inputs)
        close(y, expected, 1e-11)
        for ours, theirs in zip(torch.autograd.grad(y, inputs, pull), pulled, strict=True):
            close(ours, theirs, 1e-10)


@pytest.mark.parametrize("n", [65, 160, 170])
def test_chunks_of_many_short_lines_are_longer(close, n):
    """200 states are larger than the 85 tokens of a chunk; lines of one chunk have none."""
    x, c, log_decay, _ = sample(n, lines=500, dim=2, states=200)
    with LargestTensor() as made:
        y = line_scan(x, c, log_decay)
    assert (made.numel == x.numel()) == (n < 161)
    close(y[:3], line_scan(x[:3], c, log_decay), 1e-11)


def test_step_loop_is_the_scan(close):
    x, c, log_decay, h = sample(70)
    expected, after = line_scan(x, c, log_decay, h), line_state(x, log_decay, h)
    outputs = []
    for t in range(70):
        y, h = line_step(x[:, t], c, log_decay, h)
        outputs.append(y)
    close(torch.stack(outputs, 1), expected, 1e-11)
    close(h, after, 1e-11)


def weights(shape, dim=3, states=2):
    axes = len(shape)
    c = torch.randn(axes, dim, states, dtype=torch.float64)
    return c, torch.rand(axes, states, dtype=torch.float64).log()


def by_hand(x, forward, reverse=None):
    """Sum over axes of the dense product along each; the reverse way without its lag 0."""
    total = torch.zeros_like(x)
    for axis, n in enumerate(x.shape[1:-1]):
        t = toeplitz(forward[0][axis], forward[1][axis], n)
        if reverse is not None:
            back = toeplitz(reverse[0][axis], reverse[1][axis], n, reverse=True)
            t = t + back * (1 - torch.eye(n, dtype=x.dtype))
        lines = x.movedim(1 + axis, -2)
        total = total + torch.einsum("dlm,...md->...ld", t, lines).movedim(-2, 1 + axis)
    return total


@pytest.mark.parametrize("shape", GRIDS, ids=str)
@pytest.mark.parametrize("ways", [1, 2])
def test_axis_scan_is_the_sum_over_axes(close, close_grads, shape, ways):
    x = torch.randn(2, *shape, 3, dtype=torch.float64)
    parameters = [weights(shape) for _ in range(ways)]
    inputs = [x, *(p for pair in parameters for p in pair)]
    for tensor in inputs:
        tensor.requires_grad_()
    reverse = parameters[1] if ways == 2 else None
    actual = axis_scan(x, *parameters[0], reverse)
    expected = by_hand(x, parameters[0], reverse)
    close(actual, expected, 1e-11)
    close_grads(actual, expected, inputs, 1e-10)


@pytest.mark.parametrize("n", [1, 2, 33, 64])
def test_short_lines_both_ways_are_one_product(close, close_grads, monkeypatch, n):
    x = torch.randn(2, n, 3, dtype=torch.float64)
    ways = [weights((n,)), weights((n,))]
    inputs = [x, *(p for way in ways for p in way)]
    for tensor in inputs:
        tensor.requires_grad_()
    monkeypatch.setattr(lines, "line_scan", None)
    actual, expected = axis_scan(x, *ways[0], ways[1]), by_hand(x, *ways)
    close(actual, expected, 1e-11)
    close_grads(actual, expected, inputs, 1e-10)


def test_the_reference_does_not_run_the_torch_form(close, monkeypatch):
    x, pair = torch.randn(2, 7, 3, dtype=torch.float64), weights((7,))
    expected = axis_scan(x, *pair, impl="torch")
    monkeypatch.setattr(api, "line_scan", None)
    close(axis_scan(x, *pair, impl="reference"), expected, 1e-12)
    layer, tokens = MDTPE(1, 4, impl="reference"), torch.randn(1, 5, 4)
    assert layer(tokens).shape == tokens.shape
    with pytest.raises(ValueError, match=r"impl='fla': expected .* for axis_scan"):
        axis_scan(x, *pair, impl="fla")


@pytest.mark.parametrize("ways", [1, 2])
def test_padding_adds_nothing(close, ways):
    shape = (4, 6)
    x, mask = torch.randn(2, *shape, 3, dtype=torch.float64), torch.rand(2, *shape) < 0.6
    parameters = [weights(shape) for _ in range(ways)]
    reverse = parameters[1] if ways == 2 else None
    actual = axis_scan(x, *parameters[0], reverse, mask)
    close(actual, by_hand(x * mask[..., None], parameters[0], reverse), 1e-11)
    junk = torch.where(mask[..., None], x, 1e9)
    assert torch.equal(axis_scan(junk, *parameters[0], reverse, mask), actual)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_and_autocast(close, dtype):
    """Sums run in float32: twice the error of rounding the exact result bounds that of one line."""
    x, c, log_decay, _ = (t.to(dtype) for t in sample(200))
    y = line_scan(x, c, log_decay)
    exact = line_scan(x.double(), c.double(), log_decay.double())
    assert y.dtype == dtype and line_state(x, log_decay).dtype == torch.float32
    assert (y - exact).abs().max() <= 2 * (exact.to(dtype) - exact).abs().max() + 1e-6
    tokens, pair = torch.randn(2, 70, 3), [p.float() for p in weights((70,))]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = axis_scan(tokens, *pair)
    assert torch.equal(inside, axis_scan(tokens, *pair))


@pytest.mark.slow
def test_compile_without_a_graph_break(close, close_grads):
    torch._dynamo.reset()
    compiled = torch.compile(axis_scan, fullgraph=True, backend="aot_eager")
    x, forward, back = torch.randn(2, 66, 3).double(), weights((66,)), weights((66,))
    x.requires_grad_()
    actual, expected = compiled(x, *forward, back), axis_scan(x, *forward, back)
    close(actual, expected, 1e-12)
    close_grads(actual, expected, (x,), 1e-11)


@pytest.mark.slow
def test_a_compiled_graph_takes_lines_of_any_length(close):
    torch._dynamo.reset()
    compiled = torch.compile(line_scan, fullgraph=True, backend="eager", dynamic=True)
    for n in (200, 300, 390):
        with torch._dynamo.config.patch(error_on_recompile=n > 200):
            x, c, log_decay, _ = sample(n, lines=1, dim=2, states=2)
            close(compiled(x, c, log_decay), line_scan(x, c, log_decay), 1e-12)


def test_errors_show_the_shapes():
    x, (c, decay) = torch.randn(2, 4, 6, 3).double(), weights((4, 6))
    for args in ((c[:1], decay), (c[:, :2], decay), (c, decay[:1]), (c, decay[:, :1]), (c[0], decay)):
        with pytest.raises(ValueError, match=r"coef .* log_decay"):
            axis_scan(x, *args)
        with pytest.raises(ValueError, match=r"reverse coef"):
            axis_scan(x, c, decay, args)
    with pytest.raises(ValueError, match=r"reverse coef .*expected \(2, 3, 2\)"):
        axis_scan(x, c, decay, (c[..., :1], decay[:, :1]))
    with pytest.raises(ValueError, match=r"products=torch.float64: expected bfloat16"):
        axis_scan(x.float(), c, decay, products=torch.float64)


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_a_dtype_is_that_of_the_sums(impl):
    """The dtype of products is that to which tokens and sums are rounded, but not the tokens that are added."""
    x, c, log_decay, _ = (t.float() for t in sample(9))
    scan = partial(axis_scan, coef=c[None], log_decay=log_decay[None], impl=impl)
    low = x.bfloat16()
    y = scan(low, dtype=torch.float32, residual=True)
    assert y.dtype == torch.float32 and torch.equal(y, low + scan(low, dtype=torch.float32))
    assert torch.equal(scan(x, products=torch.bfloat16, residual=True), x + scan(low, dtype=torch.float32))
    reverse = (0.7 * c[None], log_decay[None])  # both ways are rounded once
    assert torch.equal(scan(low, reverse=reverse), scan(low.float(), reverse=reverse).bfloat16())
    exactly = scan(low, products=torch.float32, dtype=torch.float32, residual=True)
    assert torch.equal(exactly, scan(low.float(), residual=True))
    for dtype in (torch.bfloat16, torch.float16):  # also where x has more digits, or other ones
        for residual in (True, False):
            assert all(scan(tokens, dtype=dtype, residual=residual).dtype == dtype for tokens in (x, low))


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_a_sum_over_axes_is_in_the_dtype_of_the_result(impl):
    """Only the sum along an axis is rounded to the products' dtype."""
    x, ways = torch.randn(2, 4, 6, 3), [[w.float() for w in weights((4, 6))] for _ in range(2)]

    def scan(*axes):
        keep = torch.tensor([axis in axes for axis in range(2)])[:, None, None]
        (coef, decay), (rcoef, rdecay) = ways
        reverse = rcoef * keep, rdecay
        return axis_scan(x, coef * keep, decay, reverse, products=torch.bfloat16, dtype=torch.float32, impl=impl)

    assert torch.equal(scan(0, 1), scan(0) + scan(1))
    assert not torch.equal(scan(0, 1), scan(0, 1).bfloat16().float())


def test_boxes_of_samples_exchange_nothing_and_are_rounded_like_samples():
    x, (c, log_decay) = torch.randn(4, 24, 3), (w.float() for w in weights((4, 6)))
    scan = partial(axis_scan, x, c, log_decay, products=torch.bfloat16, residual=True)
    assert torch.equal(scan(layout=Boxes((4, 6), count=2)), scan(layout=Grid((4, 6))))
