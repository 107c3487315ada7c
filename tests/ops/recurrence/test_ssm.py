"""Diagonal state-space models: as recurrence, kernel, FFT and memory; where their poles start."""

import math

import pytest
import torch
from torch.autograd import grad
from torch.utils._python_dispatch import TorchDispatchMode

from ndlightnet.ops import line_scan
from ndlightnet.ops.recurrence.selective import selective_scan
from ndlightnet.ops.recurrence.ssm import diagonal_ssm, discretize, legs, powers, zero_order_hold
from ndlightnet.ops.recurrence.wkv import mean, merge, token, weighted_sums

LENGTHS = (1, 5, 63, 64, 65, 131, 200)


def sample(n, batch=2, channels=3, pairs=4, grads=False):
    """u, z with reaches of 1 to 50 tokens, weights, and the states before."""
    u = torch.randn(batch, n, channels, dtype=torch.float64)
    rate = torch.logspace(-1.7, 0, pairs, dtype=torch.float64).expand(channels, pairs)
    z = torch.complex(-rate, 3 * torch.randn(channels, pairs, dtype=torch.float64))
    weight = torch.randn(channels, pairs, dtype=torch.complex128)
    x = torch.randn(batch, channels, pairs, dtype=torch.complex128)
    return [t.requires_grad_(grads) for t in (u, z, weight, x)]


def step_by_step(u, z, weight, x):
    outputs = []
    for t in range(u.shape[1]):
        x = z.exp() * x + u[:, t, :, None]
        outputs.append(2 * (weight * x).sum(-1).real)
    return torch.stack(outputs, 1), x


def real(*xs):
    return [torch.view_as_real(x) if x.is_complex() else x for x in xs]


def rotations(z):
    """exp(z) of (channels, pairs) as real matrices (channels, 2 pairs, 2 pairs)."""
    f = z.exp()
    blocks = torch.stack([torch.stack([f.real, -f.imag], -1), torch.stack([f.imag, f.real], -1)], -2)
    return torch.stack([torch.block_diag(*one) for one in blocks])


@pytest.mark.parametrize("n", LENGTHS)
def test_chunks_are_step_by_step(close, close_grads, n):
    inputs = sample(n, grads=True)
    ours, theirs = real(*diagonal_ssm(*inputs)), real(*step_by_step(*inputs))
    for a, b in zip(ours, theirs, strict=True):
        close(a, b, 1e-12)
    close_grads(ours, theirs, inputs, 1e-11)


def test_float32_is_as_good_for_fast_turns_as_for_slow_ones(close):
    """100 turns a token: a phase of 40,000 in float32 would be off by 2e-3."""
    u, _, weight, _ = sample(500)
    z = discretize(torch.full((3, 4), -2.0), 628 * torch.rand(3, 4), torch.zeros(3, 1))
    y, _ = diagonal_ssm(u, z, weight)
    close(diagonal_ssm(u.float(), z, weight)[0].double(), y, 2e-6)
    table, t = powers(z, 64, torch.float32), torch.arange(64)
    assert table.dtype == torch.complex64
    exact = (z[..., None] * t).exp()
    assert (table - exact).abs().max() < 1e-6
    assert ((z.to(torch.complex64)[..., None] * t).exp() - exact).abs().max() > 1e-5


@pytest.mark.parametrize("rate", [1e-30, 1e-4, 30.0, 1e30])
def test_extreme_decays_stay_finite_and_right_in_float32(close, rate):
    u, z, weight, x = (y.detach() for y in sample(300))
    z = torch.complex(torch.full_like(z.real, -rate), z.imag)
    expected, last = step_by_step(u, z, weight, x)
    kinds = torch.float32, torch.complex128, torch.complex64, torch.complex64
    inputs = [y.to(k).requires_grad_() for y, k in zip((u, z, weight, x), kinds, strict=True)]
    y, held = diagonal_ssm(*inputs)
    close(y.double(), expected, 1e-5)
    close(torch.view_as_real(held).double(), torch.view_as_real(last), 1e-5)
    assert all(g.isfinite().all() for g in grad(y.square().sum(), inputs))


def test_low_precision_inputs_and_autocast(close):
    u, z, weight, _ = sample(100)
    half = u.bfloat16()
    y, last = diagonal_ssm(half, z, weight)
    assert y.dtype == torch.bfloat16 and last.dtype == torch.complex64
    close(y.double(), diagonal_ssm(half.double(), z, weight)[0], 2**-8)
    with torch.autocast("cpu", torch.bfloat16):
        close(diagonal_ssm(u.float(), z, weight)[0].double(), diagonal_ssm(u, z, weight)[0], 1e-5)


