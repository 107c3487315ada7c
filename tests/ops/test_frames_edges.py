"""Axis-causal attention where it is hard: starts, padding, extreme logits, compile, errors."""

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
    read,
    summarize,
)
from ndlightnet.ops.lightnet import frames
from tests.kernels.kernel_cases import LOGITS, logits

from .framed import HEADS, angles, attend, padding, per_head, sample, weights, whole

impls = pytest.mark.parametrize("impl", ["torch", "reference"])


@pytest.mark.parametrize(
    "form, kind",
    [
        ("frames", "cosine"),
        ("causal", "cosine"),
        ("causal", "rotary"),
        ("global", "cosine"),
        ("global", "rotary"),
        ("step", "cosine"),
    ],
)
def test_every_sample_may_start_at_a_place_of_its_own(close, close_grads, form, kind):
    """Outputs, States and gradients are those of the samples one by one."""
    shape = {"step": (1, 1), "causal": (6, 1)}.get(form, (3, 4))
    *inputs, theta = sample(shape, dim=8, batch=3)
    theta = theta if kind == "cosine" else theta[:, :4]
    past = summarize(*inputs[1:], position=Position(theta, shape, kind))
    past = State(*(x.detach() for x in past))

    def run(rows, start):
        place, some = Position(theta, shape, kind, offset=start), [x[rows] for x in inputs]
        before = State(*(x[rows] for x in past))
        if form == "frames":
            out, after = axis_causal_attention(*some, 3, position=place)
        elif form == "causal":
            out, after = causal_attention(*some, position=place)
        elif form == "step":
            out, after = attention_step(*(x[:, 0] for x in some), before, position=place)
        else:
            after = summarize(*some[1:], position=place)
            out = read(some[0], after, position=place)
            # query and key angles of `read`, of up to 100,000 theta, are rounded to float64
            off = 2 * 100_000 * theta.max().item() * 2.0**-53
            close(out, global_attention(*some, position=place), off)
        return out, after.sum, after.memory

    starts = torch.tensor([4, 0, 100_000])
    actual = run(slice(None), (starts, 7))
    alone = [run(slice(i, i + 1), (int(s), torch.tensor(7))) for i, s in enumerate(starts)]
    expected = [torch.cat(parts) for parts in zip(*alone, strict=True)]
    for a, b in zip(actual, expected, strict=True):
        close(a, b, 1e-10)
    close_grads(actual, expected, (*inputs, theta), 1e-9)


@impls
@pytest.mark.parametrize("name", LOGITS)
@pytest.mark.parametrize("options", [{}, {"window": 2}, {"forget": 0.3}], ids=str)
def test_extreme_logits_in_float32(dense, close_grads, name, impl, options):
    """Tolerances as for the other forms, and what float32 rounds where forgetting moves a maximum
    of that size: half a unit in the last place when it is moved, and when it is moved back."""
    shape = (6, 11)
    *inputs, theta = sample(shape, dtype=torch.float32)
    inputs[1] = logits(name, inputs[1].shape).requires_grad_()
    leaves = [*inputs, theta]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    out, state = attend(*inputs, shape, position=theta, impl=impl, **options)
    expected = dense(*exact[:3], see=weights(shape, **options), angles=angles(shape, exact[3]))
    assert out.dtype == torch.float32 and out.isfinite().all()
    assert state.sum.isfinite().all() and state.memory.isfinite().all()
    height = inputs[1].masked_fill(inputs[1] == -torch.inf, 0).abs().max().item()
    moved = torch.finfo(torch.float32).eps * height if "forget" in options else 0
    assert (out - expected).abs().max() < (2e-6 + moved) * expected.abs().max()
    close_grads(out, expected, leaves, 5e-6 + moved, other=exact)


