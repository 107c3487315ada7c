"""Second derivatives of all operators and mixers, below and above a chunk of 64 tokens: they are
right, or raise the same words; never wrong without a word."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import grad
from torch.utils.checkpoint import checkpoint

from ndlightnet import ops
from ndlightnet.nn import mixers
from ndlightnet.nn.mixers.keyed import Keyed
from ndlightnet.ops import fla, linear
from ndlightnet.ops.local import local_attention
from ndlightnet.ops.recurrence import delta, gated, memory, selective, ssm, wkv
from ndlightnet.ops.recurrence.scan import scan

WORDS = "no second derivative: the gradient of this operator is written out"
LENGTHS = pytest.mark.parametrize("n", [6, 70])


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def gradient(run, xs, graph=False) -> list[Tensor]:
    return list(grad(run(*xs).square().sum(), xs, create_graph=graph))


def check_right(run, *xs: Tensor) -> None:
    """The derivative of the gradient along a direction against differences of gradients."""
    xs = [x.detach().requires_grad_() for x in xs]
    along = [torch.randn_like(x) for x in xs]
    # a step h is wrong by h^2 and by rounding / h: both about 1e-10 here
    pairs = list(zip(xs, along, strict=True))
    ends = [gradient(run, [(x + h * u).detach().requires_grad_() for x, u in pairs]) for h in (1e-5, -1e-5)]
    expected = [(a - b) / 2e-5 for a, b in zip(*ends, strict=True)]
    inner = zip(gradient(run, xs, graph=True), along, strict=True)
    actual = grad(sum((g * u).sum() for g, u in inner), xs)
    scale = max(x.abs().max().item() for x in expected)
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).abs().max() < 1e-6 * scale


def check_raises(run, *xs: Tensor) -> None:
    """Whatever the gradient is pulled with, and whichever input it is differentiated by; gradients
    that are not differentiated again stay what they are."""
    xs = [x.detach().requires_grad_() for x in xs]
    for pull in (torch.sum, lambda y: y.square().sum()):
        expected = grad(pull(run(*xs)), xs)
        gradients = grad(pull(run(*xs)), xs, create_graph=True)
        for a, b in zip(gradients, expected, strict=True):
            assert (a - b).abs().max() <= 1e-12 * b.abs().max()
        for x in xs:
            with pytest.raises(RuntimeError, match=WORDS):
                grad(sum(g.sum() for g in gradients), x, retain_graph=True)
        with pytest.raises(RuntimeError, match=WORDS):
            sum(g.sum() for g in gradients).backward()


def keyed(n: int) -> list[Tensor]:
    """q, k, v, and a log decay."""
    return [*(draw(1, n, 2, 3) for _ in range(3)), -draw(1, n, 2, 3).square()]


def causal_linear(impl: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sums = linear.Sums(q.new_zeros(1, 2, 3), q.new_zeros(1, 2, 3, 3))
    return linear.causal_linear_attention(q.square(), k.square(), v, q.shape[1], sums, denominator=True, impl=impl)[0]


def delta_rule(impl: str, q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    return delta.gated_delta_rule(q, k, v, q.sigmoid().mean(-1), decay, impl=impl)[0]


def general(run, shrink: Tensor, expand: Tensor, inputs: Tensor, logits: Tensor) -> Tensor:
    f = logits.exp()
    forget = torch.diag_embed(f) if run is memory.matrix_memory else f[..., None]
    return run(shrink, expand, forget, inputs)[0]


def select(u: Tensor, step: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return selective.selective_scan(u.flatten(2), step.exp().flatten(2), -u.new_ones(6, 3), b[:, :, 0], c[:, :, 0])[0]


def causal(impl: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ops.causal_attention(q, k, v, impl=impl)[0]


def frames(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ops.axis_causal_attention(q, k, v, 2)[0]


def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return linear.linear_attention(q.square(), k.square(), v, denominator=True)


def weighted_means(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return wkv.means(k.flatten(2), v.flatten(2), *w[0, :2].flatten(1))


# how many of `keyed` they take
RAISE = {
    "gated": (lambda *xs: gated.gated_linear_attention(*xs)[0], 4),
    "delta": (partial(delta_rule, "torch"), 4),
    "selective": (select, 4),
    "causal linear": (partial(causal_linear, "torch"), 3),
    "causal": (partial(causal, "torch"), 3),
}
RIGHT = {
    "gated": (lambda *xs: gated.gated_linear_attention(*xs, impl="reference")[0], 4),
    "delta": (partial(delta_rule, "reference"), 4),
    "reference": (partial(general, memory.reference), 4),
    "elementwise": (partial(general, memory.elementwise_memory), 4),
    "matrix": (partial(general, memory.matrix_memory), 4),
    "causal linear": (partial(causal_linear, "reference"), 3),
    "causal": (partial(causal, "reference"), 3),
    "global": (ops.global_attention, 3),
    "frames": (frames, 3),
    "linear": (whole, 3),
    "scan": (lambda f, b: scan(f.sigmoid(), b), 2),
    "wkv": (weighted_means, 3),
    "local": (partial(local_attention, window=3), 3),
}


@LENGTHS
@pytest.mark.parametrize("name", RAISE)
def test_written_out_gradients_raise(monkeypatch, name, n):
    monkeypatch.setattr(selective, "SEGMENT_CPU", 400)  # several segments
    run, count = RAISE[name]
    check_raises(run, *keyed(n)[:count])


@LENGTHS
@pytest.mark.parametrize("name", RIGHT)
def test_others_are_right(name, n):
    run, count = RIGHT[name]
    check_right(run, *keyed(n)[:count])


@LENGTHS
def test_linear_systems_are_right(n):
    z, weight = torch.complex(-draw(3, 2).exp(), draw(3, 2)), torch.complex(draw(3, 2), draw(3, 2))
    check_right(lambda u: ssm.diagonal_ssm(u, z, weight)[0].tanh(), draw(1, n, 3))
    log_decay = -draw(1, 2).exp()
    check_right(lambda x, coef: ops.axis_scan(x, coef, log_decay), draw(1, n, 3), draw(1, 3, 2))


# the mixers that raise; those that read all tokens at once do so in the causal form
ALWAYS = (Keyed, mixers.Mamba)
ONCE_CAUSAL = (mixers.ABCAttention, mixers.LightNetAttention, mixers.LinearAttention)


@LENGTHS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", mixers.__all__)
def test_of_every_mixer(name, causal, n):
    m, x = getattr(mixers, name)(4).double(), draw(1, n, 4)
    if causal and not m.causal_form:
        pytest.skip("has no causal form")
    run = partial(m, causal=causal)
    if name in ("NystromAttention", "SoftmaxAttention"):  # torch's own kernel, which has none on a CPU and says so
        with pytest.raises(RuntimeError, match="derivative for aten::_scaled_dot_product"):
            check_right(run, x)
    elif isinstance(m, ALWAYS) or (causal and isinstance(m, ONCE_CAUSAL)):
        check_raises(run, x)
    else:
        check_right(run, x)


def test_behind_a_checkpoint_the_same_is_said():
    def run(*xs: Tensor) -> Tensor:
        return checkpoint(RAISE["gated"][0], *xs, use_reentrant=False)

    check_raises(run, *keyed(70))


def test_kernels_of_others_raise_as_ours_do(monkeypatch):
    """Flash-linear-attention's leave second derivatives out without a word."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            return q * k * v

        @staticmethod
        def backward(ctx, dy):
            q, k, v = (x.detach() for x in ctx.saved_tensors)
            return dy.detach() * k * v, dy.detach() * q * v, dy.detach() * q * k

    def call(module, name, q, k, v, **more):
        return Kernel.apply(q, k, v), more["initial_state"]

    monkeypatch.setattr(fla, "_call", call)
    state = draw(1, 2, 3, 3)
    for run in (
        lambda q, k, v: fla.gated_linear_attention(q, k, v, None, state)[0],
        lambda q, k, v: fla.gated_delta_rule(q, k, v, v.mean(-1).detach(), None, state)[0],
    ):
        check_raises(run, *keyed(6)[:3])
