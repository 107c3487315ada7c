"""RWKV-4's weighted mean: against the softmax that it is, and its running exponent."""

import pytest
import torch
from torch.autograd import grad, gradcheck

from ndlightnet.ops.recurrence.wkv import LOWEST, empty, mean, means, merge, token, weighted_sums

LENGTHS = (1, 2, 5, 63, 64, 65, 131)


def sample(n, batch=2, channels=3, grads=False, size=1.0):
    """k, v, decay (channels,), bonus (channels,)"""
    k, v = torch.randn(2, batch, n, channels, dtype=torch.float64)
    decay = torch.logspace(-2, 1, channels, dtype=torch.float64)
    bonus = torch.randn(channels, dtype=torch.float64)
    return [x.requires_grad_(grads) for x in (size * k, v, decay, bonus)]


def exponents(k, decay, bonus):
    """k_s - (t - 1 - s) w below the diagonal, k_t + bonus on it: (batch, t, s, channels)."""
    at = torch.arange(k.shape[1], dtype=k.dtype)
    lag = (at[:, None] - 1 - at)[..., None]
    below = (k[:, None] - lag * decay).masked_fill(lag < 0, -torch.inf)
    own = torch.eye(k.shape[1], dtype=torch.bool)[..., None]
    return torch.where(own, (k + bonus)[:, None], below)


def dense(k, v, decay, bonus):
    return torch.einsum("btsc,bsc->btc", exponents(k, decay, bonus).softmax(2), v)


def wkv(k, v, decay, bonus, held=None):
    past, last = weighted_sums(k, v, decay[None, None], held)
    return mean(merge(past, token(k + bonus, v))), last


def true(sums):
    """Numerator and denominator themselves."""
    return sums[..., :2, :] * sums[..., 2:, :].exp()


@pytest.mark.parametrize("n", LENGTHS)
def test_it_is_a_softmax(close, close_grads, n):
    inputs = sample(n, grads=True)
    k, v, decay, bonus = inputs
    y, expected = means(k, v, decay.log(), bonus), dense(*inputs)
    close(y, expected, 1e-12)
    close_grads(y, expected, inputs, 1e-11)


def test_gradients_against_differences():
    """Also those of a memory and of the sums at the end, as long as the exponent goes with them."""
    held = torch.rand(1, 2, 2, dtype=torch.float64, requires_grad=True)

    def run(k, v, decay, bonus, held):
        top = torch.full_like(held[:, :1], 0.3)
        y, last = wkv(k, v, decay, bonus, torch.cat([held, top], 1))
        return y, true(last)

    assert gradcheck(run, (*sample(6, batch=1, channels=2, grads=True), held))
    assert gradcheck(run, (*sample(70, batch=1, channels=2, grads=True), held), fast_mode=True)


@pytest.mark.parametrize("size", [300.0, 1000.0])
@pytest.mark.parametrize("decay", [1e-6, 0.01, 20.0, 1e9])
@pytest.mark.parametrize("kind", ["random", "rising", "falling", "constant"])
def test_extreme_keys_stay_finite_and_right_in_float32(close, size, decay, kind):
    """Roundings of the exponent, 6e-5 at 1,000, do not get into the weights: tokens with equal keys
    are weighed by exp(-w) alone."""
    k, v, _, bonus = sample(200)
    ramp = torch.linspace(-size, size, 200, dtype=torch.float64)[:, None].expand_as(k)
    ways = {"random": size * k, "rising": ramp, "falling": -ramp, "constant": 0 * k + size + 0.1}
    decays = torch.full((3,), decay)
    single = [x.float().requires_grad_() for x in (ways[kind], v, decays, bonus)]
    y, last = wkv(*single)
    halves, held = [], None
    for part in (slice(90), slice(90, None)):
        half, held = wkv(*(x[:, part] for x in single[:2]), *single[2:], held)
        halves.append(half)
    close(torch.cat(halves, 1), y, 2e-5)
    own = (single[0] + single[3]).double() - single[0].double()  # with its rounding
    expected = dense(*(x.double() for x in single[:3]), own)
    close(y.double(), expected, 2e-5)
    assert last.isfinite().all()
    assert all(g.isfinite().all() for g in grad(y.square().sum(), single))


