"""LightNet attention where it is hard: padding, extreme logits, low precision, compile, errors."""

import pytest
import torch
from torch.autograd import grad

import ndlightnet.ops as ops
from ndlightnet.ops import State, attention_step, causal_attention, global_attention, read, summarize
from tests.kernels.kernel_cases import LOGITS, logits

from .framed import HEADS, angles, per_head, sample, weights

FRAMES, TOKENS = 10, 70
# options of axis-causal attention, whose weights and angles tests know; the other two are one frame, and one each token
WINDOWS = {
    "frames": {},
    "window": {"window": 2, "forget": 0.3},
    "forgets": {"forget": HEADS},
    "tokens": {"window": 20, "forget": HEADS},  # in chunks
}
SLOW = ("tokens", "reference")
FORMS = ("global", "causal", *WINDOWS)
# what the reference does of windows, test_frames.py shows
runs = pytest.mark.parametrize(
    "form, impl", [(form, impl) for form in FORMS for impl in ("torch", "reference") if (form, impl) != SLOW]
)
impls = pytest.mark.parametrize("impl", ["torch", "reference"])


def grid(form, length=TOKENS):
    """Frames, and tokens of each."""
    frames = {"global": 1, "causal": length, "tokens": length}.get(form, FRAMES)
    return frames, length // frames


def run(form, q, k, v, **options):
    """Return the output and the last State."""
    if form == "global":
        return global_attention(q, k, v, **options), summarize(k, v, **options)
    if form == "causal":
        return causal_attention(q, k, v, **options)
    more = WINDOWS[form]
    more = more | {"forget": per_head(more.get("forget", 0.0))}
    return ops.axis_causal_attention(q, k, v, grid(form, q.shape[1])[0], **more, **options)


def seen(form, length=TOKENS):
    """How much of exp(k) counts, (target, source, heads)."""
    return weights(grid(form, length), **WINDOWS.get(form, {}))


def plain(length=TOKENS, **options):
    """q, k, v"""
    return sample((length,), **options)[:3]


def masks(length):
    """left, right, holes, one token left; the second sample is always complete."""
    t = torch.arange(length)
    for keep in (t >= 66, t < 3, t % 3 == 1, t == 65):
        yield torch.stack([keep, torch.ones(length, dtype=torch.bool)])


@runs
@pytest.mark.parametrize("which", range(4))
def test_padding_counts_nothing(dense, close, close_grads, form, impl, which):
    mask, inputs = list(masks(TOKENS))[which], plain()
    actual = run(form, *inputs, mask=mask, impl=impl)[0]
    expected = dense(*inputs, mask=mask, see=seen(form))
    close(actual, expected, 1e-10)
    keep = mask[0]
    for x in grad(actual[:1, keep].sum(), inputs, retain_graph=True):
        assert not x[0, ~keep].any()  # nothing flows to the padding
    close_grads(actual[:, keep], expected[:, keep], inputs, 1e-9)


@runs
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("turned", [False, True], ids=["plain", "position"])
def test_what_lies_in_the_padding_cannot_leak(form, impl, junk, turned):
    mask, (q, *source, theta) = list(masks(TOKENS))[2], sample((TOKENS,))
    place = ops.Position(theta, grid(form)) if turned else None
    mask[0, :14] = False  # also whole frames
    hidden, results = ~mask[..., None, None], []
    for filling in (0.0, junk):
        k, v = (x.detach().masked_fill(hidden, filling).requires_grad_() for x in source)
        out, state = run(form, q, k, v, mask=mask, position=place, impl=impl)
        results.append((out, *state, *grad(out.sum(), (q, k, v, theta)[: 3 + turned])))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty) and not clean.isnan().any()
    assert not any(x.masked_select(hidden).any() for x in results[1][5:7])


@runs
def test_a_sample_of_padding_only_gives_zeros_and_finite_gradients(form, impl):
    mask = torch.ones(2, TOKENS, dtype=torch.bool)
    mask[0] = False
    inputs = plain()
    out, state = run(form, *inputs, mask=mask, impl=impl)
    assert not out[0].any() and out[1].any(-1).all()
    for x in grad(out.sum(), inputs):
        assert x.isfinite().all() and not x[0].any() and x[1].any()
    assert (state.max[0] == -torch.inf).all() and not state.sum[0].any() and not state.memory[0].any()


