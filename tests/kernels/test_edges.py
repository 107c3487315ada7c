"""Both forms where they are hard to write: padding, layouts of memory, and what is refused."""

import pytest
import torch
from torch.autograd import grad

from ndlightnet import ops

from .kernel_cases import DEVICE, Case, Problem
from .yardstick import Poison

FORMS = {"global": ops.global_attention, "causal": lambda *args, **options: ops.causal_attention(*args, **options)[0]}
forms = pytest.mark.parametrize("form", FORMS)


def sample(case):
    """q, k, v and options of a case, with gradients."""
    problem = Problem.random(case)
    inputs = [problem.leaves[name].requires_grad_() for name in "qkv"]
    return inputs, {"mask": problem.mask, "position": problem.place(), "impl": "triton"}


@pytest.mark.parametrize("form, kind", [("global", "cosine"), ("causal", None)])
def test_a_sample_of_padding_only_is_zero(form, kind):
    inputs, options = sample(Case((9,), 5, 3, kind, "all", heads=1))
    with Poison():
        out = FORMS[form](*inputs, **options)
        grads = grad(out.sum(), inputs)
    assert not out[0].any() and out[1].any(-1).all()
    for x in grads:
        assert x.isfinite().all() and not x[0].any() and x[1].any()
    state = ops.summarize(*inputs[1:], **options)
    assert (state.max[0] == -torch.inf).all()
    assert not state.sum[0].any() and not state.memory[0].any()
    assert not ops.read(inputs[0], state, position=options["position"], impl="triton")[0].any()


@pytest.mark.slow
@forms
def test_what_lies_in_the_padding_cannot_leak(form):
    (q, k, v), options = sample(Case((37,), 5, 3, None, "holes", heads=1))
    hidden, results = ~options["mask"][..., None, None], []
    junk = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e38, -1e38], device=DEVICE)
    junk = junk[torch.randint(5, (2, 37, 1, 1), device=DEVICE)]
    for filling in (torch.zeros_like(junk), junk):
        k, v = (torch.where(hidden, filling, x.detach()).requires_grad_() for x in (k, v))
        out = FORMS[form](q, k, v, **options)
        results.append((out, *grad(out.sum(), (q, k, v))))
    for clean, dirty in zip(*results, strict=True):
        assert clean.isfinite().all() and torch.equal(clean, dirty)
    assert not any(x.masked_select(hidden).any() for x in results[1][2:])


LAYOUTS = {
    "rows at odd addresses": lambda x: torch.cat([x[..., :1], x, x], -1)[..., 1 : 1 + x.shape[-1]],
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "channels apart": lambda x: x.mT.contiguous().mT,
    "every other token": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "one for all samples": lambda x: x[:1].expand_as(x),
    "one for all heads": lambda x: x[:, :, :1].expand_as(x),
}


def outcome(form, inputs, pull):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = FORMS[form](*inputs, impl="triton")
    return out, *grad(out, inputs, pull)


@pytest.mark.slow
@pytest.mark.parametrize("form, batch", [("global", 2), ("causal", 1)])
def test_layouts_of_memory_change_nothing(form, batch):
    """Nor do they in the gradient of the output."""
    q, k, v = (torch.randn(batch, 5, 2, 8, device=DEVICE) for _ in "qkv")
    k, v = k[:, :, :1].expand_as(k).contiguous(), v[:1].expand_as(v).contiguous()
    pull = torch.randn_like(v)
    expected = outcome(form, (q, k, v), pull)
    rows, heads, channels, tokens, sample, head = LAYOUTS.values()
    for views in (
        torch.stack([q, k, v], 2).unbind(2),
        (rows(q), head(k), sample(v) if batch > 1 else tokens(v)),
        (channels(q), tokens(k), heads(v)),
    ):
        assert not any(x.is_contiguous() for x in views)
        for a, b in zip(outcome(form, views, heads(pull)), expected, strict=True):
            assert torch.equal(a, b)


def test_layouts_of_a_state_change_nothing():
    problem = Problem.random(Case((17,), 5, 3, past=True))
    q, k, v = (problem.leaves[name] for name in "qkv")
    state = problem.state()
    first = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in state[:2])
    turned = ops.State(*first, state.memory.mT.contiguous().mT)
    assert not any(x.is_contiguous() for x in turned)
    for how in (
        lambda s: (ops.read(q, s, impl="triton"),),
        lambda s: flat(ops.causal_attention(q, k, v, state=s, impl="triton")),
        lambda s: flat(ops.attention_step(q[:, 0], k[:, 0], v[:, 0], s, impl="triton")),
    ):
        for a, b in zip(how(turned), how(state), strict=True):
            assert torch.equal(a, b)


def flat(result):
    out, state = result
    return (out, *state)


def unsupported():
    """Operation, tensors, lrpe, and the word that says why not."""
    x, wide = torch.randn(2, 9, 2, 16, device=DEVICE), torch.randn(2, 9, 2, 300, device=DEVICE)
    rotary = ops.Position(torch.ones(1, 8, device=DEVICE), (9,), "rotary")
    for name in ("summarize", "read", "global_attention", "causal_attention", "attention_step"):
        yield name, (x.double(), x.double()), None, "float64"
        yield name, (wide, x), None, "300"
    for name in ("summarize", "global_attention", "causal_attention", "attention_step"):
        yield name, (x, wide), None, "300"
        yield name, (x, x.half()), None, "float16"
    for name in ("summarize", "read", "global_attention"):
        yield name, (x[..., :15], x), rotary._replace(theta=rotary.theta[:, :7]), "15"
    for name in ("causal_attention", "attention_step"):
        yield name, (x, x), rotary, "rotary"


