"""Windows over frames of one token, which go by chunks: States and streams. test_frames.py has their values,
test_attention_edges.py padding and extreme logits."""

import pytest
import torch
from torch.autograd import grad
from torch.export import Dim, export

from ndlightnet.layout import Grid
from ndlightnet.ops import axis_causal_attention
from ndlightnet.ops.lightnet import parallel

from .framed import HEADS, attend, in_chunks, padding, per_head, sample

forgets = pytest.mark.parametrize("forget", [0.0, 0.3, HEADS], ids=str)


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


def test_the_state_is_that_of_frames(close):
    """A State of the way by frames, which parts shorter than the window go, goes on in blocks, and conversely."""
    *inputs, theta = sample((24,), grads=False)
    options = {"window": 5, "forget": 0.2, "position": theta}
    results = []
    for parts in ((24,), (11, 13), (11, 4, 9), (3, 1, 20), (4,) * 6):
        out, state = in_chunks(*inputs, (24,), parts, **options)
        results.append((out, state.max + state.sum.log()))
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            close(x, y, 1e-11)


def test_no_token_of_a_short_window_has_a_memory(monkeypatch, close):
    """Blocks of one chunk are scores alone, whose cost does not grow with the memory of a head."""
    *inputs, _ = sample((128,))
    monkeypatch.setattr(parallel.Chunks, "memories", None)
    monkeypatch.setattr(parallel.Chunks, "gradients", None)
    for window in (64, 16, 1):
        out, _ = axis_causal_attention(*inputs, 128, window=window, return_state=False)
        grad(out.sum(), inputs)
    q, _, v = inputs
    close(out, torch.nn.functional.silu(q).sum(-1, keepdim=True) * v, 1e-12)


class _Window(torch.nn.Module):
    def forward(self, q, k, v):
        return axis_causal_attention(q, k, v, Grid((q.shape[1],)), window=3, return_state=False)[0]


@pytest.mark.slow
def test_an_exported_short_window_takes_any_length(close):
    attend, (*inputs, _) = _Window(), sample((29,), grads=False)
    run = export(attend, tuple(inputs), dynamic_shapes=[{1: Dim.DYNAMIC}] * 3).module()
    for n in (14, 30, 31, 200):
        (*inputs, _) = sample((n,), grads=False)
        close(run(*inputs), attend(*inputs), 1e-11)


def test_compiled_windows_take_lengths_without_a_graph_for_each(close):
    graphs = []
    torch.compiler.reset()

    def run(*tokens):
        return axis_causal_attention(*tokens, tokens[0].shape[1], window=20, forget=0.05, return_state=False)[0]

    compiled = torch.compile(run, backend=lambda graph, _: graphs.append(graph) or graph.forward, fullgraph=True)
    for n in (40, 43, 46, 59, 61):
        tokens = torch.randn(3, 1, n, 2, 8)
        close(compiled(*tokens), run(*tokens), 1e-5)
    assert len(graphs) == 2  # one of the first length, one of any


def test_no_state_is_made_where_none_is_asked_for():
    *inputs, _ = sample((24,))
    for window in (None, 3):
        out, state = axis_causal_attention(*inputs, 24, window=window, return_state=False)
        assert state is None and out.shape == inputs[2].shape
        nothing = [x[:, :0] for x in inputs]
        assert axis_causal_attention(*nothing, 0, window=window, return_state=False)[1] is None


def test_nothing_later_and_nothing_too_old_has_a_gradient():
    *inputs, _ = sample((30,))
    out, _ = attend(*inputs, (30,), window=6)
    for t in (0, 5, 17, 29):
        for name, x in zip("qkv", grad(out[:, t].sum(), inputs, retain_graph=True), strict=True):
            first = t if name == "q" else max(0, t - 5)
            assert not x[:, t + 1 :].any() and not x[:, :first].any()
            assert x[:, t].any() or (t, name) == (0, "k")  # the first key weighs 1 in any case