@pytest.mark.parametrize("length", [5, 64, 70])
def test_masks_and_states_together(dense, close, close_grads, length):
    """Padding in both segments: right of the prompt, left of the rest."""
    mask = torch.rand(2, 2 * length) < 0.5
    inputs = plain(2 * length)
    first, state = causal_attention(*(x[:, :length] for x in inputs), mask=mask[:, :length])
    rest = [x[:, length:] for x in inputs]
    second, _ = causal_attention(*rest, mask=mask[:, length:], state=state)
    actual, expected = torch.cat([first, second], 1), dense(*inputs, mask=mask, causal=True)
    close(actual, expected, 1e-10)
    close_grads(actual, expected, inputs, 1e-9)


@runs
@pytest.mark.parametrize("name", LOGITS)
def test_extreme_logits_in_float32(dense, close_grads, form, impl, name):
    """maths.md 5.5b: the pair (max, sum) keeps float32's precision; a rounded max + log(sum) is off by 3e-4 at 5000,
    exp without a maximum overflows, a fixed anchor underflows. Where forgetting moves a maximum, float32 rounds it:
    half a unit in the last place when it is moved, and when it is moved back."""
    *inputs, theta = sample((TOKENS,), dtype=torch.float32)
    inputs[1] = logits(name, inputs[1].shape).requires_grad_()
    leaves = [*inputs, theta]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    out, state = run(form, *inputs, position=ops.Position(theta, grid(form)), impl=impl)
    expected = dense(*exact[:3], see=seen(form), angles=angles(grid(form), exact[3]))
    assert out.dtype == torch.float32 and out.isfinite().all()
    assert state.sum.isfinite().all() and state.memory.isfinite().all()
    height = inputs[1].masked_fill(inputs[1] == -torch.inf, 0).abs().max().item()
    moved = torch.finfo(torch.float32).eps * height if "forget" in WINDOWS.get(form, {}) else 0
    assert (out - expected).abs().max() < (2e-6 + moved) * expected.abs().max()
    close_grads(out, expected, leaves, 1e-5 + moved, other=exact)  # that of an angle has coordinates up to 69


@runs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs(form, impl, dtype):
    """Everything between input and output is float32, autocast or not, so the error is that of one rounding of the
    exact result: at most twice its maximum, and the same root mean square. A second rounding on the way, of SiLU(q)
    say, adds about as much again; a bfloat16 sum over 200 tokens several times."""
    q, k, v = (x.detach() for x in plain(200, dtype=dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, state = run(form, q, k, v, impl=impl)
    assert out.dtype == dtype and all(x.dtype == torch.float32 for x in state)
    exact = run(form, q.double(), k.double(), v.double(), impl="reference")[0]
    rounding, error = exact.to(dtype).double() - exact, out.double() - exact
    assert error.abs().max() <= 2 * rounding.abs().max() + 1e-6
    assert error.square().mean().sqrt() <= 1.1 * rounding.square().mean().sqrt()


def test_states_of_low_precision_inputs_are_float32():
    q, k, v = (x.detach() for x in plain(20, dtype=torch.bfloat16))
    states = summarize(k, v), causal_attention(q, k, v)[1]
    for state in (attention_step(q[:, 0], k[:, 0], v[:, 0], states[1])[1], ops.merge(*states)):
        assert all(x.dtype == torch.float32 for x in state)


@runs
def test_autocast_does_not_touch_float32_inputs(form, impl):
    inputs = plain(dtype=torch.float32)
    expected = run(form, *inputs, impl=impl)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run(form, *inputs, impl=impl)[0]
    assert cast.dtype == torch.float32 and torch.equal(cast, expected)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["global", "causal", "window", "forgets"])
def test_compile_without_a_graph_break(close, close_grads, form):
    """For any number of tokens."""
    torch._dynamo.reset()

    def function(q, k, v, theta, mask):
        return run(form, q, k, v, mask=mask, position=ops.Position(theta, grid(form, q.shape[1])))[0]

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for length in (60, 130):
        inputs, mask = sample((length, 1)), torch.rand(2, length) < 0.8
        for x in (*inputs[:3], mask):
            torch._dynamo.mark_dynamic(x, 1)
        actual, expected = (f(*inputs, mask) for f in (compiled, function))
        close(actual, expected, 1e-12)
        close_grads(actual, expected, inputs, 1e-11)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["global", "causal"])
