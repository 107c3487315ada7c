"""The axis-causal form, and the merge of frames' States: against float64."""

import pytest
import torch
from torch.autograd import grad

from ndlightnet import NDLightNet
from ndlightnet.ops import Position, State, axis_causal_attention, causal_attention
from ndlightnet.ops.lightnet import _triton, frames
from ndlightnet.ops.lightnet.frames import sliding_merge
from ndlightnet.ops.position import relative

from .kernel_cases import BRAIN, DEVICE, HALF, LOGITS, Case, Problem, on_gpu
from .yardstick import Poison, check, ours

WHOLE = Case((64, 32, 32), 64, 64, "cosine", None, BRAIN, batch=2, heads=12)
GRID = Case((9, 7, 5), 24, 40, "cosine", "holes", start=(5, (3, 99), 1), forget=0.2)
MANY = Case((512, 16), 64, 64, "cosine", None, BRAIN, batch=2, heads=12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case((3, 4), 5, 3, batch=1, heads=1),
        Case((1, 2, 3), 6, 4, "cosine", heads=1),
        Case((4, 1, 3), 5, 3, "cosine", "holes", BRAIN, start=((7, 100_000), 3, 0), heads=1, window=2),
        Case((4, 5), 9, 7, None, "left", HALF, past=True, forget=0.3, batch=1, heads=1),
        Case((3, 2, 2), 6, 4, "cosine", "right", past=True, shared=True, batch=1, window=3, forget=(0.1, 0.7)),
        Case((5, 2), 5, 3, mask="all", window=1, heads=1),
        Case((6,), 6, 4, "cosine", dtype=BRAIN, window=4, batch=1, heads=1),
        Case((2, 70), 5, 3, mask="late", logits="wide", batch=1, heads=1),
        *on_gpu(
            *(
                GRID._replace(dtype=dtype, window=window, past=window != 1)
                for dtype in (HALF, BRAIN, torch.float32)
                for window in (None, 1, 2, 4, 30)
            )
        ),
        *on_gpu(
            *(
                Case((33, 41), 16, 16, "cosine", "left", dtype, past=past, forget=(0.0, 0.5))
                for dtype in (HALF, BRAIN, torch.float32)
                for past in (False, True)
            )
        ),
    ],
    ids=str,
)
def test_values_and_gradients(case):
    check(case, "frames")


@pytest.mark.parametrize("offset", [None, (7, 100_000)])
def test_frames_in_groups_lie_where_they_do_at_once(offset):
    """In tensors of one dtype too: small frames, in groups, run the programs of large ones."""
    position = relative(Position(torch.rand(2, 6), (5, 3), offset=offset))
    q, k, v = torch.zeros(3, 2, 15, 2, 6)
    later = frames.Tokens(q, k, v, None, position).frames(2, 3, 3)
    at_once = _triton.of_frames(position, 2, 5).offset.unflatten(0, (2, 5))
    group = _triton.of_frames(later.position, 2, 3).offset.unflatten(0, (2, 3))
    torch.testing.assert_close(group, at_once[:, 2:], rtol=0, atol=0)


ROW = Case((4, 11), 5, 3, batch=1, heads=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        *(ROW._replace(logits=name) for name in ("offset", "jumps")),
        *(ROW._replace(logits=name, window=2) for name in ("up", "climb", "holes")),
        *on_gpu(*(Case((9, 70), 16, 16, "cosine", logits=name, dtype=BRAIN) for name in LOGITS)),
        *on_gpu(*(Case((9, 70), 5, 3, logits=n, dtype=HALF, window=3) for n in LOGITS)),
        *on_gpu(*(Case((9, 70), 5, 3, logits=n, window=3, past=True) for n in LOGITS)),
    ],
    ids=str,
)
def test_extreme_logits(case):
    check(case, "frames")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        WHOLE,
        WHOLE._replace(window=5),
        WHOLE._replace(kind=None, dtype=HALF, mask="right", forget=0.1, past=True),
        WHOLE._replace(window=16, mask="left", past=True, start=(9, (0, 100_000), 5)),
        WHOLE._replace(shape=(16, 24, 24), dtype=torch.float32, window=3, forget=0.5),
        MANY,
        MANY._replace(window=16),
        MANY._replace(kind=None, window=100, past=True),
        *(Case((16, 256), dim, dim, "cosine", dtype=BRAIN, heads=3, window=4) for dim in (24, 48, 96, 128, 192, 256)),
    ],
    ids=str,
)
def test_full_size(case):
    check(case, "frames", full=True)


