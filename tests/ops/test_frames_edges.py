"""Axis-causal attention where it is hard: starts, padding, extreme logits, compile, errors."""

import pytest
import torch
from torch.autograd import grad

from ndlightnet import ops
from ndlightnet.ops.lightnet import frames

from .framed import HEADS, angles, attend, in_chunks, padding, per_head, sample, weights, whole

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
    past = ops.summarize(*inputs[1:], position=ops.Position(theta, shape, kind))
    past = ops.State(*(x.detach() for x in past))

    def run(rows, start):
        place, some = ops.Position(theta, shape, kind, offset=start), [x[rows] for x in inputs]
        before = ops.State(*(x[rows] for x in past))
        if form == "frames":
            out, after = ops.axis_causal_attention(*some, 3, position=place)
        elif form == "causal":
            out, after = ops.causal_attention(*some, position=place)
        elif form == "step":
            out, after = ops.attention_step(*(x[:, 0] for x in some), before, position=place)
        else:
            after = ops.summarize(*some[1:], position=place)
            out = ops.read(some[0], after, position=place)
            # query and key angles of `read`, of up to 100,000 theta, are rounded to float64
            off = 2 * 100_000 * theta.max().item() * 2.0**-53
            close(out, ops.global_attention(*some, position=place), off)
        return out, after.sum, after.memory

    starts = torch.tensor([4, 0, 100_000])
    actual = run(slice(None), (starts, 7))
    alone = [run(slice(i, i + 1), (int(s), torch.tensor(7))) for i, s in enumerate(starts)]
    expected = [torch.cat(parts) for parts in zip(*alone, strict=True)]
    for a, b in zip(actual, expected, strict=True):
        close(a, b, 1e-10)
    close_grads(actual, expected, (*inputs, theta), 1e-9)


@pytest.mark.parametrize("shape", [(1, 5), (70, 2), (9, 1, 3), (23, 6)], ids=str)
@pytest.mark.parametrize("forget", [0.0, 0.3, HEADS, 1e9], ids=str)
def test_small_frames_go_by_chunks(monkeypatch, dense, close, close_grads, shape, forget):
    """Where States of frames weigh more than tokens: values and gradients, in turn with and without padding and angles,
    from State to State."""
    monkeypatch.delattr(frames, "_attend")
    for rotated in (True, False):
        *inputs, theta = sample(shape, dim=32, value_dim=32)
        mask = padding(shape) if rotated and forget != 1e9 else None
        options = {"forget": per_head(forget), "position": theta if rotated else None, "mask": mask}
        actual, _ = attend(*inputs, shape, **options)
        _, state = attend(*inputs, shape, impl="reference", **options)
        turned = angles(shape, theta) if rotated else None
        expected = dense(*inputs, mask=mask, see=weights(shape, None, forget), angles=turned)
        first = shape[0] // 3
        parts, last = in_chunks(*inputs, shape, (first, shape[0] - first) if first else (1,), **options)
        ours, theirs = (actual, parts, *whole(last)), (expected, expected, *whole(state))
        for a, b in zip(ours, theirs, strict=True):
            close(a.detach(), b.detach(), 1e-10)
        close_grads(ours, theirs, (*inputs, theta) if rotated else inputs, 1e-9)


def test_without_gradients_large_frames_are_done_in_groups(monkeypatch, close):
    shape, calls = (7, 9), []
    *inputs, theta = sample(shape, grads=False)
    attend_all = frames._attend
    monkeypatch.setattr(frames, "_attend", lambda *a: (calls.append(a[2]), attend_all(*a))[1])
    expected, _ = attend(*inputs, shape, position=theta)
    monkeypatch.setattr(frames, "SEGMENT", 200)  # 3 States of 2 samples, 2 heads, 5 x 3
    actual, _ = attend(*(x.requires_grad_() for x in inputs), shape, position=theta)
    with torch.no_grad():
        actual, _ = attend(*inputs, shape, position=theta)
    assert calls == [7, 7, 3, 3, 1]
    close(actual, expected, 1e-11)


@pytest.mark.parametrize("options", [{"window": 3}, {"window": 3, "forget": HEADS}], ids=str)
def test_windows_over_small_frames_are_done_in_groups(monkeypatch, close, close_grads, options):
    """Where States of frames weigh more than tokens; the groups are done again going back."""
    shape, calls = (7, 1, 2), []
    q, k, v, theta = inputs = sample(shape, dim=16, value_dim=16)
    options = options | {"mask": padding(shape), "forget": per_head(options.get("forget", 0.0))}
    attend_all = frames._attend
    monkeypatch.setattr(frames, "_attend", lambda *a: (calls.append(a[2]), attend_all(*a))[1])
    actual, state = attend(q, k, v, shape, position=theta, **options)
    assert calls == [3, 3, 1]
    grad(actual.sum(), q, retain_graph=True)
    assert sorted(calls[3:]) == [1, 3, 3]
    assert not frames.states_outweigh_tokens(k, v, ops.Position(theta, (1, 7, 2)), 14)  # as one frame
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
        out, after = attend(q, k, v, (3, 2), position=theta, state=ops.State(past.max, total, memory), **options)
        return out, *whole(after)

    assert torch.autograd.gradcheck(function, (*inputs, theta, total, memory))


def bad():
    """A word of the message, positional arguments, options; a right call is q, k, v, 3."""
    q, k, v, theta = sample((3, 4), grads=False)
    place = ops.Position(theta, (3, 4))
    yield r"\bq\b", (q[:, :8], k, v, 3), {}
    yield r"\bv\b", (q, k, v[:, :, :1], 3), {}
    yield "mask", (q, k, v, 3), {"mask": torch.ones(2, 3, dtype=torch.bool)}
    yield "frames=5.* 12", (q, k, v, 5), {}
    yield "frames=0", (q, k, v, 0), {}
    yield r"\(4, 3\).*3 frames", (q, k, v, 3), {"position": place._replace(layout=(4, 3))}
    yield r"\(2, 4\).* 4 tokens", (q, k, v, 3), {"position": ops.Position(theta, (2, 4), prefix=4)}
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
        ops.axis_causal_attention(q, k, v, 3, **how)[1] for how in ({}, {"window": 3}, {"position": place})
    )
    yield r"state.memory \(2, 2, 10, 3\)", (q, k, v, 3), {"state": other}
    yield r"state.*\(2, 2, 2, 5", (q, k, v, 3), {"state": window}
    yield r"state.max \(2, 2, 5\).*window", (q, k, v, 3), {"state": plain, "window": 3}
    yield r"state.max \(2, 2, 2, 5\).*\(2, 3, 2\)", (q, k, v, 3), {"state": window, "window": 4}


@pytest.mark.parametrize("case", range(len(list(bad()))))
def test_bad_arguments_are_named(case):
    match, args, options = list(bad())[case]
    with pytest.raises(ValueError, match=match):
        ops.axis_causal_attention(*args, **options)
