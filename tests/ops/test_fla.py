"""flash-linear-attention's kernels behind our functions, and ours beside its references, on a card."""

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import signature

import pytest
import torch
from torch.nn.functional import normalize

from ndlightnet.nn import mixers
from ndlightnet.nn.mixers.keyed import Keyed
from ndlightnet.ops.fla import supports
from ndlightnet.ops.recurrence import wkv
from ndlightnet.ops.recurrence.delta import gated_delta_rule
from ndlightnet.ops.recurrence.gated import gated_linear_attention
from ndlightnet_evidence.bench import rival_kernels as peers

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("fla") is None, reason="flash-linear-attention"
)
# rule and decay -> where its reference is, and whether it takes the decay as (batch, length, heads)
REFERENCES = {
    ("gated", "none"): ("linear_attn.naive", "naive_recurrent_linear_attn", None),
    ("gated", "row"): ("gla.naive", "naive_recurrent_gla", "gk"),
    ("gated", "scalar"): ("simple_gla.naive", "naive_recurrent_simple_gla", "g"),
    ("delta", "none"): ("delta_rule.naive", "delta_rule_recurrence", None),
    ("delta", "scalar"): ("gated_delta_rule.naive", "naive_recurrent_gated_delta_rule", "g"),
    ("delta", "row"): ("kda.naive", "naive_recurrent_kda", "g"),
}
cases = pytest.mark.parametrize("rule, decay", [pytest.param(*case, id="-".join(case)) for case in REFERENCES])


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Its kernels try two configurations instead of dozens."""
    peers.shorten_search()


def given(decay, n, dtype, batch=2, heads=3, dim=64, wide=64):
    def draw(*more):
        return torch.randn(batch, n, heads, *more, device="cuda")

    rows = {"none": 0, "scalar": 1, "row": dim}[decay]
    log = torch.nn.functional.logsigmoid(draw(rows)) / 4 if rows else None
    q, k, v = draw(dim) * dim**-0.5, normalize(draw(dim), dim=-1), draw(wide)
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    beta = torch.rand(batch, n, heads, device="cuda").requires_grad_()
    state = torch.randn(batch, heads, dim, wide, device="cuda").requires_grad_()
    return q, k, v, beta, None if log is None else log.requires_grad_(), state


def ours(rule, q, k, v, beta, log, state, impl):
    if rule == "gated":
        return gated_linear_attention(q, k, v, log, state, impl=impl)
    return gated_delta_rule(q, k, v, beta, log, state, impl=impl)


def pulled(run, inputs):
    """Outputs, last memory and gradients of the same random pull, float64."""
    torch.manual_seed(1)
    y, last = run(*inputs)
    pulls = [torch.randn(x.shape, device=x.device).to(x.dtype) for x in (y, last)]
    used = [x for x in inputs if x is not None]
    grads = torch.autograd.grad((y, last), used, pulls, allow_unused=True)
    return [None if x is None else x.detach().double() for x in (y, last, *grads)]


def far(a, b):
    return float((a - b).norm() / b.norm())


@cases
@pytest.mark.parametrize("n", [1, 63, 64, 200, 1000])
def test_kernels_and_the_torch_form_stay_by_float64(rule, decay, n):
    """In bfloat16: both round scores, memories and values before products, 4 to 8 times in a row,
    2^-9 each; twice that."""
    inputs = given(decay, n, torch.bfloat16)
    log = inputs[4]
    exact = [None if x is None else x.detach().double().requires_grad_() for x in inputs]
    theirs = pulled(lambda *xs: ours(rule, *xs, impl="reference"), exact)
    for impl, tolerance in (("torch", 8 * 2**-8), ("fla", 8 * 2**-8)):
        if impl == "fla" and not (why := supports("gated_delta_rule", inputs[1], inputs[2], log)):
            assert decay == "scalar" and "issue 640" in why.reason
            with pytest.raises(ValueError, match=r"impl='fla'.*issue 640"):
                ours(rule, *inputs, impl="fla")
            continue
        own = pulled(partial(ours, rule, impl=impl), inputs)
        for a, b in zip(own, theirs, strict=True):
            assert (a is None) == (b is None)
            assert a is None or (a.shape == b.shape and far(a, b) < tolerance), (impl, far(a, b))


@cases
def test_our_torch_form_is_their_reference(rule, decay):
    """In float32, outputs and gradients: rounding alone, 6e-8 a step over 200 tokens."""
    inputs = given(decay, 200, torch.float32)
    module, name, argument = REFERENCES[rule, decay]
    reference = getattr(import_module(f"fla.ops.{module}"), name)

    takes = signature(reference).parameters

    def theirs(q, k, v, beta, log, state):
        more = {"initial_state": state, "output_final_state": True}
        if "scale" in takes:
            more["scale"] = 1.0
        else:  # it divides by sqrt(dim)
            q = q * q.shape[-1] ** 0.5
        if argument:
            more[argument] = log.squeeze(-1) if decay == "scalar" else log
        if name == "delta_rule_recurrence":  # heads before tokens
            y, last = reference(*(x.transpose(1, 2) for x in (q, k, v, beta)), **more)
            return y.transpose(1, 2), last
        if rule == "delta":
            more["beta"] = beta
        return reference(q, k, v, **more)[:2]

    own = pulled(lambda *xs: ours(rule, *xs, impl="torch"), inputs)
    for i, (a, b) in enumerate(zip(own, pulled(theirs, inputs), strict=True)):
        assert (a is None) == (b is None)
        assert a is None or far(a, b) < 200 * 6e-8, (i, far(a, b))


@pytest.mark.parametrize(
    "name", ["LinearAttention", *(name for name in mixers.__all__ if issubclass(getattr(mixers, name), Keyed))]
)
@pytest.mark.parametrize("shape", [(300,), (7, 9, 5)], ids=str)
def test_mixers_say_what_runs_and_both_give_the_same(name, shape):
    """Under bfloat16 autocast; as long as a dozen roundings apart."""
    torch.manual_seed(0)
    auto = getattr(mixers, name)(128).cuda()
    plain = getattr(mixers, name)(128, impl="torch").cuda()
    plain.load_state_dict(auto.state_dict())
    x = torch.randn(2, *shape, 128, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for causal in (False, True):
            # linear attention has kernels for causal tokens one after the other only
            kernels = name != "LinearAttention" or (causal and len(shape) == 1)
            assert plain.implementation(x, causal) == "torch"
            with torch.no_grad():
                assert auto.implementation(x, causal) == ("fla" if kernels else "torch")
            a, b = (m(x, causal=causal) for m in (auto, plain))
            assert a.isfinite().all() and far(a.double(), b.double()) < 12 * 2**-8
    assert auto(x).dtype == torch.float32  # without autocast: the torch form


@pytest.mark.parametrize("n", [1, 64, 200])
def test_rwkv4_is_theirs(n):
    """In float32, outputs and gradients; their exponentials are approximate, 2^-22 a step."""
    xs = [torch.randn(2, n, 96, device="cuda") for _ in range(2)]
    xs += [torch.randn(96, device="cuda") for _ in range(2)]
    results = []
    for run in (wkv.means, peers.fla_rwkv4):
        given = [x.clone().requires_grad_() for x in xs]
        y = run(*given)
        torch.manual_seed(1)
        results.append((y, *torch.autograd.grad(y, given, torch.randn_like(y))))
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        if b.norm() or a.norm():  # one token: its decay does nothing
            assert far(a.double(), b.double()) < n * 2**-22, i


def test_float32_is_refused_in_words():
    q, k, v, *_ = given("none", 10, torch.float32)
    with pytest.raises(ValueError, match=r"impl='fla'.*float32.*expected bfloat16"):
        gated_linear_attention(q, k, v, impl="fla")