@pytest.mark.slow
def test_small_frames_are_done_in_groups(monkeypatch, close, close_grads):
    """As if at once, where States weigh more than tokens."""
    case = Case((5, 2), 16, 16, "cosine", start=(4, 1), heads=1, window=3, forget=0.3)
    problem = Problem.random(case)
    leaves = [x.requires_grad_() for x in problem.leaves.values()]
    assert frames.states_outweigh_tokens(*leaves[1:3], None, 2)
    counts, attend = [], frames._attend
    monkeypatch.setattr(frames, "_attend", lambda *xs: (counts.append(xs[2]), attend(*xs))[1])
    ours(problem, "frames", "triton")
    assert counts == ([5] if DEVICE.type == "cuda" else [2, 2, 1])  # a GPU holds more States
    counts.clear()
    monkeypatch.setattr(frames, "GROUP", 0)
    grouped = ours(problem, "frames", "triton")
    assert counts == [2, 2, 1]
    monkeypatch.setattr(frames, "states_outweigh_tokens", lambda *_: False)
    at_once = ours(problem, "frames", "triton")
    assert counts == [2, 2, 1, 5]
    for name, x in at_once.items():
        close(grouped[name].detach(), x.detach(), 1e-6)
    close_grads(grouped["out"], at_once["out"], leaves, 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("shape, window, at", [((4, 3), 2, (0, 2)), ((40, 1), 5, (2, 31, 33))], ids=str)
def test_what_a_window_does_not_hold_gets_a_gradient_of_exactly_zero(shape, window, at):
    """By the States of frames, and by the kernels of a window over tokens."""
    problem = Problem.random(Case(shape, 5, 3, batch=1, heads=1))
    leaves = [problem.leaves[name].requires_grad_() for name in "qkv"]
    out, _ = axis_causal_attention(*leaves, shape[0], window=window, impl="triton")
    for t in at:
        frame = out.unflatten(1, shape)[:, t].square().sum()
        for name, x in zip("qkv", grad(frame, leaves, retain_graph=True), strict=True):
            x, first = x.unflatten(1, shape), t if name == "q" else max(0, t - window + 1)
            assert not x[:, t + 1 :].any() and not x[:, :first].any() and x[:, t].any()


def test_frames_of_one_token_are_the_causal_form():
    problem = Problem.random(Case((9, 1), 5, 3, "cosine", past=True, batch=1, heads=1))
    q, k, v = (problem.leaves[name] for name in "qkv")
    options = {"position": problem.place(), "state": problem.state(), "impl": "triton"}
    out, state = axis_causal_attention(q, k, v, 9, **options)
    expected, last = causal_attention(q, k, v, **options)
    assert torch.equal(out, expected)
    assert all(torch.equal(a, b) for a, b in zip(state, last, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, chunks",
    [
        (Case((5, 3), 6, 4, "cosine", start=((2, 70), 1), window=3, heads=1), (1, 3, 1)),
        (Case((40,), 6, 4, "cosine", start=(5,), window=6, heads=1), (3, 20, 1, 16)),
    ],
    ids=str,
)
def test_chunks_are_the_whole(close, case, chunks):
    """From State to State, with samples at places of their own; of frames and of single tokens."""
    problem = Problem.random(case)
    q, k, v = (problem.leaves[name] for name in "qkv")
    place, out, state, at = problem.place(), [], None, 0
    tokens = case.length // case.shape[0]
    options = {"window": case.window, "forget": 0.2, "impl": "triton"}
    for n in chunks:
        rows, start = slice(tokens * at, tokens * (at + n)), (place.offset[0] + at, *place.offset[1:])
        later = place._replace(layout=(n, *case.shape[1:]), offset=start)
        y, state = axis_causal_attention(q[:, rows], k[:, rows], v[:, rows], n, position=later, state=state, **options)
        out.append(y)
        at += n
    at_once, last = axis_causal_attention(q, k, v, at, position=place, **options)
    close(torch.cat(out, 1), at_once, 2e-6)
    for a, b in zip(state, last, strict=True):
        close(a, b, 2e-6)


# --------------------------------------------------------------------------- States of many frames
def states(count, batch, heads, dim, value_dim, tall):
    """Some channels have seen nothing, and some frames wipe out all others."""
    top = 30 * torch.randn(batch, count, heads, dim, device=DEVICE)
    top[torch.rand_like(top) < 0.2] = -torch.inf
    seen = top > -torch.inf
    total = (1 + torch.rand_like(top)) * seen
    memory = torch.randn(batch, count, heads, tall * dim, value_dim, device=DEVICE)
    return State(top, total, memory * torch.cat([seen] * tall, -1)[..., None])


# the second one takes several programs for a State
SIZES = [(1, 1, 5, 3, 1), (1, 1, 9, 16, 2)]
SIZES += [pytest.param(*s, marks=pytest.mark.gpu) for s in ((2, 3, 40, 24, 1), (2, 12, 64, 64, 2))]


@pytest.mark.slow
@pytest.mark.parametrize("batch, heads, dim, value_dim, tall", SIZES)
@pytest.mark.parametrize(
    "count, window",
    [
        (1, None),
        (20, None),
        (9, 1),
        (9, 8),
        (20, 3),
        (20, 9),
        (20, 19),
        *(pytest.param(n, w, marks=pytest.mark.gpu) for n in (2, 8, 17, 64, 100) for w in (None, 1, 2, 5, 16, 63)),
    ],
)
def test_running(close, batch, heads, dim, value_dim, tall, count, window):
    """Against float64, values and gradients. A merge is exact but for the rounding of products and
    sums, in an order of its own: of positive weights, so relative to the largest result."""
    given = states(count, batch, heads, dim, value_dim, tall)
    results, pulls = [], [torch.randn_like(x) for x in given[1:]]
    for kind, impl in ((torch.float32, "triton"), (torch.float64, "torch")):
        top, *leaves = (x.to(kind).requires_grad_(x is not given.max) for x in given)
        with Poison():
            after = sliding_merge(State(top, *leaves), window, impl=impl)
            grads = grad(after[1:], leaves, [x.to(kind) for x in pulls])
        results.append((*after, *grads))
    (top, *actual), (peak, *exact) = results
    assert torch.equal(top.double(), peak)
    for x, y in zip(actual, exact, strict=True):
        close(x.detach().double(), y.detach(), 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dims, size", [(1, (70,)), (2, (33, 40)), (3, (16, 32, 32))])
def test_a_stream_is_the_whole_clip(close, dims, size):
    """Through a network, by the kernels, in float32 and without TF32."""
    model = NDLightNet(dims, 2, 5, patch_size=2, embed_dim=128, depth=2, tpe_states=8, causal=True).to(DEVICE).eval()
    x = torch.randn(2, 2, *size, device=DEVICE)
    stream = model.stream(2)
    for part in x.split([1, 2, 6, 1, size[0] - 10], 2):
        stream(part)
    close(stream.finish(), model(x).detach(), 1e-5)