def test_hold_is_expm1_over_its_argument_and_one_at_zero(close):
    z = torch.tensor([-1e-12, -0.05, -0.3, -1e-3 + 9e-3j, 0.2j, -40 + 5j], dtype=torch.complex128)
    series = sum(z[:5] ** i / math.factorial(i + 1) for i in range(20))
    close(torch.view_as_real(zero_order_hold(z[:5])), torch.view_as_real(series), 1e-13)
    close(torch.view_as_real(zero_order_hold(z[5:])), torch.view_as_real((z[5:].exp() - 1) / z[5:]), 1e-13)
    zero = torch.zeros(1, dtype=torch.complex128, requires_grad=True)
    assert zero_order_hold(zero).item() == 1 and grad(zero_order_hold(zero).real.sum(), zero)[0].item() == 0.5
    for scale in (1e-9, 1e-3, 1.0):
        z = (scale * torch.randn(5, dtype=torch.complex128)).requires_grad_()
        slope = sum(i * z.detach() ** (i - 1) / math.factorial(i + 1) for i in range(1, 20))
        ours = grad(zero_order_hold(z).real.sum(), z)[0]
        close(torch.view_as_real(ours), torch.view_as_real(slope.conj_physical()), 1e-11)


def test_legs_poles_are_those_of_the_normal_part(close):
    """A + p p^T, from the entries; in pairs, with -1/2 each."""
    for n in (2, 8, 64):
        a, b = (torch.arange(n, dtype=torch.float64)[i] for i in ((slice(None), None), None))
        full = -((2 * a + 1) * (2 * b + 1)).sqrt().tril(-1) - torch.diag(a[:, 0] + 1)
        normal = full + ((a + 0.5) * (b + 0.5)).sqrt()
        assert (normal @ normal.mT - normal.mT @ normal).abs().max() < 1e-9 * n**4
        assert (full @ full.mT - full.mT @ full).abs().max() > 1
        values, vectors = legs(n)
        assert values.shape == (n // 2,) and vectors.shape == (n, n // 2)
        assert (values.imag > 0).all() and (values.imag.diff() > 0).all()
        assert (values.real == -0.5).all()
        close(2 * ((vectors * values) @ vectors.mH).real, normal, 1e-12)
        unit = torch.view_as_real(vectors.mH @ vectors)
        close(unit, torch.view_as_real(torch.eye(n // 2, dtype=torch.complex128)), 1e-12)
    assert abs(legs(2)[0].imag.item() - math.sqrt(3) / 2) < 1e-15
    for n in (0, 1, 5):
        with pytest.raises(ValueError, match=rf"state={n}: .*even"):
            legs(n)


def test_errors_show_the_shapes():
    u, z, weight, x = sample(4)
    with pytest.raises(ValueError, match=r"z \(2, 4\)"):
        diagonal_ssm(u, z[:2], weight, x)
    with pytest.raises(ValueError, match=r"memory \(1, 3, 4\)"):
        diagonal_ssm(u, z, weight, x[:1])


def test_s4_mamba_and_rwkv_are_the_oracles(load_oracle, float64, close):
    """Its rows of the table, of one sample (and of one channel, for S4 and RWKV)."""
    oracle, n = load_oracle("verify_mnet"), 90
    u, z, weight, _ = sample(n, 1, 1)
    s = torch.view_as_real(2 * weight.conj()).flatten(1)
    e = torch.tensor([1.0, 0]).repeat(4)
    given = rotations(z), e[None], u[0], s
    y, _ = oracle.mnet_forward(*(x.expand(n, *x.shape[1:]) for x in given), torch.zeros(8, 1), 2)
    close(diagonal_ssm(u, z, weight)[0][0], y, 1e-12)

    a, delta, u = -torch.rand(5, 4), torch.rand(n, 5), torch.randn(n, 5)
    b, c = torch.randn(2, n, 4)
    f = (delta[:, None] * a.mT).exp()
    y, states = oracle.mnet_forward(f, b, delta * u, c, torch.zeros(4, 5), 1)
    ours = selective_scan(u[None], delta[None], a, b[None], c[None])
    close(ours[0][0], y, 1e-12)
    close(ours[1][0], states[-1].mT, 1e-12)

    k, v = torch.randn(2, n, 1)
    one = torch.ones(n, 1)
    f = torch.full((n, 1, 1), math.exp(-0.3))
    _, states = oracle.mnet_forward(f, k.exp(), torch.cat([v, one], 1), one, torch.zeros(1, 2), 1)
    own = (0.7 + k).exp() * torch.cat([v, one], 1)
    read = torch.cat(states[:-1]) + own
    past, _ = weighted_sums(k[None], v[None], torch.full((1, 1, 1), 0.3))
    y = mean(merge(past, token(k[None] + 0.7, v[None])))
    close(y[0, :, 0], read[:, 0] / read[:, 1], 1e-12)


@pytest.mark.parametrize("size", [14, 70])
def test_products_of_channels_read_matrices_that_blas_takes(size):
    """Others are copied one by one on a CPU."""
    products = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.bmm.default:
                products.append([1 in x.stride()[1:] for x in args])
            return func(*args, **(kwargs or {}))

    with Products():
        line_scan(torch.randn(3, size, 5), torch.randn(5, 4), -torch.rand(4))
    assert products and all(map(all, products))
