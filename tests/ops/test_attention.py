"""LightNet attention, values and gradients: against Eq. 5 and 6 written densely, and oracles."""

import itertools

import pytest
import torch
from torch.autograd import grad

from ndlightnet.ops import (
    Position,
    State,
    attention_step,
    axis_causal_attention,
    causal_attention,
    global_attention,
    merge,
    position,
    read,
    summarize,
)
from ndlightnet.ops.lightnet import attention, parallel
from ndlightnet.ops.lightnet.parallel import even_chunk

from . import framed

LENGTHS = (1, 7, 17, 63, 64, 65, 130)


def sample(length, grads=False, **sizes):
    """q, k, v with odd dims"""
    return framed.sample((length,), grads=grads, **sizes)[:3]


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


def test_chunks_add_few_tokens_to_any_length():
    for length in range(1, 1000):
        chunk = even_chunk(length)
        added = -length % chunk
        assert chunk <= 64 and (added <= length / 4 or chunk <= 8)
        assert chunk >= min(8, length) and (length < 256 or chunk == 64)


def test_long_sequences_go_from_state_to_state_in_segments(monkeypatch, dense, close, close_grads):
    *inputs, theta = framed.sample((150,))
    operator, lengths = parallel.operator, []
    monkeypatch.setattr(parallel, "operator", lambda f, *rest: (lengths.append(f.shape[1]), operator(f, *rest))[1])
    monkeypatch.setattr(parallel, "SEGMENT", 64 * 2 * 2 * 10)
    actual, _ = framed.attend(*inputs, (150,), position=theta, forget=0.3)
    assert lengths == [64, 64, 22]
    see, turned = framed.weights((150,), None, 0.3), framed.angles((150,), theta)
    expected = dense(*inputs, see=see, angles=turned)
    close(actual, expected, 1e-10)
    close_grads(actual, expected, (*inputs, theta), 1e-9)


@pytest.mark.parametrize("length", (1, 2, 7, 16, 32, 33, 52, 65))
def test_few_tokens_without_a_state_need_no_memory(monkeypatch, close, close_grads, length):
    *inputs, theta = framed.sample((length,))
    mask = torch.rand(2, length) > 0.2
    options = {"mask": mask, "position": Position(theta, (length,)), "forget": 0.3}
    expected, _ = causal_attention(*inputs, **options)
    if length in (1, 2, 7, 16, 32, 52):
        monkeypatch.setattr(parallel, "causal", None)
    actual, state = axis_causal_attention(*inputs, length, **options, return_state=False)
    assert state is None
    close(actual, expected, 1e-10)
    close_grads(actual, expected, (*inputs, theta), 1e-9)


@pytest.mark.parametrize("causal", [False, True])
def test_queries_and_keys_share_a_table_of_angles(monkeypatch, causal):
    tables, make = [], attention.key_features
    monkeypatch.setattr(attention, "key_features", lambda *inputs: tables.append(make(*inputs)) or tables[-1])
    monkeypatch.setattr(position, "key_features", None)
    *inputs, theta = framed.sample((6,))
    form(causal)(*inputs, position=Position(theta, (6,)))
    assert len(tables) == 1


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
def test_step_loop_is_the_causal_form(dense, close, close_grads, length):
    inputs = sample(length, grads=True)
    actual, state = decode(*inputs)
    expected = dense(*inputs, causal=True)
    close(actual, expected, 1e-10)
    close_grads(actual, expected, inputs, 1e-9)
    for a, b in zip(state, causal_attention(*inputs)[1], strict=True):
        close(a, b, 1e-10)


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
