"""LightNetAttention as a layer: its formula, its forms, and what it refuses."""

import pytest
import torch

from ndlightnet import LightNetAttention

GRIDS = ((7,), (4, 6), (3, 4, 5), (2, 3, 2, 4))


@pytest.mark.parametrize("causal", [False, True])
def test_layer_is_its_formula(dense, close, causal):
    """o_proj(norm(merged heads) * sigmoid(low-rank gate)), from the weights (maths.md 5.2)."""
    layer = LightNetAttention(12, 2, lrpe=None, bias=True).double()
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    q, k, v = (p(x).unflatten(-1, (2, 6)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    y = dense(q, k, v, causal=causal).flatten(2)
    y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    gate = layer.gate[1](layer.gate[0](x)).sigmoid()
    close(layer(x, causal=causal), layer.o_proj(y * gate), 1e-10)
    assert layer.gate[0].weight.shape == (6, 12)


@pytest.mark.parametrize("shape", GRIDS, ids=str)
@pytest.mark.parametrize("lrpe", ["cosine", "rotary", None])
def test_cross_form_reads_a_source_on_another_grid(close, shape, lrpe):
    layer = LightNetAttention(32, 2, context_dim=11, lrpe=lrpe)
    x, source_shape = torch.randn(2, *shape, 32), tuple(n + 2 for n in shape)
    context = torch.randn(2, *source_shape, 11)
    y = layer(x, context=context)
    assert y.shape == x.shape
    mask = torch.rand(2, *source_shape) < 0.7
    junk = torch.where(mask[..., None], context, 50.0)
    masked = layer(x, context=context, mask=mask)
    close(layer(x, context=junk, mask=mask), masked, 1e-5)
    assert not torch.allclose(masked, y)
    target = (0, *[0] * len(shape))
    alone = layer(x[(slice(0, 1), *[slice(0, 1)] * len(shape))], context=context[:1])
    close(alone.flatten(), y[target].flatten(), 1e-5)  # targets do not see each other


def test_self_form_is_the_cross_form_on_itself(close):
    layer, x = LightNetAttention(32, 2), torch.randn(2, 4, 6, 32)
    close(layer(x, context=x), layer(x), 1e-6)


@pytest.mark.parametrize("options", [{}, {"window": 2}, {"forget": 0.5}], ids=str)
def test_causal_layer_on_a_grid_is_its_formula(dense, close, options):
    """Along the first axis, by frames of 6 tokens."""
    layer = LightNetAttention(12, 2, lrpe=None, **options).double()
    x = torch.randn(2, 4, 2, 3, 12, dtype=torch.float64)
    q, k, v = (p(x).flatten(1, 3).unflatten(-1, (2, 6)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    frame = torch.arange(24) // 6
    age = frame[:, None] - frame
    see = ((age >= 0) & (age < options.get("window", 9))).double()
    see = see * torch.exp(-options.get("forget", 0.0) * age.clamp(min=0).double())
    y = dense(q, k, v, see=see).reshape(x.shape)
    y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    gate = layer.gate[1](layer.gate[0](x)).sigmoid()
    close(layer(x, causal=True), layer.o_proj(y * gate), 1e-10)


def test_refusals_say_why():
    layer, x = LightNetAttention(32, 2), torch.randn(2, 9, 32)
    with pytest.raises(ValueError, match=r"context"):
        layer(x, context=x, causal=True)
    rotary = LightNetAttention(32, 2, lrpe="rotary")
    with pytest.raises(ValueError, match=r"rotary"):
        rotary(x, causal=True)
    with pytest.raises(ValueError, match=r"rotary"):
        rotary.advance(x[:, :1], rotary.init_state(2), 0)
    for window in (0, 1.5):
        with pytest.raises(ValueError, match=rf"window={window}: expected an int, 1 or more"):
            LightNetAttention(32, window=window)
    for radius in (0, 1.5):
        with pytest.raises(ValueError, match=rf"radius={radius}: expected an int >= 1"):
            LightNetAttention(32, dims=2, radius=radius)
    with pytest.raises(ValueError, match=r"forget=-1"):
        LightNetAttention(32, forget=-1)
    for options in ({"window": 2}, {"forget": 0.1}):
        with pytest.raises(ValueError, match=r"causal=False, and the layer has window"):
            LightNetAttention(32, 2, **options)(x)
    for forget in (-1, float("inf"), (0.1,), (0.1, float("nan"))):
        with pytest.raises(ValueError, match=r"forget="):
            LightNetAttention(32, 2, forget=forget)
    with pytest.raises(ValueError, match=r"heads=5"):
        LightNetAttention(32, 5)
    with pytest.raises(ValueError, match=r"impl"):
        LightNetAttention(32, impl="nonsense")(x)


def test_options():
    assert [LightNetAttention(d).heads for d in (32, 64, 128, 192, 384, 100)] == [1, 2, 4, 6, 12, 2]
    count = sum(p.numel() for p in LightNetAttention(128).parameters())
    assert count == 4 * 128**2 + 2 * 32 * 128 + 3 * 128


def test_axes_permute_together_without_position(close):
    layer, x = LightNetAttention(32, 2, lrpe=None), torch.randn(2, 2, 3, 4, 32)
    close(layer(x.permute(0, 3, 1, 2, 4)), layer(x).permute(0, 3, 1, 2, 4), 1e-5)
    p = torch.randperm(9)
    line = torch.randn(2, 9, 32)
    close(layer(line[:, p]), layer(line)[:, p], 1e-5)


@pytest.mark.parametrize("lrpe", ["cosine", None])
@pytest.mark.parametrize("options", [{}, {"window": 3}, {"window": 1}, {"forget": 0.3}, {"forget": 1e12}], ids=str)
@pytest.mark.parametrize("shape, chunk", [((70,), 1), ((70,), 9), ((5, 2, 3), 1), ((5, 2, 3), 2)])
def test_in_chunks_it_is_the_causal_forward(close, lrpe, options, shape, chunk):
    """From a State whose size stays; one token at a time by the form for it."""
    layer, x = LightNetAttention(32, 2, lrpe=lrpe, **options), torch.randn(2, *shape, 32)
    state, outputs, at = layer.init_state(2), [], 0
    sizes = [x.shape for x in state]
    for part in x.split(chunk, 1):
        y, state = layer.advance(part, state, at)
        outputs, at = [*outputs, y], at + part.shape[1]
    close(torch.cat(outputs, 1), layer(x, causal=True), 1e-5)
    assert [x.shape for x in state] == sizes


def test_samples_may_be_at_positions_of_their_own(close):
    layer, x = LightNetAttention(32, 2), torch.randn(2, 7, 3, 32)
    _, one = layer.advance(x[:1, :2], layer.init_state(1), 0)
    _, two = layer.advance(x[1:, :4], layer.init_state(1), 0)
    both = type(one)(*(torch.cat(pair) for pair in zip(one, two, strict=True)))
    later = torch.cat([x[:1, 2:5], x[1:, 4:7]])
    y, _ = layer.advance(later, both, torch.tensor([2, 4]))
    whole = layer(x, causal=True)
    close(y, torch.cat([whole[:1, 2:5], whole[1:, 4:7]]), 1e-5)


@pytest.mark.parametrize("cosine", [False, True])
def test_impl_reaches_the_functions(close, cosine):
    x, lrpe = torch.randn(2, 3, 3, 32), "cosine" if cosine else None
    for causal, more in ((False, {}), (True, {}), (True, {"window": 2, "forget": 0.1})):
        layer = LightNetAttention(32, lrpe=lrpe, **more)
        slow = LightNetAttention(32, lrpe=lrpe, **more, impl="reference")
        slow.load_state_dict(layer.state_dict())
        close(slow(x, causal=causal), layer(x, causal=causal), 1e-5)
