"""MultiheadAttention in the place of torch's."""

import inspect

import pytest
import torch
from torch import nn

from ndlightnet import MultiheadAttention
from ndlightnet.ops import causal_attention, global_attention, read, summarize


def parts(m, query, key, value):
    def heads(x):
        return x.unflatten(-1, (m.num_heads, -1))

    return heads(m.q_proj(query)), heads(m.k_proj(key)), heads(m.v_proj(value))


def finish(m, query, y):
    return m.out_proj(m.norm(y.flatten(2)) * m.gate(query).sigmoid())


def padding(batch=3, length=10):
    """True = padding, as in torch; the first sample is complete."""
    return torch.arange(length) >= torch.tensor([[length], [4], [7]])[:batch]


def test_signatures_are_torchs():
    for method in ("__init__", "forward"):
        ours, theirs = (
            inspect.signature(getattr(c, method)).parameters
            for c in (MultiheadAttention, nn.MultiheadAttention)
        )
        assert list(ours) == list(theirs)
        assert {n: p.default for n, p in ours.items()} == {n: p.default for n, p in theirs.items()}


def test_layouts(close):
    m = MultiheadAttention(16, 4, batch_first=True)
    x, expected = torch.randn(3, 10, 16), None
    q, k, v = parts(m, x, x, x)
    expected = finish(m, x, global_attention(q, k, v))
    y, weights = m(x, x, x)
    close(y, expected, 1e-5)
    assert m(x, x, x, need_weights=False)[1] is None and weights.shape == (3, 10, 10)
    second = MultiheadAttention(16, 4)
    second.load_state_dict(m.state_dict())
    t = x.transpose(0, 1)
    close(second(t, t, t)[0].transpose(0, 1), expected, 1e-5)
    for module in (m, second):
        y, weights = module(x[0], x[0], x[0])
        close(y, expected[0], 1e-5)
        assert weights.shape == (10, 10)
        pad = padding()[1]
        masked, _ = module(x[1], x[1], x[1], key_padding_mask=pad)
        close(
            masked,
            finish(m, x[1:2], global_attention(q[1:2], k[1:2], v[1:2], mask=~pad[None]))[0],
            1e-5,
        )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_weights_times_values_is_the_attention(close, causal, masked):
    m, x = MultiheadAttention(16, 4, batch_first=True), torch.randn(3, 10, 16)
    pad = padding() if masked else None
    options = dict(key_padding_mask=pad, is_causal=causal)
    y, weights = m(x, x, x, average_attn_weights=False, **options)
    assert weights.shape == (3, 4, 10, 10)
    q, k, v = parts(m, x, x, x)
    attended = torch.einsum("bhts,bshd->bthd", weights, v)
    mask = None if pad is None else ~pad
    direct = (
        causal_attention(q, k, v, mask=mask)[0] if causal else global_attention(q, k, v, mask=mask)
    )
    close(attended, direct, 1e-5)
    close(y, finish(m, x, attended), 1e-4)
    close(m(x, x, x, **options)[1], weights.mean(1), 1e-5)
    if causal:
        assert not weights.triu(1).any()
    if masked:
        assert not weights.movedim(-1, 1)[pad].any()


def test_cross_form_with_other_widths(close):
    m = MultiheadAttention(16, 4, kdim=7, vdim=5, bias=False, batch_first=True)
    assert m.k_proj.weight.shape == (16, 7) and m.v_proj.weight.shape == (16, 5)
    assert m.k_proj.bias is None
    query, key, value = torch.randn(3, 6, 16), torch.randn(3, 10, 7), torch.randn(3, 10, 5)
    q, k, v = parts(m, query, key, value)
    y, weights = m(query, key, value, key_padding_mask=padding())
    close(y, finish(m, query, read(q, summarize(k, v, mask=~padding()))), 1e-5)
    assert weights.shape == (3, 6, 10)