def call(name, k, v, lrpe=None, impl="triton"):
    """A function of ndlightnet.ops with k as its queries."""
    options = {"position": lrpe, "impl": impl}
    dtype = torch.promote_types(k.dtype, torch.float32)
    empty = ops.State.empty(2, 2, k.shape[-1], v.shape[-1], lrpe is not None, device=DEVICE, dtype=dtype)
    if name == "summarize":
        return ops.summarize(k, v, **options)
    if name == "read":
        return ops.read(k, empty, **options)
    if name == "attention_step":
        if lrpe is not None:
            options["position"] = lrpe._replace(layout=(1,))
        return ops.attention_step(k[:, 0], k[:, 0], v[:, 0], empty, **options)
    return getattr(ops, name)(k, k, v, **options)


def test_a_wish_is_refused_with_the_reason():
    """Never replaced by another implementation; `supported` says the same."""
    for name, (k, v), lrpe, why in unsupported():
        support = ops.supported(name, k, None if name == "read" else v, position=lrpe)
        assert not support and why in support.reason, (name, why)
        with pytest.raises(ValueError, match=rf"triton.*{why}"):
            call(name, k, v, lrpe)
        if k.dtype == v.dtype:  # other implementations take it
            call(name, k, v, lrpe, "torch")
            call(name, k, v, lrpe, "auto")


def test_what_is_supported():
    x = torch.randn(2, 9, 2, 16, device=DEVICE)
    for name in ("summarize", "read", "global_attention", "causal_attention", "attention_step"):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert ops.supported(name, x.to(dtype), x.to(dtype)) and not ops.supported(name, x).reason
        reason = ops.supported(name, x.to("meta"), x.to("meta")).reason
        assert "meta" in reason and "cuda" in reason
    with pytest.raises(ValueError, match="attention"):
        ops.supported("attention", x)


@forms
def test_auto_takes_the_kernels_on_a_gpu(form):
    inputs = [torch.randn(2, 9, 2, 16, device=DEVICE) for _ in "qkv"]
    expected = "triton" if DEVICE.type == "cuda" else "torch"
    auto, chosen = (FORMS[form](*inputs, impl=impl) for impl in ("auto", expected))
    assert torch.equal(auto, chosen)


@pytest.mark.gpu
@forms
def test_views_are_read_in_place(form):
    """The slices of one (batch, length, 3, heads, dim) tensor cost no more memory than copies."""
    one = torch.randn(2, 8192, 3, 8, 64, dtype=torch.bfloat16, device=DEVICE)
    views = one.unbind(2)

    def peak(inputs):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        FORMS[form](*inputs, impl="triton")
        return torch.cuda.max_memory_allocated() - before

    peak(views)
    plain = [x.contiguous() for x in views]
    assert peak(views) < peak(plain) + plain[0].nbytes / 2


def test_a_step_goes_by_kernel_only_where_nothing_needs_a_gradient():
    """It has none: not of the key alone, but of whatever goes in."""
    q, k, v = (torch.randn(2, 2, 8, device=DEVICE) for _ in "qkv")
    total, memory = torch.ones(2, 2, 8, device=DEVICE), torch.ones(2, 2, 16, 8, device=DEVICE)
    theta = torch.rand(2, 8, device=DEVICE)
    for learnt in (q, k, v, total, memory, theta):
        learnt.requires_grad_()
        state = ops.State(torch.zeros_like(total), total, memory)
        place = ops.Position(theta, (1,), offset=(2,))
        support = ops.supported("attention_step", k, v, q, *state, position=place)
        assert not support and "gradient" in support.reason
        with pytest.raises(ValueError, match=r"triton.*gradient"):
            ops.attention_step(q, k, v, state, position=place, impl="triton")
        out, after = ops.attention_step(q, k, v, state, position=place)
        assert grad(out.sum() + after.memory.sum(), learnt)[0].any()
        with torch.no_grad():
            assert ops.supported("attention_step", k, v, q, *state, position=place)
            out, _ = ops.attention_step(q, k, v, state, position=place, impl="triton")
        learnt.requires_grad_(False)
        assert not out.requires_grad and ops.supported("attention_step", k, v, q, *state, position=place)


@pytest.mark.parametrize("kind", ["cosine", None])
def test_a_step_with_a_logit_of_minus_infinity(close, kind):
    """Such a channel stays as it was; if it has seen nothing yet, empty."""
    q, k, v = (torch.randn(1, 3, 1, 4, device=DEVICE) for _ in "qkv")
    k[0, 0, 0, 0] = k[0, 1, 0, :2] = -torch.inf
    theta = torch.rand(1, 4, device=DEVICE)
    state = ops.State.empty(1, 1, 4, 4, kind is not None, device=DEVICE)
    for t in range(3):
        place = kind and ops.Position(theta, (1,), kind, offset=(t,))
        token = (x[:, t] for x in (q, k, v))
        out, state = ops.attention_step(*token, state, position=place, impl="triton")
        now = [x[:, : t + 1] for x in (q, k, v)]
        place = kind and ops.Position(theta, (t + 1,), kind)
        expected, after = ops.causal_attention(*now, position=place, impl="torch")
        close(out, expected[:, -1], 1e-5)
        close(state.sum * state.max.exp(), after.sum * after.max.exp(), 1e-5)
        assert torch.equal(state.max == -torch.inf, after.max == -torch.inf)
