"""LightNet attention where it is hard: padding, extreme logits, low precision, compile, errors."""

import pytest
import torch
from torch.autograd import grad

import ndlightnet.ops as ops
from ndlightnet.ops import State, attention_step, causal_attention, global_attention, read, summarize

FORMS = {"global": global_attention, "causal": lambda *a, **kw: causal_attention(*a, **kw)[0]}
forms = pytest.mark.parametrize("form", FORMS)
impls = pytest.mark.parametrize("impl", ["torch", "reference"])


def sample(length, heads=2, dim=5, value_dim=3, batch=2, dtype=torch.float64, grads=False):
    q, k = (torch.randn(batch, length, heads, dim, dtype=dtype) for _ in "qk")
    v = torch.randn(batch, length, heads, value_dim, dtype=dtype)
    return [x.requires_grad_(grads) for x in (q, k, v)]


def masks(length):
    """left, right, holes, one token left; the second sample is always complete."""
    t = torch.arange(length)
    for keep in (t >= 66, t < 3, t % 3 == 1, t == 65):
        yield torch.stack([keep, torch.ones(length, dtype=torch.bool)])


@forms
@impls
@pytest.mark.parametrize("which", range(4))
def test_padding_is_as_if_absent(dense, close, close_grads, form, impl, which):
    mask = list(masks(70))[which]
    inputs = sample(70, grads=True)
    actual = FORMS[form](*inputs, mask=mask, impl=impl)
    close(actual, dense(*inputs, mask=mask, causal=form == "causal"), 1e-10)
    keep = mask[0]
    alone = FORMS[form](*(x[:1, keep] for x in inputs))
    close(actual[:1, keep], alone, 1e-10)
    for x in grad(actual[:1, keep].sum(), inputs, retain_graph=True):
        assert not x[0, ~keep].any()  # nothing flows to the padding
    close_grads(actual[:1, keep], alone, inputs, 1e-9)


@forms
@impls
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 1e38])
def test_what_lies_in_the_padding_cannot_leak(form, impl, junk):
    mask = list(masks(70))[2]
    q, k, v = sample(70)
    clean = FORMS[form](q, k, v, mask=mask, impl=impl)
    hidden = ~mask[..., None, None]
    k, v = (x.masked_fill(hidden, junk).requires_grad_() for x in (k, v))
    dirty = FORMS[form](q, k, v, mask=mask, impl=impl)
    assert torch.equal(dirty, clean)
    for x in grad(dirty.sum(), (k, v)):
        assert x.isfinite().all() and not x[~mask].any()


@forms
@impls
def test_a_sample_of_padding_only_gives_zeros_and_finite_gradients(form, impl):
    mask = torch.ones(2, 70, dtype=torch.bool)
    mask[0] = False
    inputs = sample(70, grads=True)
    out = FORMS[form](*inputs, mask=mask, impl=impl)
    assert not out[0].any() and out[1].any(-1).all()
    for x in grad(out.sum(), inputs):
        assert x.isfinite().all() and not x[0].any() and x[1].any()
    state = summarize(*inputs[1:], mask=mask, impl=impl)
    assert (state.max[0] == -torch.inf).all() and not state.sum[0].any()


@pytest.mark.parametrize("length", [5, 64, 70])
def test_masks_and_states_together(dense, close, close_grads, length):
    """Padding in both segments: right of the prompt, left of the rest."""
    mask = torch.rand(2, 2 * length) < 0.5
    inputs = sample(2 * length, grads=True)
    first, state = causal_attention(*(x[:, :length] for x in inputs), mask=mask[:, :length])
    rest = [x[:, length:] for x in inputs]
    second, _ = causal_attention(*rest, mask=mask[:, length:], state=state)
    actual, expected = torch.cat([first, second], 1), dense(*inputs, mask=mask, causal=True)
    close(actual, expected, 1e-10)
    close_grads(actual, expected, inputs, 1e-9)


def extreme(name, length, dtype=torch.float32):
    noise = torch.randn(2, length, 2, 5, dtype=dtype)
    if name == "wide":
        return 300 * noise
    return noise + (5000 if name == "offset" else 3 * torch.arange(length)[:, None, None])