def test_float_and_bool_padding_agree(close):
    m, x = MultiheadAttention(16, 4, batch_first=True), torch.randn(3, 10, 16)
    pad = padding()
    expected = m(x, x, x, key_padding_mask=pad)[0]
    floats = torch.zeros(3, 10).masked_fill(pad, -torch.inf)
    close(m(x, x, x, key_padding_mask=floats)[0], expected, 1e-5)
    q, k, v = parts(m, x, x, x)
    bias = torch.randn(3, 10)
    y = global_attention(q, k + bias[..., None, None], v)
    close(m(x, x, x, key_padding_mask=bias)[0], finish(m, x, y), 1e-5)


def test_only_the_causal_attn_mask_is_taken(close):
    m, x = MultiheadAttention(16, 4, batch_first=True), torch.randn(3, 10, 16)
    floats = nn.Transformer.generate_square_subsequent_mask(10)
    expected = m(x, x, x, is_causal=True)[0]
    for mask in (floats, floats == -torch.inf):
        close(m(x, x, x, attn_mask=mask)[0], expected, 1e-6)
    assert not torch.allclose(m(x, x, x)[0], expected)
    close(m(x, x, x, attn_mask=torch.zeros(10, 10))[0], m(x, x, x)[0], 1e-6)  # hides nothing
    with pytest.raises(ValueError, match="attn_mask"):  # the flag does not excuse another mask
        m(x, x, x, attn_mask=torch.ones(10, 10, dtype=torch.bool).tril(-1), is_causal=True)
    band = torch.ones(10, 10, dtype=torch.bool)
    wrong = [
        band.triu(2),
        band.tril(-1),
        floats + 1,
        floats[:9, :9],
        floats.expand(12, 10, 10),
    ]
    for mask in wrong:
        with pytest.raises(ValueError, match=r"attn_mask"):
            m(x, x, x, attn_mask=mask)
    with pytest.raises(ValueError, match=r"9 keys"):
        m(x, x[:, :9], x[:, :9], is_causal=True)
    for option in ("add_bias_kv", "add_zero_attn"):
        with pytest.raises(ValueError, match=option):
            MultiheadAttention(16, 4, **{option: True})
    with pytest.raises(ValueError, match=r"num_heads=3"):
        MultiheadAttention(16, 3)


def encoder_layer(norm_first=False):
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, norm_first=norm_first)
    layer.self_attn = MultiheadAttention(16, 4, batch_first=True)
    return layer


@pytest.mark.parametrize("norm_first", [False, True])
def test_in_an_encoder_layer_eval_is_train(close, norm_first):
    """In eval and without gradients torch would take its own softmax path on our weights."""
    layer, x = encoder_layer(norm_first), torch.randn(3, 10, 16)
    for options in ({}, {"src_key_padding_mask": padding()}):
        train = layer.train()(x, **options)
        with torch.no_grad():
            close(layer.eval()(x, **options), train.detach(), 1e-5)
    zero, heads = torch.zeros_like, layer.self_attn
    with torch.no_grad():  # the mixer is in use: without it, the layer is another function
        heads.out_proj.weight.copy_(zero(heads.out_proj.weight))
        assert not torch.allclose(layer(x, **options), train)


@pytest.mark.parametrize("training", [True, False])
def test_in_an_encoder(close, training):
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False)
    encoder.train(training)
    x, pad = torch.randn(3, 10, 16), padding()
    with torch.no_grad():
        y = encoder(x, src_key_padding_mask=pad)
        junk = torch.where(pad[..., None], 9.0, x)
        close(encoder(junk, src_key_padding_mask=pad)[~pad], y[~pad], 1e-5)
        close(encoder(x[1:2, :4])[0], y[1, :4], 1e-5)
        mask = nn.Transformer.generate_square_subsequent_mask(10)
        causal = encoder(x, mask=mask, is_causal=True)
        close(encoder(x[:, :6], mask=mask[:6, :6], is_causal=True), causal[:, :6], 1e-5)
        close(encoder(x, mask=mask), causal, 1e-6)
