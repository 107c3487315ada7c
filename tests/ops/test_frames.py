"""Axis-causal attention, values and gradients: against Eq. 5 and 6 written densely over frames."""

import pytest
import torch
from torch import Tensor
from torch.autograd import grad

from ndlightnet.ops import State, merge, summarize
from ndlightnet.ops.lightnet.frames import sliding_merge

from .framed import HEADS, angles, attend, in_chunks, padding, per_head, sample, weights, whole

GRIDS = ((7,), (1, 6), (4, 6), (5, 2, 3), (3, 2, 1, 4))
impls = pytest.mark.parametrize("impl", ["torch", "reference"])
forgets = pytest.mark.parametrize("forget", [0.0, 0.3, HEADS], ids=str)


CASES = [  # grid, window, implementation
    *((shape, window, impl) for shape in GRIDS for window in (None, 1, 2, 3, 9) for impl in ("torch", "reference")),
    *(((n,), window, "torch") for n, window in ((1, 1), (37, 1), (37, 2), (37, 17), (70, 35), (70, 69), (170, 66))),
]


@pytest.mark.parametrize("shape, window, impl", CASES, ids=str)
@forgets
def test_values_and_gradients_are_the_dense_ones(dense, close, close_grads, shape, window, forget, impl):
    """With and without angles, and in turn with and without padding; of long windows of tokens a whole block is
    padding."""
    for masked, rotated in ((True, True), (False, False)):
        *inputs, theta = sample(shape)
        mask, lrpe = padding(shape) if masked else None, theta if rotated else None
        if masked and shape[0] > 30:
            mask[0, window : 2 * window] = False
        actual, _ = attend(*inputs, shape, mask=mask, position=lrpe, window=window, forget=per_head(forget), impl=impl)
        turned = angles(shape, theta) if rotated else None
        expected = dense(*inputs, mask=mask, see=weights(shape, window, forget), angles=turned)
        close(actual, expected, 1e-10)
        leaves = (*inputs, theta) if rotated else inputs
        close_grads(actual, expected, leaves, 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5, 6), (70,), (5000, 2)], ids=str)
@pytest.mark.parametrize("forget", [2e3, 1e6, 1e9, 1e300, (1e4, 3e38)], ids=str)
def test_a_strong_forgetting_is_a_window_of_one(close, close_grads, forget, shape, dtype):
    """Values, gradients and the frames that follow, at any rate."""
    *inputs, _ = sample(shape, dtype=dtype)
    forget, rounding = per_head(forget, dtype), 100 * torch.finfo(dtype).eps
    y, state = attend(*inputs, shape, forget=forget)
    alone, _ = attend(*inputs, shape, window=1)
    close(y.detach(), alone.detach(), rounding)
    close_grads(y, alone, inputs, rounding)
    later, _ = attend(*inputs, shape, state=state, forget=forget)
    close(later.detach(), alone.detach(), rounding)


@impls
@pytest.mark.parametrize("window", [None, 1, 2])
def test_what_is_not_seen_gets_a_gradient_of_exactly_zero(impl, window):
    """Frames to come, and those that have left the window."""
    *inputs, theta = sample((5, 2, 3))
    out, _ = attend(*inputs, (5, 2, 3), position=theta, window=window, impl=impl)
    for t in (0, 2, 3):
        frame = out.unflatten(1, (5, 6))[:, t].square().sum()
        for name, x in zip("qkv", grad(frame, inputs, retain_graph=True), strict=True):
            x = x.unflatten(1, (5, 6))
            first = t if name == "q" else max(0, t - (window or 5) + 1)
            assert not x[:, t + 1 :].any() and not x[:, :first].any()
            assert x[:, first : t + 1].any(-1).all()


CHUNKS = {(7,): [(1,) * 7, (3, 1, 3), (2, 5)], (5, 2, 3): [(1,) * 5, (3, 2), (1, 4)]}