def test_the_exponent_is_the_largest_one_over_many_tokens(close):
    """Two levels of chunks (more than 64^2 tokens), against the recurrence."""
    k, _, decay, _ = sample(4200, channels=2, size=20.0)
    past, last = weighted_sums(k, k, decay[None, None])
    top, expected = torch.full_like(k[:, 0], LOWEST), []
    for t in range(4200):
        expected.append(top)
        top = torch.maximum(top - decay, k[:, t])
    close(past[:, :, 2], torch.stack(expected, 1), 1e-12)
    close(last[:, 2], top, 1e-12)
    assert (last[:, 1] >= 1 - 1e-9).all()


def test_a_token_of_no_weight_and_no_decay_is_neutral(close):
    """In front, inside, behind; and where there is nothing else, gradients are 0."""
    k, v, decay, _ = sample(9)
    some = torch.tensor([2, 3, 6])
    real = torch.zeros(9, 1, dtype=torch.bool)
    real[some] = True
    wide = torch.where(real, k, -torch.inf).requires_grad_()
    past, last = weighted_sums(wide, v, real * decay[None, None])
    few, end = weighted_sums(k[:, some], v[:, some], decay[None, None])
    close(true(past[:, some]), true(few), 1e-13)
    close(true(last), true(end), 1e-13)
    assert not mean(past[:, :3]).any()
    pulled = grad(mean(past).sum() + mean(last).sum(), wide)[0]
    assert pulled.isfinite().all() and not (pulled * ~real).any()
    assert pulled[:, some].any()


def test_sums_of_two_sets_of_tokens(close):
    """Both ways: exp(k_s - (|t - s| - 1) w), and the token itself once."""
    k, v, decay, bonus = sample(50, size=100.0)
    at = torch.arange(50, dtype=k.dtype)
    lag = ((at[:, None] - at).abs() - 1)[..., None]
    own = torch.eye(50, dtype=torch.bool)[..., None]
    e = torch.where(own, k[:, None] + bonus, k[:, None] - lag * decay)
    expected = torch.einsum("btsc,bsc->btc", e.softmax(2), v)
    forth, _ = weighted_sums(k, v, decay[None, None])
    back = weighted_sums(k.flip(1), v.flip(1), decay[None, None])[0].flip(1)
    close(mean(merge(merge(forth, token(k + bonus, v)), back)), expected, 1e-12)
    close(mean(merge(back, merge(token(k + bonus, v), forth))), expected, 1e-12)
    before = empty(2, 3, torch.float64, None)
    close(merge(forth[:, 7], before), forth[:, 7], 1e-15)
    close(merge(before, before), before, 1e-15)
    unseen = token(torch.full_like(k, -torch.inf), v)
    assert not mean(merge(unseen, unseen)).any()
    close(merge(forth, unseen), forth, 1e-15)


def test_low_precision_inputs_and_autocast(close):
    k, v, decay, bonus = (x.bfloat16() for x in sample(100))
    expected = dense(*(x.double() for x in (k, v, decay, bonus)))
    past, last = weighted_sums(k, v, decay[None, None])
    assert past.dtype == last.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        close(wkv(*(x.float() for x in (k, v, decay, bonus)))[0].double(), expected, 1e-5)


def test_errors_show_the_shapes():
    k, v, decay, _ = sample(4)
    with pytest.raises(ValueError, match=r"decay \(3,\)"):
        weighted_sums(k, v, decay)
    with pytest.raises(ValueError, match=r"v \(2, 3, 3\)"):
        weighted_sums(k, v[:, 1:], decay[None, None])
    with pytest.raises(ValueError, match=r"memory \(2, 3, 2\)"):
        weighted_sums(k, v, decay[None, None], torch.zeros(2, 3, 2))
