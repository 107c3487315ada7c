"""Windows over frames of one token, which go by chunks: States and streams. test_frames.py has their values,
test_attention_edges.py padding and extreme logits."""

import pytest
import torch
from torch.autograd import grad

from ndlightnet.ops import axis_causal_attention
from ndlightnet.ops.lightnet import frames

from .framed import HEADS, attend, in_chunks, padding, per_head, sample

forgets = pytest.mark.parametrize("forget", [0.0, 0.3, HEADS], ids=str)


@pytest.fixture(autouse=True)
def no_window_is_short(monkeypatch):
    monkeypatch.setattr(frames, "SHORT", 1)


@pytest.mark.parametrize("window", [1, 4, 9])
@forgets
def test_a_stream_is_the_whole(close, close_grads, window, forget):
    """Parts shorter and longer than the window, from State to State, with angles."""
    *inputs, theta = sample((30,))
    options = {"window": window, "forget": per_head(forget), "position": theta}
    mask = padding((30,))
    expected, last = attend(*inputs, (30,), mask=mask, **options)
    actual, state = in_chunks(*inputs, (30,), (1, 3, 12, 2, 9, 3), mask=mask, **options)
    close(actual, expected, 1e-11)
    close_grads(actual, expected, (*inputs, theta), 1e-10)
    for x, y in zip(state, last, strict=True):
        assert x.shape == y.shape and x.shape[1] == window - 1
    scale = (state.max - last.max).nan_to_num(0, 0, 0).exp()
    close((scale * state.sum).detach(), last.sum.detach(), 1e-11)


def test_the_state_is_that_of_frames(monkeypatch, close):
    """A State of the way by frames goes on in chunks, and the other way around."""
    *inputs, theta = sample((24,), grads=False)
    options = {"window": 5, "forget": 0.2, "position": theta}
    results = []
    for first, second in ((1, 100), (100, 1), (1, 1)):
        state, outs = None, []
        for short, part, at in ((first, slice(0, 11), 0), (second, slice(11, 24), 11)):
            monkeypatch.setattr(frames, "SHORT", short)
            now = [x[:, part] for x in inputs]
            place = torch.tensor(at)
            out, state = attend(*now, (now[0].shape[1],), state=state, first=place, **options)
            outs.append(out)
        results.append((torch.cat(outs, 1), state.max + state.sum.log()))
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            close(x, y, 1e-11)


def test_no_state_is_made_where_none_is_asked_for():
    *inputs, _ = sample((24,))
    for window in (None, 3):
        out, state = axis_causal_attention(*inputs, 24, window=window, return_state=False)
        assert (state is None) == (window is not None) and out.shape == inputs[2].shape


def test_nothing_later_and_nothing_too_old_has_a_gradient():
    *inputs, _ = sample((30,))
    out, _ = attend(*inputs, (30,), window=6)
    for t in (0, 5, 17, 29):
        for name, x in zip("qkv", grad(out[:, t].sum(), inputs, retain_graph=True), strict=True):
            first = t if name == "q" else max(0, t - 5)
            assert not x[:, t + 1 :].any() and not x[:, :first].any()
            assert x[:, t].any() or (t, name) == (0, "k")  # the first key weighs 1 in any case
