"""LightNetAttention as a layer: its formula, its forms, and what it refuses."""

from functools import partial

import pytest
import torch

from ndlightnet import LightNetAttention, NDLightNet, ndlightnet_small
from ndlightnet.nn.mixers import WithLocal

FORMULAS = [
    (False, {}),
    (False, {"bias": True}),
    *((True, o) for o in ({"bias": True}, {"window": 2}, {"forget": 0.5})),
]


@pytest.mark.parametrize("causal, options", FORMULAS)
def test_layer_is_its_formula(dense, close, causal, options):
    """o_proj(norm(merged heads) * sigmoid(low-rank gate)), from the weights (maths.md 5.2); causal along
    the first axis, by frames of 6 tokens."""
    layer = LightNetAttention(12, 2, lrpe=None, **options).double()
    x = torch.randn(2, 4, 2, 3, 12, dtype=torch.float64)
    q, k, v = (p(x).flatten(1, 3).unflatten(-1, (2, 6)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    frame = torch.arange(24) // 6
    age = frame[:, None] - frame
    see = ((age >= 0) & (age < options.get("window", 9))).double()
    see = see * torch.exp(-options.get("forget", 0.0) * age.clamp(min=0).double())
    y = dense(q, k, v, see=see if causal else torch.ones_like(see)).reshape(x.shape)
    y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    gate = layer.gate[1](layer.gate[0](x)).sigmoid()
    close(layer(x, causal=causal), layer.o_proj(y * gate), 1e-10)
    assert layer.gate[0].weight.shape == (6, 12)


REFUSED = {  # options of the layer, of its call: the message
    "impl": ({"impl": "nonsense"}, {}, r"impl"),
    "norm and a context": (
        {},
        {"norm": torch.nn.LayerNorm(32), "context": torch.zeros(2, 9, 32)},
        r"norm with a context: expected one of them",
    ),
    "causal and a context": ({}, {"causal": True, "context": torch.zeros(2, 9, 32)}, r"causal=True with a context"),
    "rotary and causal": ({"lrpe": "rotary"}, {"causal": True}, r"causal=True with lrpe='rotary'"),
    "a window, not causal": ({"window": 2}, {}, r"causal=False, and the layer has window=2"),
    "decay, not causal": ({"forget": 0.1}, {}, r"causal=False, and the layer has window=None, forget=0.1"),
    "another number of axes": ({"dims": 2}, {}, r"tokens on 1 axes, local mixing with dims=2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_why(case):
    options, call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        LightNetAttention(32, **{"heads": 2, **options})(torch.randn(2, 9, 32), **call)


def test_options():
    assert [LightNetAttention(d).heads for d in (32, 64, 128, 192, 384, 100)] == [1, 2, 4, 6, 12, 2]
    count = sum(p.numel() for p in LightNetAttention(128).parameters())
    assert count == 4 * 128**2 + 2 * 32 * 128 + 3 * 128


@pytest.mark.parametrize("cosine", [False, True])
def test_impl_reaches_the_functions(close, cosine):
    x, lrpe = torch.randn(2, 3, 3, 32), "cosine" if cosine else None
    for causal, more in ((False, {}), (True, {}), (True, {"window": 2, "forget": 0.1})):
        layer = LightNetAttention(32, lrpe=lrpe, **more)
        slow = LightNetAttention(32, lrpe=lrpe, **more, impl="reference")
        slow.load_state_dict(layer.state_dict())
        close(slow(x, causal=causal), layer(x, causal=causal), 1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("local", ["values", "input", "both"])
@pytest.mark.parametrize(("grid", "more"), [((7,), {}), ((4, 5), {"dense": True}), ((3, 2, 4), {"radius": 2})])
def test_its_local_branch_is_that_of_the_wrapper(close, local, grid, more, causal):
    """Around the paper's layer, with equal weights."""
    layer = LightNetAttention(12, 2, dims=len(grid), local=local, **more).double()
    wrapper = WithLocal(
        12, partial(LightNetAttention, heads=2, local=None), local=local, dims=len(grid), **more
    ).double()
    weights = layer.state_dict()
    wrapper.load_state_dict({k if k.startswith("local") else f"mixer.{k}": x for k, x in weights.items()})
    x = torch.randn(2, *grid, 12, dtype=torch.float64)
    mask = torch.rand(2, *grid) > 0.2
    close(layer(x, causal=causal), wrapper(x, causal=causal), 1e-11)
    close(layer(x, mask=mask, causal=causal)[mask], wrapper(x, mask=mask, causal=causal)[mask], 1e-11)


def test_networks_mix_locally_and_the_published_ones_do_not():
    net = NDLightNet(2, 1, 10, patch_size=1, embed_dim=16, depth=2)
    local = {name: x.shape for name, x in net.named_parameters() if "local" in name}
    assert local == {f"blocks.{i}.mixer.local_values.weight": (5, 16) for i in range(2)}
    for paper in (ndlightnet_small(dims=2, device="meta"), LightNetAttention(12)):  # a layer without `dims`
        assert not [name for name, _ in paper.named_parameters() if "local" in name]


@pytest.mark.parametrize("causal, scale", [(False, 4.0), (True, 1.0)])
def test_key_scale_of_a_network(causal, scale):
    for mixer in (LightNetAttention, partial(WithLocal, mixer=LightNetAttention)):
        net = NDLightNet(2, 1, 2, patch_size=1, embed_dim=8, depth=1, causal=causal, mixer=mixer)
        assert [m.key_scale for m in net.modules() if isinstance(m, LightNetAttention)] == [scale]


def test_key_scale_survives_the_network_initialiser():
    nets = []
    for scale in (1.0, 4.0):
        torch.manual_seed(0)
        mixer = partial(LightNetAttention, key_scale=scale)
        nets.append(NDLightNet(1, 1, 2, patch_size=1, embed_dim=8, depth=1, mixer=mixer))
    for (name, plain), sharp in zip(nets[0].named_parameters(), nets[1].parameters(), strict=True):
        assert torch.equal((4 if name.endswith("k_proj.weight") else 1) * plain, sharp), name


@pytest.mark.parametrize("lrpe", ["rotary", None])
def test_cross_form_reads_a_source_on_another_grid(close, lrpe):
    """A target reads the tokens of the source that a mask shows, and no other target."""
    layer, x = LightNetAttention(32, 2, context_dim=11, lrpe=lrpe), torch.randn(2, 4, 6, 32)
    context, mask = torch.randn(2, 3, 5, 11), torch.rand(2, 3, 5) < 0.7
    y = layer(x, context=context, mask=mask)
    close(layer(x, context=torch.where(mask[..., None], context, 50.0), mask=mask), y, 1e-5)
    close(layer(x[:1, :1, :1], context=context[:1], mask=mask[:1]).flatten(), y[0, 0, 0], 1e-5)
