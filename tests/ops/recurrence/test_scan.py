"""The scan, and its form in exported graphs, against one step after the other."""

import pytest
import torch

from ndlightnet.ops.recurrence import scan

RULES = {"elementwise": scan.ELEMENTWISE, "matrix": scan.MATRIX, "maximum": scan.MAXIMUM}
BEYOND = 1e-13  # float64 roundings of 1e-16 that 70 steps grow; values are below 100


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 70])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", ["scan", "_doubling"])
def test_a_scan_is_its_steps(form, rule, n):
    """Decays of zero among them, which hide what was before; gradients too."""
    shape = (2, n, 3, 3)
    f = 0.6 * torch.rand(shape, dtype=torch.float64) - 0.1
    f[:, n // 2] = RULES[rule].zero
    f.requires_grad_()
    b, first = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in (shape, (2, 3, 3)))
    m, steps = first, []
    for t in range(n):
        m = RULES[rule].step(f[:, t], m, b[:, t])
        steps.append(m)
    expected, actual = torch.stack(steps, 1), getattr(scan, form)(f, b, first, RULES[rule])
    assert (actual - expected).abs().max() < BEYOND
    if rule == "maximum" and form == "scan":
        return  # sums of logarithms, whose maxima have no gradient
    pull = torch.randn_like(expected)
    pairs = (torch.autograd.grad(y, (f, b, first), pull) for y in (actual, expected))
    for ours, theirs in zip(*pairs, strict=True):
        assert (ours - theirs).abs().max() < BEYOND * (1 + theirs.abs().max())


@pytest.mark.slow
def test_an_exported_scan_has_six_operations_a_doubling():
    """Compilers take as long as there are operations: 20 doublings for each of many scans."""

    class Scan(torch.nn.Module):
        def forward(self, f: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return scan.scan(f, b)

    sizes = {1: torch.export.Dim.DYNAMIC}
    program = torch.export.export(Scan(), (torch.rand(1, 9, 2), torch.randn(1, 9, 2)), dynamic_shapes=(sizes, sizes))
    operations = [node for node in program.graph.nodes if node.op == "call_function"]
    assert 5 * scan.DOUBLINGS < len(operations) < 6 * scan.DOUBLINGS + 20
    for n in (2, 5, 300):
        f, b = torch.rand(1, n, 2), torch.randn(1, n, 2)
        # roundings of 6e-8 that a few doublings grow
        assert (program.module()(f, b) - scan.scan(f, b)).abs().max() < 1e-5