@forms
@impls
@pytest.mark.parametrize("name", ["wide", "offset", "ramp"])
def test_extreme_logits_in_float32(close_grads, form, impl, name):
    """maths.md 5.5b: the pair (max, sum) keeps float32's precision; a rounded max + log(sum) is
    off by 3e-4 at 5000, exp without a maximum overflows, a fixed anchor underflows."""
    q, _, v = sample(130, dtype=torch.float32)
    inputs = [x.requires_grad_() for x in (q, extreme(name, 130), v)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out = FORMS[form](*inputs, impl=impl)
    ref = FORMS[form](*exact, impl="reference")
    assert out.dtype == torch.float32 and out.isfinite().all()
    assert (out - ref).abs().max() < 2e-6 * ref.abs().max()
    close_grads(out, ref, inputs, 5e-6, other=exact)


@forms
@impls
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs(form, impl, dtype):
    """Everything between input and output is float32, so the error is that of one rounding of the
    exact result: at most twice its maximum, and the same root mean square. A second rounding on the
    way, of SiLU(q) say, adds about as much again; a bfloat16 sum over 200 tokens several times."""
    q, k, v = sample(200, dtype=dtype)
    out = FORMS[form](q, k, v, impl=impl)
    assert out.dtype == dtype
    exact = FORMS[form](q.double(), k.double(), v.double(), impl="reference")
    rounding, error = exact.to(dtype).double() - exact, out.double() - exact
    assert error.abs().max() <= 2 * rounding.abs().max() + 1e-6
    assert error.square().mean().sqrt() <= 1.1 * rounding.square().mean().sqrt()
    states = [summarize(k, v, impl=impl), causal_attention(q, k, v, impl=impl)[1]]
    for x in (x for state in states for x in state):
        assert x.dtype == torch.float32
    _, state = ops.attention_step(q[:, 0], k[:, 0], v[:, 0], states[1])
    assert all(x.dtype == torch.float32 for x in state)
    assert ops.merge(*states).memory.dtype == torch.float32


@forms
@impls
def test_autocast_does_not_touch_float32_inputs(form, impl):
    inputs = sample(70, dtype=torch.float32, grads=True)
    plain = FORMS[form](*inputs, impl=impl)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = FORMS[form](*inputs, impl=impl)
    assert cast.dtype == torch.float32 and torch.equal(cast, plain)


@pytest.mark.slow
@forms
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_a_graph_break(close, close_grads, form, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(FORMS[form], fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length in (7, 64, 65, 130) if dynamic else (65,):
        inputs = sample(length, grads=True)
        mask = torch.rand(2, length) < 0.8
        actual, expected = compiled(*inputs, mask=mask), FORMS[form](*inputs, mask=mask)
        close(actual, expected, 1e-12)
        close_grads(actual, expected, inputs, 1e-11)


@pytest.mark.exhaustive
@forms
def test_compile_with_inductor(close, close_grads, form):
    torch._dynamo.reset()
    inputs = sample(65, grads=True)
    actual = torch.compile(FORMS[form], fullgraph=True)(*inputs)
    expected = FORMS[form](*inputs)
    close(actual, expected, 1e-10)
    close_grads(actual, expected, inputs, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("rates", [None, (0.5, 0.1)], ids=str)
def test_opcheck(rotated, rates):
    """Schema, fake implementation, autograd registration and dynamic shapes of the operator."""
    rates = rates and torch.tensor(rates, dtype=torch.float64)[:, None]
    f, k, v = sample(9, dtype=torch.float32, grads=True)
    state = State.empty(2, 2, 5, 3, rotated)
    w = torch.randn(9, 1, 10, requires_grad=True) if rotated else None
    f = torch.randn(2, 9, 2, 10, requires_grad=True) if rotated else f
    torch.library.opcheck(torch.ops.ndlightnet.causal.default, (f, k, v, w, rates, *state))


def bad():
    q, k, v = sample(6)
    mask = torch.ones(2, 6, dtype=torch.bool)
    place = ops.Position(torch.ones(1, 5), (7,))
    yield "q", (q[:, :5], k, v), {}
    yield "q", (q[..., :4], k, v), {}
    yield "k", (q[0], k[0], v[0]), {}
    yield "v", (q, k, v[:, :5]), {}
    yield "v", (q, k, v[:, :, :1]), {}
    yield "mask", (q, k, v), {"mask": mask[:, :5]}
    yield "mask", (q, k, v), {"mask": mask.float()}
    yield "position", (q, k, v), {"position": place}
    yield "theta", (q, k, v), {"position": ops.Position(torch.ones(1, 4), (6,))}
    yield "impl", (q, k, v), {"impl": "nonsense"}
    yield "triton", (q, k, v), {"impl": "triton"}


@forms
@pytest.mark.parametrize("case", range(11))
def test_bad_arguments_are_named(form, case):
    name, args, options = list(bad())[case]
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        FORMS[form](*args, **options)


def test_bad_states_are_named():
    q, k, v = sample(6)
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
    q, k, v = sample(4, dim=3)
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
