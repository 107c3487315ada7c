"""LightNet attention, values and gradients: against Eq. 5 and 6 written densely, and oracles."""

import itertools

import pytest
import torch
from torch.autograd import grad

from ndlightnet.ops import State, attention_step, causal_attention, global_attention, merge, read, summarize

LENGTHS = (1, 7, 63, 64, 65, 130)


def sample(length, heads=2, dim=5, value_dim=3, batch=2, dtype=torch.float64, grads=False):
    """q, k, v with odd dims; keys are wide, so that the decay matters."""
    q, k = (torch.randn(batch, length, heads, dim, dtype=dtype) for _ in "qk")
    v = torch.randn(batch, length, heads, value_dim, dtype=dtype)
    q, k, v = q, 2 * k, v
    return [x.requires_grad_(grads) for x in (q, k, v)]


def form(causal):
    return (lambda *a, **kw: causal_attention(*a, **kw)[0]) if causal else global_attention


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
@pytest.mark.parametrize("length", LENGTHS)
def test_values_and_gradients_are_the_dense_ones(dense, close, close_grads, length, impl, causal):
    inputs = sample(length, grads=True)
    actual = form(causal)(*inputs, impl=impl)
    expected = dense(*inputs, causal=causal)
    close(actual, expected, 1e-10)
    close_grads(actual, expected, inputs, 1e-9)


@pytest.mark.parametrize("length", (1, 23, 65))
def test_oracle_recurrence(oracle, float64, close, length):
    q, k, v = sample(length, heads=1, batch=1)
    one = [x[0, :, 0] for x in (q * q.sigmoid(), k, v)]
    out, z, m, _ = oracle.lightnet_causal(*one)
    actual, state = causal_attention(q, k, v)
    close(actual[0, :, 0], out, 1e-10)
    for s in (state, summarize(k, v)):
        close((s.max + s.sum.log())[0, 0], z, 1e-12)
        close((s.memory / s.sum[..., None])[0, 0], m, 1e-10)
    close(global_attention(q, k, v)[:, -1], actual[:, -1], 1e-10)


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("causal", [False, True])
def test_no_tokens(causal, impl):
    q, k, v = sample(0)
    assert form(causal)(q, k, v, impl=impl).shape == v.shape
    state = summarize(*sample(9)[1:])
    out, after = causal_attention(q, k, v, state=state, impl=impl)
    assert out.shape == v.shape and out.dtype == q.dtype
    assert all(torch.equal(a, b) for a, b in zip(after, state, strict=True))
    empty = summarize(k, v, impl=impl)
    assert (empty.max == -torch.inf).all() and not empty.sum.any() and not empty.memory.any()


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_cross_form(dense, close, close_grads, impl):
    q, (_, k, v) = sample(11, grads=True)[0], sample(70, grads=True)
    actual = read(q, summarize(k, v, impl=impl), impl=impl)
    expected = dense(q, k, v)
    close(actual, expected, 1e-10)
    close_grads(actual, expected, (q, k, v), 1e-9)


SPLITS = [(9, at) for at in range(10)] + [(130, at) for at in (1, 63, 64, 65, 100, 129)]


@pytest.mark.parametrize("length, at", SPLITS)
def test_state_hand_over_at_any_split(dense, close, close_grads, length, at):
    inputs = sample(length, grads=True)
    first, state = causal_attention(*(x[:, :at] for x in inputs))
    second, state = causal_attention(*(x[:, at:] for x in inputs), state=state)
    actual, expected = torch.cat([first, second], 1), dense(*inputs, causal=True)
    close(actual, expected, 1e-10)
    whole = summarize(*inputs[1:])
    assert not state.max.requires_grad and not whole.max.requires_grad
    for a, b in zip(state, whole, strict=True):
        close(a.detach(), b.detach(), 1e-10)
    # through the outputs and through the final State
    close_grads((actual, *state[1:]), (expected, *whole[1:]), inputs, 1e-9)


def decode(q, k, v):
    state, outputs = State.empty(2, 2, 5, 3, dtype=q.dtype), []
    for t in range(q.shape[1]):
        y, state = attention_step(q[:, t], k[:, t], v[:, t], state)
        outputs.append(y)
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("length", [1, 9, 66])
def test_step_loop_is_the_causal_form(dense, close, length):
    inputs = sample(length)
    actual, state = decode(*inputs)
    close(actual, dense(*inputs, causal=True), 1e-10)
    for a, b in zip(state, causal_attention(*inputs)[1], strict=True):
        close(a, b, 1e-10)


