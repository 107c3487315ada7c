"""The general memory recurrence: its forms and gradients, its instances, the errors of the note it comes from."""

import pytest
import torch

from ndlightnet.ops.recurrence.memory import elementwise_memory, matrix_memory, reference
from ndlightnet.ops.recurrence.scan import prefix_sum, scan

FORGETS = {
    "full": (2, 7, 3, 4, 5),
    "row": (2, 7, 3, 4, 1),
    "column": (2, 7, 3, 1, 5),
    "scalar": (2, 7, 3, 1, 1),
    "constant row": (1, 1, 3, 4, 1),
    "constant": (1, 1, 1, 1, 1),
    "shared": (1, 7, 1, 4, 5),
}
MATRICES = {"matrix": (2, 7, 3, 4, 4), "constant matrix": (1, 1, 1, 4, 4)}


def given(n=7, batch=2, heads=3, dim=4, wide=5):
    s, e = torch.randn(2, batch, n, heads, dim, dtype=torch.float64)
    i = torch.randn(batch, n, heads, wide, dtype=torch.float64)
    m = torch.randn(batch, heads, dim, wide, dtype=torch.float64)
    return [x.requires_grad_() for x in (s, e, i, m)]


def forget(shape, complex_=False):
    f = torch.rand(shape, dtype=torch.float64)
    if shape in MATRICES.values():
        f = (2 * f - 1) / 2
    return (torch.polar(f, torch.randn_like(f)) if complex_ else f).requires_grad_()


CASES = [(shape, False) for shape in (*FORGETS.values(), *MATRICES.values())]
CASES += [(shape, True) for shape in (*FORGETS.values(), *MATRICES.values())]


def of(shape):
    return matrix_memory if shape in MATRICES.values() else elementwise_memory


@pytest.mark.parametrize("shape, complex_", CASES, ids=str)
def test_it_is_the_recurrence(close, shape, complex_):
    """Outputs, last memory and all gradients."""
    s, e, i, m = given()
    f = forget(shape, complex_)
    product = torch.matmul if of(shape) is matrix_memory else torch.mul
    ours = of(shape)(s, e, f, i, m)
    theirs = reference(s, e, f, i, m, product)
    parts = [(x.real, x.imag) if x.is_complex() else (x,) for x in (*ours, *theirs)]
    half = len(parts) // 2
    ours, theirs = (sum(parts[:half], ()), sum(parts[half:], ()))
    for a, b in zip(ours, theirs, strict=True):
        close(a, b, 1e-12)
    pulls = [torch.randn_like(x) for x in ours]
    pairs = (torch.autograd.grad(x, (s, e, i, m, f), pulls) for x in (ours, theirs))
    for a, b in zip(*pairs, strict=True):
        close(*(torch.view_as_real(x) if x.is_complex() else x for x in (a, b)), 1e-12)


@pytest.mark.slow
def test_autocast_changes_nothing_and_fullgraph_only_rounds():
    s, e, i, m = inputs = [x.detach().float().requires_grad_() for x in given(4)]
    f, matrix = torch.rand(2, 4, 3, 4, 5), torch.rand(2, 4, 3, 4, 4)

    def run(s, e, i, m):
        return *elementwise_memory(s, e, f, i, m), *matrix_memory(s, e, matrix, i, m)

    def results(run):
        out = run(s, e, i, m)
        return *out, *torch.autograd.grad(sum(x.square().sum() for x in out), inputs)

    expected = results(run)
    with torch.autocast("cpu", torch.bfloat16):
        auto = results(run)
        slow = *reference(s, e, f, i, m), *reference(s, e, matrix, i, m, torch.matmul)
    torch.compiler.reset()
    compiled = results(torch.compile(run, fullgraph=True, backend="aot_eager"))
    for a, b, c in zip(expected, auto, compiled, strict=True):
        assert torch.equal(a, b)
        # a graph may round products and sums in another order
        assert (a - c).abs().max() <= 4 * torch.finfo(a.dtype).eps * a.abs().max()
    for a, b in zip(expected, slow, strict=False):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_errors_show_the_shapes():
    s, e, i, m = given()
    f = torch.rand(2, 7, 3, 4, 1)
    with pytest.raises(ValueError, match=r"expand \(2, 7, 3, 4\).*expected"):
        elementwise_memory(s[:, 1:], e, f, i)
    with pytest.raises(ValueError, match=r"forget \(2, 7, 3, 3\): expected"):
        elementwise_memory(s, e, f[..., 0][..., :3], i)
    with pytest.raises(ValueError, match=r"forget \(2, 7, 3, 4, 1\): expected \(2, 7, 3, 4, 4\)"):
        matrix_memory(s, e, f, i)
    with pytest.raises(ValueError, match=r"memory \(2, 3, 4\): expected"):
        elementwise_memory(s, e, f, i, m[..., 0])
    with pytest.raises(ValueError, match=r"f \(2, 4, 3\): expected"):
        scan(torch.rand(2, 4, 3), torch.rand(2, 7, 3))


@pytest.mark.parametrize("n", [0, 1, 64, 65, 200, 4097])
def test_prefix_sums(close, n):
    x = torch.randn(2, n, 3, 2, dtype=torch.float64, requires_grad=True)
    out, expected = prefix_sum(x), x.cumsum(1)
    close(out, expected, 1e-12)
    pull = torch.randn_like(out)
    close(*(torch.autograd.grad(y, x, pull)[0] for y in (out, expected)), 1e-12)