@impls
@pytest.mark.parametrize("options", [{}, {"window": 2, "forget": 0.3}], ids=["all", "window"])
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 1e38])
def test_what_lies_in_the_padding_cannot_leak(impl, options, junk):
    *inputs, theta = sample((5, 2, 3))
    mask = padding((5, 2, 3))
    hidden, results = ~mask[..., None, None], []
    for filling in (0.0, junk):
        q, *source = inputs
        k, v = (x.detach().masked_fill(hidden, filling).requires_grad_() for x in source)
        out, state = attend(q, k, v, (5, 2, 3), mask=mask, position=theta, impl=impl, **options)
        results.append((out, *state, *grad(out.sum(), (q, k, v, theta))))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty) and not clean.isnan().any()
    assert not any(x.masked_select(hidden).any() for x in results[1][5:7])


@impls
@pytest.mark.parametrize("options", [{}, {"window": 2}, {"forget": HEADS}], ids=str)
def test_a_sample_of_padding_only_gives_zeros_and_finite_gradients(impl, options):
    *inputs, theta = sample((5, 2, 3))
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[0] = False
    options = options | {"forget": per_head(options.get("forget", 0.0))}
    out, state = attend(*inputs, (5, 2, 3), mask=mask, position=theta, impl=impl, **options)
    assert not out[0].any() and out[1].any(-1).all()
    for x in grad(out.sum(), inputs):
        assert x.isfinite().all() and not x[0].any() and x[1].any()
    assert (state.max[0] == -torch.inf).all() and not state.memory[0].any()


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"forget": HEADS}], ids=str)
def test_small_frames_are_done_in_groups(monkeypatch, close, close_grads, options):
    """Where States of frames weigh more than tokens; the groups are done again going back."""
    shape, calls = (7, 1, 2), []
    q, k, v, theta = inputs = sample(shape, dim=16, value_dim=16)
    options = options | {"mask": padding(shape), "forget": per_head(options.get("forget", 0.0))}
    attend_all = frames._attend
    monkeypatch.setattr(frames, "_attend", lambda *a: (calls.append(a[6]), attend_all(*a))[1])
    actual, state = attend(q, k, v, shape, position=theta, **options)
    assert calls == [3, 3, 1]
    grad(actual.sum(), q, retain_graph=True)
    assert sorted(calls[3:]) == [1, 3, 3]
    assert not frames.states_outweigh_tokens(k, v, Position(theta, (1, 7, 2)), 14)  # as one frame
    monkeypatch.setattr(frames, "states_outweigh_tokens", lambda *_: False)
    expected, last = attend(q, k, v, shape, position=theta, **options)
    ours, theirs = ((x, *whole(s)) for x, s in ((actual, state), (expected, last)))
    for a, b in zip(ours, theirs, strict=True):
        close(a.detach(), b.detach(), 1e-11)
    close_grads(ours, theirs, inputs, 1e-10)


@pytest.mark.parametrize("window", [None, 2])
def test_gradcheck(window):
    small = {"dim": 2, "value_dim": 2, "heads": 2, "batch": 1}
    *inputs, theta = sample((3, 2), **small)
    *before, _ = sample((3, 2), grads=False, **small)
    options = {"window": window, "forget": per_head(HEADS)}
    past = attend(*before, (3, 2), position=theta.detach(), **options)[1]
    total, memory = past.sum.requires_grad_(), past.memory.requires_grad_()

    def function(q, k, v, theta, total, memory):
        out, after = attend(q, k, v, (3, 2), position=theta, state=State(past.max, total, memory), **options)
        return out, *whole(after)

    assert torch.autograd.gradcheck(function, (*inputs, theta, total, memory))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@impls
def test_low_precision_inputs(dtype, impl):
    """One rounding of the exact result; States are float32, autocast or not."""
    q, k, v, _ = (x.detach().to(dtype) for x in sample((6, 30), grads=False))
    options = {"window": 4, "forget": torch.tensor(HEADS), "impl": impl}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, state = attend(q, k, v, (6, 30), **options)
    assert out.dtype == dtype and all(x.dtype == torch.float32 for x in state)
    exact = attend(q.double(), k.double(), v.double(), (6, 30), window=4, forget=per_head(HEADS))[0]
    rounding, error = exact.to(dtype).double() - exact, out.double() - exact
    assert error.abs().max() <= 2 * rounding.abs().max() + 1e-6
    assert error.square().mean().sqrt() <= 1.1 * rounding.square().mean().sqrt()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"window": 3, "forget": 0.3}], ids=["all", "window"])