def test_compile_with_inductor(close, close_grads, form):
    torch._dynamo.reset()
    inputs = plain(65)
    actual = torch.compile(lambda *qkv: run(form, *qkv)[0], fullgraph=True)(*inputs)
    expected = run(form, *inputs)[0]
    close(actual, expected, 1e-10)
    close_grads(actual, expected, inputs, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("rates, size", [(None, 1), ((0.5, 0.1), 1), ((0.5, 0.1), 3)], ids=str)
def test_opcheck(rotated, rates, size):
    """Schema, fake implementation, autograd registration and dynamic shapes of the operator."""
    rates = rates and torch.tensor(rates, dtype=torch.float64)[:, None]
    f, k, v = plain(9, dtype=torch.float32)
    state = State.empty(2, 2, 5, 3, rotated)
    w = torch.randn(9, 1, 10, requires_grad=True) if rotated else None
    f = torch.randn(2, 9, 2, 10, requires_grad=True) if rotated else f
    torch.library.opcheck(torch.ops.ndlightnet.causal.default, (f, k, v, w, rates, *state, size))
    torch.library.opcheck(torch.ops.ndlightnet.causal.default, (f, k, v, w, rates, None, None, None, size))


def bad():
    """A word of the message, arguments and options, of the global and the causal form."""
    q, k, v = (x.detach() for x in plain(6))
    mask = torch.ones(2, 6, dtype=torch.bool)
    yield "q", (q[:, :5], k, v), {}
    yield "q", (q[..., :4], k, v), {}
    yield "k", (q[0], k[0], v[0]), {}
    yield "v", (q, k, v[:, :5]), {}
    yield "v", (q, k, v[:, :, :1]), {}
    yield "mask", (q, k, v), {"mask": mask[:, :5]}
    yield "mask", (q, k, v), {"mask": mask.float()}
    yield "position", (q, k, v), {"position": ops.Position(torch.ones(1, 5), (7,))}
    yield "theta", (q, k, v), {"position": ops.Position(torch.ones(1, 4), (6,))}
    yield "impl", (q, k, v), {"impl": "nonsense"}
    yield "triton", (q, k, v), {"impl": "triton"}


@pytest.mark.parametrize("form", ["global", "causal"])
@pytest.mark.parametrize("case", range(11))
def test_bad_arguments_are_named(form, case):
    name, args, options = list(bad())[case]
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        run(form, *args, **options)


def test_bad_states_are_named():
    q, k, v = plain(6)
    state, place = summarize(k, v), ops.Position(torch.ones(1, 5), (6,))
    for wrong in (summarize(k[:1], v[:1]), summarize(k, v[..., :2]), summarize(k, v, position=place)):
        with pytest.raises(ValueError, match=r"state"):
            causal_attention(q, k, v, state=wrong)
        with pytest.raises(ValueError, match=r"state"):
            ops.attention_step(q[:, 0], k[:, 0], v[:, 0], wrong)
    with pytest.raises(ValueError, match=r"\bq\b.*position"):
        read(q, state, position=place)
    with pytest.raises(ValueError, match=r"\bq\b.*without position"):
        read(q, summarize(k, v, position=place))
    with pytest.raises(ValueError, match=r"triton"):
        read(q, state, impl="triton")


@impls
def test_a_step_with_a_logit_of_minus_infinity(close, close_grads, impl):
    """Such a channel stays as it was; if it has seen nothing yet, empty. Gradients too are those of
    all tokens at once."""
    q, k, v = (x.detach() for x in plain(4, dim=3))
    k[0, 0, 0, 0] = k[0, 1, 0, :2] = k[:, 3] = -torch.inf
    leaves = [x.requires_grad_() for x in (q, k, v)]
    outs, state = [], State.empty(2, 2, 3, 3, dtype=torch.float64)
    for t in range(4):
        out, state = attention_step(*(x[:, t] for x in leaves), state, impl=impl)
        outs.append(out)
        assert not any(x.isnan().any() for x in state)
    expected, after = causal_attention(*leaves)
    close(torch.stack(outs, 1), expected, 1e-12)
    for a, b in zip(state, after, strict=True):
        close(a, b, 1e-12)
    close_grads((torch.stack(outs, 1), *state[1:]), (expected, *after[1:]), leaves, 1e-12)