def test_step_loop_has_the_gradients_of_the_causal_form(dense, close_grads):
    inputs = sample(9, grads=True)
    close_grads(decode(*inputs)[0], dense(*inputs, causal=True), inputs, 1e-9)


def test_merge_streams_a_source_in_any_order(close):
    _, k, v = sample(40)
    k[:, 20:] += 3  # the pieces have different maxima
    a, b, c = (summarize(k[:, i:j], v[:, i:j]) for i, j in ((0, 13), (13, 14), (14, 40)))
    empty = State.empty(2, 2, 5, 3, dtype=torch.float64)
    whole = summarize(k, v)
    ways = [merge(merge(a, b), c), merge(a, merge(b, c)), merge(merge(c, a), b)]
    ways += [merge(empty, whole), merge(whole, empty)]
    for way, name in itertools.product(ways, State._fields):
        close(getattr(way, name), getattr(whole, name), 1e-12)
    assert not any(x.isnan().any() for x in merge(empty, empty))


def test_gradients_of_a_merge(close_grads):
    k, v = sample(12, grads=True)[1:]
    parts = merge(summarize(k[:, :5], v[:, :5]), summarize(k[:, 5:], v[:, 5:]))
    whole = summarize(k, v)
    close_grads(parts[1:], whole[1:], (k, v), 1e-10)


@pytest.mark.parametrize("causal", [False, True])
def test_a_shift_of_the_keys_changes_nothing(close, causal):
    q, k, v = sample(70)
    shift = 300 * torch.randn(1, 1, 2, 5, dtype=torch.float64)
    close(form(causal)(q, k + shift, v), form(causal)(q, k, v), 1e-10)


def test_the_order_of_a_source_does_not_matter(close):
    q, k, v = sample(33)
    p = torch.randperm(33)
    close(read(q, summarize(k[:, p], v[:, p])), global_attention(q, k, v), 1e-11)
    close(global_attention(q[:, p], k[:, p], v[:, p]), global_attention(q, k, v)[:, p], 1e-11)
    causal = form(True)
    assert not torch.allclose(causal(q, k[:, p], v[:, p]), causal(q, k, v))


def test_memory_is_a_convex_combination_of_the_values():
    _, k, v = sample(130)
    for state in (summarize(k, v), causal_attention(k, k, v)[1]):
        m = state.memory / state.sum[..., None]
        assert (m <= v.amax(1)[:, :, None] + 1e-12).all()
        assert (m >= v.amin(1)[:, :, None] - 1e-12).all()
        assert (state.sum >= 1).all() and (state.sum <= 130).all()


def test_equal_keys_give_the_running_mean(close):
    q, k, v = sample(100)
    count = torch.arange(1, 101, dtype=torch.float64)[:, None, None]
    phi = torch.nn.functional.silu(q).sum(-1, keepdim=True)
    close(causal_attention(q, 0 * k, v)[0], phi * v.cumsum(1) / count, 1e-11)
    close(global_attention(q, 0 * k + 7, v), phi * v.mean(1, keepdim=True), 1e-11)


@pytest.mark.parametrize("t", [0, 6, 63, 64, 100])
@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_later_tokens_get_a_gradient_of_exactly_zero(t, impl):
    inputs = sample(102, grads=True)
    out, _ = causal_attention(*inputs, impl=impl)
    for name, x in zip("qkv", grad(out[:, t].square().sum(), inputs), strict=True):
        assert not x[:, t + 1 :].any()
        assert x[:, t].any() or (name == "k" and t == 0)  # the first key has weight 1, whatever it is


@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck(causal):
    inputs = sample(6, heads=1, dim=3, value_dim=2, batch=1, grads=True)
    past = summarize(*sample(4, heads=1, dim=3, value_dim=2, batch=1)[1:])
    total, memory = past.sum.requires_grad_(), past.memory.requires_grad_()

    def function(q, k, v, total, memory):
        before = State(past.max, total, memory)
        if causal:
            out, after = causal_attention(q, k, v, state=before)
        else:
            after = merge(before, summarize(k, v))
            out = read(q, after)
        # `max` is a free choice of scale: what has derivatives is the State at a fixed scale
        scale = (after.max - past.max).exp()
        return out, after.sum * scale, after.memory * scale[..., None]

    assert torch.autograd.gradcheck(function, (*inputs, total, memory))
