"""LightNet attention with local mixing: equal to the wrapper, and to the paper's layer without."""

from functools import partial

import pytest
import torch

from ndlightnet import NDLightNet
from ndlightnet.layout import Ragged
from ndlightnet.models import ndlightnet_small
from ndlightnet.nn.mixers import LightNetAttention
from ndlightnet.nn.mixers.with_local import WithLocal


def pair(where, dims, **more):
    """Return the layer, and the wrapper around the paper's layer, with equal weights."""
    torch.manual_seed(0)
    layer = LightNetAttention(12, 2, dims=dims, local=where, **more).double()
    paper = partial(LightNetAttention, heads=2, local=None)
    wrapper = WithLocal(12, paper, local=where, dims=dims, **more)
    names = {name: f"mixer.{name}" for name, _ in layer.named_parameters()}
    names |= {f"local_{part}.weight": f"local_{part}.weight" for part in ("values", "input")}
    state = {names[name]: value for name, value in layer.state_dict().items()}
    wrapper.double().load_state_dict(state)
    return layer, wrapper


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("where", ["values", "input", "both"])
@pytest.mark.parametrize(("grid", "more"), [((7,), {}), ((4, 5), {"dense": True}), ((3, 2, 4), {"radius": 2})])
def test_same_as_wrapper(where, grid, more, causal):
    layer, wrapper = pair(where, len(grid), **more)
    x = torch.randn(2, *grid, 12, dtype=torch.float64)
    mask = torch.rand(2, *grid) > 0.2
    for given in (None, mask):
        one, other = (m(x, mask=given, causal=causal) for m in (layer, wrapper))
        real = slice(None) if given is None else given
        torch.testing.assert_close(one[real], other[real], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("where", ["values", "input", "both"])
def test_stream_is_whole(where):
    layer, _ = pair(where, 2)
    x = torch.randn(2, 7, 3, 12, dtype=torch.float64)
    state, parts, at = layer.init_state(2, space=(3,)), [], 0
    for part in x.split([1, 3, 1, 2], 1):
        y, state = layer.advance(part, state, at)
        parts.append(y)
        at += part.shape[1]
    whole = layer(x, causal=True)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("where", ["values", "both"])
def test_pack_and_padding_as_alone(where):
    layer, _ = pair(where, 2)
    layout = Ragged([(3, 4), (1, 5), (2, 2)])
    x = torch.randn(layout.length, 12, dtype=torch.float64)
    y = layer(x, layout=layout)
    for one, other in zip(layout.split(y), layout.split(x), strict=True):
        torch.testing.assert_close(one, layer(other), rtol=1e-11, atol=1e-11)
    padded = torch.full((1, 5, 6, 12), torch.nan, dtype=torch.float64)
    mask = torch.zeros(1, 5, 6, dtype=torch.bool)
    padded[:, :3, :4], mask[:, :3, :4] = layout.split(x)[0], True
    out = layer(padded, mask=mask)[:, :3, :4]
    torch.testing.assert_close(out, layout.split(y)[0], rtol=1e-11, atol=1e-11)


def test_without_dims_it_is_the_paper_layer():
    layer = LightNetAttention(12)
    assert layer.local_values is None and layer.local_input is None
    y = layer(torch.randn(1, 3, 4, 12), context=torch.randn(1, 2, 5, 12))
    assert y.shape == (1, 3, 4, 12)


def test_network_uses_it_and_the_published_one_does_not():
    net = NDLightNet(2, 1, 10, patch_size=1, embed_dim=16, depth=2)
    found = [name for name, _ in net.named_parameters() if "local" in name]
    assert found == [f"blocks.{i}.mixer.local_values.weight" for i in range(2)]
    assert net.blocks[0].mixer.local_values.weight.shape == (5, 16)
    assert not any("local" in name for name, _ in ndlightnet_small(dims=2).named_parameters())


@pytest.mark.parametrize("causal, scale", [(False, 4.0), (True, 1.0)])
def test_key_scale_of_a_network(causal, scale):
    for local in (LightNetAttention, partial(WithLocal, mixer=LightNetAttention)):
        net = NDLightNet(2, 1, 2, patch_size=1, embed_dim=8, depth=1, causal=causal, mixer=local)
        found = [m.key_scale for m in net.modules() if isinstance(m, LightNetAttention)]
        assert found == [scale]


def test_key_scale_survives_the_network_initialiser():
    torch.manual_seed(0)
    plain = NDLightNet(1, 1, 2, patch_size=1, embed_dim=8, depth=1, mixer=partial(LightNetAttention, key_scale=1.0))
    torch.manual_seed(0)
    sharp = NDLightNet(1, 1, 2, patch_size=1, embed_dim=8, depth=1, mixer=partial(LightNetAttention, key_scale=4.0))
    for (name, one), other in zip(plain.named_parameters(), sharp.parameters(), strict=True):
        factor = 4 if name.endswith("k_proj.weight") else 1
        assert torch.equal(factor * one, other), name


@pytest.mark.parametrize("arguments", [{"local": "keys"}, {"key_scale": 0.0}])
def test_errors(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        LightNetAttention(8, dims=1, **arguments)
    with pytest.raises(ValueError, match="axes"):
        LightNetAttention(8, dims=1)(torch.randn(1, 3, 4, 8))
