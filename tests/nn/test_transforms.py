"""torch.func and forward-mode AD: all mixers, layers and networks, against torch.autograd."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jvp, vmap

from ndlightnet import MultiheadAttention, NDLightNet, NDLightUNet, mixers
from ndlightnet.layout import Grid
from ndlightnet.nn.depthwise import LocalMixing
from ndlightnet.nn.mixers.base import build_mixer
from ndlightnet.nn.position import MDTPE
from ndlightnet.ops import axis_causal_attention, norm_gate

from .mixer_cases import FORMS

BEYOND = 1e-11  # float64 roundings of 1e-16 that a few thousand sums grow; gradients are below 1e3

net = partial(NDLightNet, num_classes=5, embed_dim=16, tpe_states=4, patch_size=2, depth=2)
video = partial(mixers.LightNetAttention, window=2, forget=0.1)
LAYERS = {
    "MDTPE": (lambda: MDTPE(2, 16, 4), (5, 6, 16)),
    "LocalMixing": (lambda: LocalMixing(2, 16), (5, 6, 16)),
    "window": (lambda: build_mixer(partial(video, heads=2), 16, dims=3, layer=0), (4, 2, 3, 16)),
    "tokens": (lambda: build_mixer(partial(video, heads=2), 16, dims=1, layer=0), (35, 16)),
    "NDLightNet": (lambda: net(2), (3, 5, 6)),
    "causal": (lambda: net(3, causal=True), (3, 4, 5, 6)),
    "NDLightUNet": (lambda: NDLightUNet(2, 3, 4, widths=(8, 16), depths=(0, 1)), (3, 9, 8)),
}


def call(name: str, module: nn.Module, parameters, x):
    more = ()
    if name in ("MDTPE", "LocalMixing"):
        grid = Grid.of(x)
        x, more = grid.flatten(x), ((None, grid) if name == "MDTPE" else (grid,))
    options = {"causal": True} if name in ("window", "tokens") else {}
    return functional_call(module, parameters, (x, *more), options)


def check(f, parameters, x) -> None:
    """Transforms of f(parameters, x) agree with torch.autograd. x: samples (3, ...)."""

    def loss(parameters, x):
        return f(parameters, x[None]).sin().sum()

    learnt = {name: p.clone().requires_grad_() for name, p in parameters.items()}
    singles = [torch.autograd.grad(loss(learnt, one), [*learnt.values()]) for one in x]
    of_samples = vmap(grad(loss), (None, 0))(parameters, x)
    for name, expected in zip(learnt, zip(*singles, strict=True), strict=True):
        assert (of_samples[name] - torch.stack(expected)).abs().max() < BEYOND, name
    # <u, J t> by forward mode, <J^T u, t> by reverse mode
    tangents = {name: torch.randn_like(p) for name, p in parameters.items()}, torch.randn_like(x)
    y, forward = jvp(f, (parameters, x), tangents)
    inputs = [*learnt.values(), x.clone().requires_grad_()]
    expected = f(learnt, inputs[-1])
    assert (y - expected).abs().max() < BEYOND
    u = torch.randn_like(y)
    back = torch.autograd.grad((expected * u).sum(), inputs)
    ways = zip(back, [*tangents[0].values(), tangents[1]], strict=True)
    reverse = sum((gradient * way).sum() for gradient, way in ways)
    assert ((forward * u).sum() - reverse).abs() < BEYOND * (back[-1].abs().sum() + 1)


@pytest.mark.parametrize("name, causal", [form for form in FORMS if form[0] != "Identity"])
def test_mixers(name, causal):
    torch.manual_seed(0)
    module = build_mixer(getattr(mixers, name), 16, dims=1 if causal else 2, layer=0, causal=causal)
    module = module.double()
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    x = torch.randn(3, *((9,) if causal else (3, 4)), 16).double()
    check(lambda p, x: functional_call(module, p, (x,), {"causal": causal}), parameters, x)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_and_networks(name):
    torch.manual_seed(0)
    module = LAYERS[name][0]().double().eval()
    parameters = {k: p.detach() for k, p in module.named_parameters()}
    x = torch.randn(3, *LAYERS[name][1]).double()
    check(lambda p, x: call(name, module, p, x), parameters, x)


@pytest.mark.parametrize("hidden", ["nothing", "padding", "future"])
def test_multihead_attention(hidden):
    torch.manual_seed(0)
    module = MultiheadAttention(16, 2, batch_first=True).double()
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def f(p, x):
        padding = (torch.arange(7) > 4).expand(len(x), 7)
        masks = {
            "nothing": {},
            "padding": {"key_padding_mask": padding},
            "future": {"attn_mask": torch.ones(7, 7).triu(1).bool(), "is_causal": True},
        }
        return functional_call(module, p, (x, x, x), {"need_weights": False, **masks[hidden]})[0]

    check(f, parameters, torch.randn(3, 7, 16).double())


def test_ensembles():
    """vmap over parameters: networks that were trained apart run as one."""
    models = [net(2, mixer=mixers.GLA).double().eval() for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    x = torch.randn(2, 3, 8, 6).double()
    y = vmap(lambda p, b: functional_call(models[0], (p, b), (x,)))(parameters, buffers)
    assert (y - torch.stack([m(x) for m in models])).abs().max() < BEYOND


@pytest.mark.parametrize("name", ["DeltaNet", "GLA", "LightNetAttention", "Mamba"])
def test_second_derivatives(name):
    """torch.autograd has none here; torch.func differentiates what the layer computes."""
    module = build_mixer(getattr(mixers, name), 8, dims=1, layer=0, causal=True).double()
    x = torch.randn(1, 3, 8).double()

    def loss(first):
        return module(torch.cat([first, x[..., 2:]], -1), causal=True).sin().sum()

    step, first = 1e-5, x[..., :2]
    second = hessian(loss)(first).reshape(6, 6)
    steps = step * torch.eye(6, dtype=x.dtype).view(6, *first.shape)
    expected = [(grad(loss)(first + t) - grad(loss)(first - t)).flatten() / (2 * step) for t in steps]
    # a central difference is off by step^2 times a third derivative, and by roundings / step
    assert (second - torch.stack(expected)).abs().max() < 1e-7 * (1 + second.abs().max())
    assert second.abs().max() > 1e-4


def test_dual_numbers_without_torch_func():
    m = build_mixer(mixers.LightNetAttention, 16, dims=1, layer=0, causal=True).double()
    x, t = torch.randn(2, 1, 9, 16).double()
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(m(forward_ad.make_dual(x, t), causal=True)).tangent
    assert (tangent - jvp(lambda x: m(x, causal=True), (x,), (t,))[1]).abs().max() < BEYOND


def test_kernels_are_refused():
    """No kernel runs in a transform, and one that is asked for says why not."""
    pytest.importorskip("triton")
    x = torch.randn(2, 16)

    def f(x):
        return norm_gate(x, x, x[0], x[0], impl="triton")

    with pytest.raises(ValueError, match=r"torch\.func|expected cuda"):
        vmap(lambda x: f(x[None]))(x)
    with pytest.raises(ValueError, match=r"torch\.func|expected cuda"):
        q = x.view(1, 2, 1, 16)
        grad(lambda q: axis_causal_attention(q, q, q, 2, impl="triton")[0].sum())(q)
