"""What float32 must not lose: forgetting over many frames, angles and their gradients far out."""

import pytest
import torch
from torch.autograd import grad, gradcheck

from ndlightnet import ops
from ndlightnet.ops.lightnet.state import tile

from .framed import sample

FAR = 2**30
both = pytest.mark.parametrize("impl", ["torch", "reference"])


def worst(actual, exact):
    return ((actual.double() - exact).abs().max() / exact.abs().max()).item()


@pytest.mark.parametrize("forget", [0.5, (0.5, 0.001)], ids=str)
@pytest.mark.parametrize("far", [0.0, 1e4])
def test_forgetting_over_many_frames_in_one_call(forget, far):
    """As many roundings as there are merges between two frames, 14 of three numbers, and those of sums and reads; the
    fade of 16,384 frames adds none. Nor to the State: its weight is exp(max) * sum, and max is rounded once."""
    forget = torch.tensor(forget) if isinstance(forget, tuple) else forget
    q, k, v = (torch.randn(1, 16384, 2, 4) for _ in "qkv")
    k = k + far
    out, state = ops.axis_causal_attention(q, k, v, 16384, forget=forget)
    exact = ops.axis_causal_attention(q.double(), k.double(), v.double(), 16384, forget=forget)
    assert worst(out, exact[0]) < 14 * 3 * 2.0**-24
    weight, expected = (s.max.double() + s.sum.double().log() for s in (state, exact[1]))
    assert (weight - expected).abs().max() < 14 * 3 * 2.0**-24 + far * 2.0**-24
    mean = state.memory / state.sum[..., None]
    assert worst(mean, exact[1].memory / exact[1].sum[..., None]) < 14 * 3 * 2.0**-24


@pytest.mark.parametrize("far", [0.0, 1e4])
def test_forgetting_does_not_drift(far):
    """At token 20,000 decayed keys are near 10,000: the error stays that of the first tokens."""
    q, k, v = (torch.randn(1, 20000, 2, 4) for _ in "qkv")
    k = k + far
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, _ = ops.axis_causal_attention(q, k, v, 20000, forget=0.5)
    exact, _ = ops.axis_causal_attention(q.double(), k.double(), v.double(), 20000, forget=0.5)
    pull = torch.randn_like(out)
    grads = (grad((x * pull).sum(), (q, k, v)) for x in (out, exact))
    for x, y in zip((out, *next(grads)), (exact, *next(grads)), strict=True):
        assert worst(x[:, -1000:], y[:, -1000:].double()) < 14 * 3 * 2.0**-24


@both
def test_forgetting_is_not_lost_beside_large_keys(impl):
    """A fade of 0.01 a frame, where float32 numbers are 0.06 apart. Every frame rounds sum and memory once."""
    q, k, v = (torch.randn(1, 80, 2, 3) for _ in "qkv")
    k = k + 1e6
    exact, _ = ops.axis_causal_attention(q.double(), k.double(), v.double(), 40, forget=0.01)
    out, _ = ops.axis_causal_attention(q, k, v, 40, forget=0.01, impl=impl)
    assert worst(out, exact) < 4 * 40 * 2.0**-24


def sums(state):
    """Of a State, whatever its maximum."""
    scale = state.max.exp()
    return scale * state.sum, tile(scale, state.memory.shape[-2], -1)[..., None] * state.memory