@impls
@pytest.mark.parametrize("shape, chunks", [(s, c) for s, some in CHUNKS.items() for c in some])
@pytest.mark.parametrize(
    "options", [{}, {"window": 1}, {"window": 3}, {"window": 9, "forget": 0.3}, {"forget": HEADS}], ids=str
)
def test_state_hand_over_in_chunks_of_any_size(dense, close, close_grads, impl, shape, chunks, options):
    """Values and gradients, through the outputs and through the final State."""
    *inputs, theta = sample(shape)
    mask, options = padding(shape), {"impl": impl} | options
    see = weights(shape, options.get("window"), options.get("forget", 0.0))
    options["forget"] = per_head(options.get("forget", 0.0))
    options |= {"mask": mask, "position": theta}
    actual, state = in_chunks(*inputs, shape, chunks, **options)
    expected, last = attend(*inputs, shape, **options)
    close(actual, dense(*inputs, mask=mask, see=see, angles=angles(shape, theta)), 1e-10)
    assert not state.max.requires_grad and state.max.shape == last.max.shape
    ours, theirs = ((x, *whole(s)) for x, s in ((actual, state), (expected, last)))
    for a, b in zip(ours, theirs, strict=True):
        close(a.detach(), b.detach(), 1e-10)
    kept = 1 if options.get("window") == 1 else 3  # a window of one hands nothing over
    close_grads(ours[:kept], theirs[:kept], (*inputs, theta), 1e-9)


def test_the_state_of_a_window_holds_its_frames(close):
    """The last ones apart from each other, each decayed as it is; empty ones before the first."""
    *inputs, _ = sample((4, 6), grads=False)
    for window in (1, 2, 4, 7):
        _, state = attend(*inputs, (4, 6), window=window, forget=0.5)
        assert all(x.shape[:2] == (2, window - 1) for x in state)
        for i, frame in enumerate(range(5 - window, 4)):
            kept = State(*(x[:, i] for x in state))
            if frame < 0:
                assert (kept.max == -torch.inf).all() and not kept.memory.any()
                continue
            own = summarize(*(x[:, 6 * frame : 6 * frame + 6] for x in inputs[1:]))
            decayed = own._replace(max=own.max - 0.5 * (3 - frame))
            for a, b in zip(kept, decayed, strict=True):
                close(a, b, 1e-12)


@pytest.mark.parametrize("chunk", [1, 8])
@pytest.mark.parametrize("window", [None, 3])
def test_a_state_does_not_keep_more_alive_than_it_holds(chunk, window):
    """Saved or kept, it is as large as its tensors, however many frames it was made of."""
    *inputs, _ = sample((2 * chunk, 16), grads=False)
    _, state = in_chunks(*inputs, (2 * chunk, 16), (chunk, chunk), window=window)
    held, alive = ([f(x) for x in state] for f in (Tensor.numel, lambda x: x.untyped_storage()))
    assert [len(x) // 8 for x in alive] == held


# --------------------------------------------------------------------------- States of many frames
def random_states(count):
    """What States (batch, count, heads, ...) are made of; some channels have seen nothing."""
    top = 30 * torch.randn(2, count, 2, 5, dtype=torch.float64)
    top[torch.rand(top.shape) < 0.2] = -torch.inf
    total = (1 + torch.rand_like(top)).requires_grad_()
    memory = torch.randn(2, count, 2, 10, 3, dtype=top.dtype, requires_grad=True)
    return top, total, memory


def of_leaves(top, total, memory):
    seen = (top > -torch.inf).double()
    return State(top, total * seen, memory * torch.cat([seen, seen], -1)[..., None])


def merged(states, window):
    """`sliding_merge` as a loop."""
    out = []
    for t in range(states.max.shape[1]):
        now = State(*(x[:, t] for x in states))
        for s in range(t - 1, max(-1, t - (window or t + 1)), -1):
            now = merge(now, State(*(x[:, s] for x in states)))
        out.append(now)
    return State(*(torch.stack(parts, 1) for parts in zip(*out, strict=True)))


@pytest.mark.parametrize("count", [1, 2, 7, 8, 13])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 8, 12, 13, 40])
def test_running_is_a_loop_of_merges(close, close_grads, count, window):
    leaves = random_states(count)
    actual, expected = sliding_merge(of_leaves(*leaves), window), merged(of_leaves(*leaves), window)
    assert torch.equal(actual.max, expected.max) and not actual.max.requires_grad
    for a, b in zip(actual[1:], expected[1:], strict=True):
        close(a.detach(), b.detach(), 1e-12)
    close_grads(actual[1:], expected[1:], leaves[1:], 1e-12)