def test_compile_without_a_graph_break(close, close_grads, options):
    """For any number of tokens in a frame."""
    torch._dynamo.reset()

    def function(q, k, v, theta, mask):
        place = Position(theta, (4, q.shape[1] // 4))
        return axis_causal_attention(q, k, v, 4, mask=mask, position=place, **options)[0]

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for shape in ((4, 6), (4, 9)):
        inputs, mask = sample(shape), padding(shape)
        for x in (*inputs[:3], mask):
            torch._dynamo.mark_dynamic(x, 1)
        actual, expected = (f(*inputs, mask) for f in (compiled, function))
        close(actual, expected, 1e-12)
        close_grads(actual, expected, inputs, 1e-11)


def test_compile_with_a_forgetting_for_every_head(close):
    torch._dynamo.reset()

    def function(q, k, v, forget):
        return axis_causal_attention(q, k, v, 4, forget=forget)[0]

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    *inputs, _ = sample((4, 6), grads=False)
    close(compiled(*inputs, per_head(HEADS)), function(*inputs, per_head(HEADS)), 1e-12)


def bad():
    """A word of the message, positional arguments, options; a right call is q, k, v, 3."""
    q, k, v, theta = sample((3, 4), grads=False)
    place = Position(theta, (3, 4))
    yield r"\bq\b", (q[:, :8], k, v, 3), {}
    yield r"\bv\b", (q, k, v[:, :, :1], 3), {}
    yield "mask", (q, k, v, 3), {"mask": torch.ones(2, 3, dtype=torch.bool)}
    yield "frames=5.* 12", (q, k, v, 5), {}
    yield "frames=0", (q, k, v, 0), {}
    yield r"\(4, 3\).*3 frames", (q, k, v, 3), {"position": place._replace(layout=(4, 3))}
    yield r"\(2, 4\).* 4 tokens", (q, k, v, 3), {"position": Position(theta, (2, 4), prefix=4)}
    yield "theta", (q, k, v, 3), {"position": place._replace(theta=theta[:, :4])}
    yield "window=0", (q, k, v, 3), {"window": 0}
    yield "forget=-0.5", (q, k, v, 3), {"forget": -0.5}
    yield "forget=nan", (q, k, v, 3), {"forget": float("nan")}
    yield r"forget \(3,\).* 2", (q, k, v, 3), {"forget": torch.tensor([0.1, 0.2, 0.3])}
    yield r"forget \(\).* 2", (q, k, v, 3), {"forget": torch.tensor(0.1)}
    yield "forget=-0.5", (q, k, v, 12), {"forget": -0.5}
    yield "impl", (q, k, v, 3), {"impl": "nonsense"}
    yield "triton", (q, k, v, 3), {"impl": "triton"}
    plain, window, other = (
        axis_causal_attention(q, k, v, 3, **how)[1] for how in ({}, {"window": 3}, {"position": place})
    )
    yield r"state.memory \(2, 2, 10, 3\)", (q, k, v, 3), {"state": other}
    yield r"state.*\(2, 2, 2, 5", (q, k, v, 3), {"state": window}
    yield r"state.max \(2, 2, 5\).*window", (q, k, v, 3), {"state": plain, "window": 3}
    yield r"state.max \(2, 2, 2, 5\).*\(2, 3, 2\)", (q, k, v, 3), {"state": window, "window": 4}


@pytest.mark.parametrize("case", range(len(list(bad()))))
def test_bad_arguments_are_named(case):
    match, args, options = list(bad())[case]
    with pytest.raises(ValueError, match=match):
        axis_causal_attention(*args, **options)