def outputs(form, inputs, theta, start, kind="cosine", past=None, impl="torch"):
    """Of a form with angles that count from `start` on the first axis."""
    q, k, v = inputs
    place = ops.Position(theta, (q.shape[1],), kind, offset=(start,))
    if form == "global":
        return (ops.global_attention(q, k, v, position=place, impl=impl),)
    if form == "source":
        state = ops.summarize(k, v, position=place, impl=impl)
        return ops.read(q, past or state, position=place, impl=impl), *sums(state)
    if form in ("causal", "decay"):
        forget = 0.3 if form == "decay" else 0.0
        out, state = ops.causal_attention(q, k, v, position=place, state=past, forget=forget, impl=impl)
        return out, *sums(state)
    if form == "step":
        token = (x[:, 0] for x in inputs)
        place = place._replace(layout=(1,))
        out, state = ops.attention_step(*token, past, position=place, impl=impl)
        return out, *sums(state)
    shape, window = (q.shape[1] // 4, 2, 2), 3 if form == "window" else None
    place = place._replace(layout=shape, offset=(start, 0, 7))
    out, state = ops.axis_causal_attention(
        q, k, v, shape[0], position=place, state=past, window=window, forget=0.1, impl=impl
    )
    return out, *sums(state)


@both
@pytest.mark.parametrize("form", ["global", "causal", "decay", "frames", "window"])
@pytest.mark.parametrize("kind", ["cosine", "rotary"])
@pytest.mark.parametrize("each", [False, True])
def test_the_gradient_of_angles_does_not_know_how_far_out_tokens_are(form, kind, each, impl):
    """It depends on offsets only: at 2^30 it is that at 0, of which float32 keeps what a sum of
    coordinates up to 16 times twists of 16 tokens, made of a few products each, keeps."""
    *inputs, theta = sample((16,), dim=6, dtype=torch.float32)
    theta = theta.detach()[:, : 6 if kind == "cosine" else 3].requires_grad_()
    start = torch.tensor([FAR, 5]) if each else FAR
    out = outputs(form, inputs, theta, start, kind, impl=impl)[0]
    double = [x.detach().double().requires_grad_() for x in (*inputs, theta)]
    exact = outputs(form, double[:3], double[3], 0, kind)[0]
    pull = torch.randn_like(out)
    (actual,) = grad(out, theta, pull)
    (expected,) = grad(exact, double[3], pull.double())
    assert worst(actual, expected) < 16 * 16 * 2.0**-24
    assert worst(out, exact) < 16 * 2.0**-24


@pytest.mark.parametrize("form", ["global", "source", "causal", "decay", "step", "frames", "window"])
@pytest.mark.parametrize("kind", ["cosine", "rotary"])
@pytest.mark.parametrize("past", [False, True])
def test_gradients_with_a_start_and_states_are_right(form, kind, past):
    """Against differences: of outputs and of the State that comes out, to angles, inputs and the
    State that goes in, each sample at a place of its own."""
    past = past or form == "step"
    dim = 3 if kind == "cosine" else 6
    *inputs, theta = sample((8,), dim=dim, value_dim=2, heads=1)
    theta = theta.detach()[:, :3].requires_grad_()
    lead = (2, 2, 1) if form == "window" else (2, 1)
    total = 1 + torch.rand(*lead, dim, dtype=torch.float64)
    memory = torch.randn(*lead, 2 * dim, 2, dtype=torch.float64).requires_grad_()
    start = torch.tensor([3, -2])

    def run(q, k, v, theta, memory):
        state = ops.State(torch.zeros_like(total), total, memory) if past else None
        return outputs(form, (q, k, v), theta, start, kind, state)

    assert gradcheck(run, (*inputs, theta, memory), fast_mode=True)


@pytest.mark.parametrize("kind", ["cosine", "rotary"])
@pytest.mark.parametrize("form", ["global", "source", "causal"])
def test_gradients_with_a_start_and_tokens_in_front_are_right(form, kind):
    """These are at coordinate 0, wherever the grid starts."""
    *inputs, theta = sample((6,), dim=3, value_dim=2, heads=1)
    theta = theta.detach()[:, : 3 if kind == "cosine" else 1].requires_grad_()

    def run(q, k, v, theta):
        place = ops.Position(theta, (4,), kind, prefix=2, offset=(torch.tensor([3, -2]),))
        if form == "global":
            return ops.global_attention(q, k, v, position=place)
        if form == "causal":
            return ops.causal_attention(q, k, v, position=place)[0]
        return sums(ops.summarize(k, v, position=place))

    assert gradcheck(run, (*inputs, theta), fast_mode=True)
