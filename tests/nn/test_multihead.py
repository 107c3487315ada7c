"""MultiheadAttention in the place of torch's."""

import inspect

import pytest
import torch
from torch import nn

from ndlightnet import MultiheadAttention
from ndlightnet.ops import causal_attention, global_attention, read, summarize

CAUSAL = nn.Transformer.generate_square_subsequent_mask(10)


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
            inspect.signature(getattr(c, method)).parameters for c in (MultiheadAttention, nn.MultiheadAttention)
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
        close(masked, finish(m, x[1:2], global_attention(q[1:2], k[1:2], v[1:2], mask=~pad[None]))[0], 1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_weights_times_values_is_the_attention(close, causal, masked):
    m, x = MultiheadAttention(16, 4, batch_first=True), torch.randn(3, 10, 16)
    pad = padding() if masked else None
    options = dict(key_padding_mask=pad, is_causal=causal, attn_mask=CAUSAL if causal else None)
    y, weights = m(x, x, x, average_attn_weights=False, **options)
    assert weights.shape == (3, 4, 10, 10)
    q, k, v = parts(m, x, x, x)
    attended = torch.einsum("bhts,bshd->bthd", weights, v)
    mask = None if pad is None else ~pad
    direct = causal_attention(q, k, v, mask=mask)[0] if causal else global_attention(q, k, v, mask=mask)
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
    floats = CAUSAL
    expected = finish(m, x, causal_attention(*parts(m, x, x, x))[0])
    for mask in (floats, floats == -torch.inf):
        for is_causal in (False, True):
            close(m(x, x, x, attn_mask=mask, is_causal=is_causal)[0], expected, 1e-5)
    assert not torch.allclose(m(x, x, x)[0], expected)
    close(m(x, x, x, attn_mask=torch.zeros(10, 10))[0], m(x, x, x)[0], 1e-6)  # hides nothing
    with pytest.raises(ValueError, match="attn_mask"):  # the flag does not excuse another mask
        m(x, x, x, attn_mask=torch.ones(10, 10, dtype=torch.bool).tril(-1), is_causal=True)
    band = torch.ones(10, 10, dtype=torch.bool)
    wrong = [band.triu(2), band.tril(-1), floats + 1, floats[:9, :9], floats.expand(12, 10, 10)]
    for mask in wrong:
        with pytest.raises(ValueError, match=r"attn_mask"):
            m(x, x, x, attn_mask=mask)
    with pytest.raises(ValueError, match=r"attn_mask \(10, 9\)"):
        m(x, x[:, :9], x[:, :9], attn_mask=floats[:, :9], is_causal=True)
    for option in ("add_bias_kv", "add_zero_attn"):
        with pytest.raises(ValueError, match=option):
            MultiheadAttention(16, 4, **{option: True})
    with pytest.raises(ValueError, match=r"num_heads=3"):
        MultiheadAttention(16, 3)


def test_padding_may_be_an_attn_mask_of_all_heads_and_queries(close):
    """(batch x heads, target, source), as pooling heads of transformers repeat it; with the least
    number in the place of -inf."""
    m, x = MultiheadAttention(16, 4, batch_first=True), torch.randn(3, 10, 16)
    pad = padding()
    hidden = pad[:, None].repeat_interleave(4, 0).expand(12, 2, 10)
    expected = m(x[:, :2], x, x, key_padding_mask=pad)[0]
    least = torch.zeros(12, 2, 10).masked_fill(hidden, torch.finfo(torch.float32).min)
    for mask in (hidden, least, least.masked_fill(hidden, -torch.inf)):
        close(m(x[:, :2], x, x, attn_mask=mask)[0], expected, 0)
        for bias in (torch.zeros(3, 10), torch.zeros(3, 10).bool()):
            both = {"attn_mask": mask, "key_padding_mask": bias}
            close(m(x[:, :2], x, x, **both)[0], expected, 0)
    one = hidden.clone()
    one[3, 1, 0] = True  # one query of one head
    for mask in (one, least - 1, hidden[:3]):
        with pytest.raises(ValueError, match=r"attn_mask \(.*, or padding"):
            m(x[:, :2], x, x, attn_mask=mask)


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


def test_masks_that_torch_refuses_are_refused_by_name():
    ours, x = MultiheadAttention(16, 4, batch_first=True), torch.randn(3, 10, 16)
    theirs, pad = nn.MultiheadAttention(16, 4, batch_first=True), padding()
    refused = [
        ({"key_padding_mask": pad.long()}, r"key_padding_mask torch.int64: expected bool"),
        ({"key_padding_mask": pad.byte()}, r"key_padding_mask torch.uint8: expected bool"),
        ({"attn_mask": torch.zeros(10, 10, dtype=torch.int32)}, r"attn_mask torch.int32: expected"),
        ({"is_causal": True}, r"attn_mask=None with is_causal=True: expected the causal mask"),
        ({"is_causal": True, "key_padding_mask": pad}, r"attn_mask=None with is_causal=True"),
        ({"key_padding_mask": pad[:, :9]}, r"key_padding_mask \(3, 9\): expected \(3, 10\)"),
        ({"key_padding_mask": pad[:1]}, r"key_padding_mask \(1, 10\): expected \(3, 10\)"),
        ({"key_padding_mask": pad[0].float()}, r"key_padding_mask \(10,\): expected \(3, 10\)"),
    ]
    for options, message in refused:
        with pytest.raises((AssertionError, RuntimeError)):
            theirs(x, x, x, **options)
        with pytest.raises(ValueError, match=message):
            ours(x, x, x, **options)
    with pytest.raises(ValueError, match=r"key_padding_mask \(9,\): expected \(10,\)"):
        ours(x[0], x[0], x[0], key_padding_mask=pad[0, :9])
    nested = torch.nested.nested_tensor([x[0], x[1, :4]])
    with pytest.raises(ValueError, match=r"query is a nested tensor: expected a padded one"):
        ours(nested, nested, nested, need_weights=False)


def swapped(module):
    """torch's attentions of an existing module replaced by ours, as its user would."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.MultiheadAttention):
                ours = MultiheadAttention(
                    child.embed_dim, child.num_heads, child.dropout, batch_first=child.batch_first
                )
                setattr(parent, name, ours)
    return module


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize("batch_first", [True, False])
def test_swapped_into_an_existing_encoder(close, batch_first, kind):
    """As constructed, with torch's attention, it makes nested tensors of padding in eval."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=batch_first)
    encoder = swapped(nn.TransformerEncoder(layer, 2))
    assert encoder.use_nested_tensor == batch_first

    def lay(x):
        return x if batch_first else x.transpose(0, 1)

    x, pad = torch.randn(3, 10, 16), padding()
    mask = torch.zeros(3, 10).masked_fill(pad, -torch.inf) if kind.is_floating_point else pad
    options = {"src_key_padding_mask": mask}
    train = lay(encoder.train()(lay(x), **options)).detach()
    encoder.eval()
    close(lay(encoder(lay(x), **options)), train, 1e-6)  # also where weights ask for gradients
    with torch.no_grad():
        close(lay(encoder(lay(x), **options)), train, 1e-6)
        for number, length in enumerate((10, 4, 7)):  # each sample gets what it gets alone
            close(encoder(x[number, :length]), train[number, :length], 1e-5)
        causal = CAUSAL if kind.is_floating_point else CAUSAL.isinf()
        both = lay(encoder(lay(x), mask=causal, **options))
        close(both[1, :4], encoder(x[1, :4], mask=causal[:4, :4]), 1e-5)
        assert not torch.allclose(both, train, atol=1e-2)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize("batch_first", [True, False])
def test_swapped_into_a_decoder_layer(close, batch_first, kind):
    layer = swapped(nn.TransformerDecoderLayer(16, 4, 32, 0.0, batch_first=batch_first)).eval()

    def lay(x):
        return x if batch_first else x.transpose(0, 1)

    def typed(mask):
        return torch.zeros(mask.shape).masked_fill(mask, -torch.inf) if floats else mask

    x, memory = torch.randn(3, 10, 16), torch.randn(3, 8, 16)
    floats, pad, memory_pad = kind.is_floating_point, padding(), padding()[:, :8]
    causal = typed(CAUSAL.isinf())
    with torch.no_grad():
        y = layer(
            lay(x),
            lay(memory),
            tgt_mask=causal,
            memory_mask=typed(torch.zeros(10, 8).bool()),
            tgt_key_padding_mask=typed(pad),
            memory_key_padding_mask=typed(memory_pad),
        )
        for number, (length, source) in enumerate(((10, 8), (4, 4), (7, 7))):
            alone = layer(x[number, :length], memory[number, :source], tgt_mask=causal[:length, :length])
            close(lay(y)[number, :length], alone, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
def test_masks_in_a_graph_without_breaks(close, is_causal):
    """Values cannot be branched on there: what the mask is is seen, and asserted, as it runs."""
    torch._dynamo.reset()
    m, x = MultiheadAttention(16, 4, batch_first=True), torch.randn(3, 10, 16, requires_grad=True)

    def attend(mask):
        return m(x, x, x, attn_mask=mask, is_causal=is_causal, need_weights=False)[0]

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    masks = [CAUSAL, CAUSAL.isinf()]
    for mask in masks if is_causal else [*masks, torch.zeros(10, 10)]:
        pair = compiled(mask), attend(mask)
        close(*pair, 1e-6)
        close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in pair), 1e-5)
    for wrong in (CAUSAL.T, CAUSAL + 1, CAUSAL - torch.inf):
        with pytest.raises(ValueError, match=r"attn_mask \(10, 10\): expected None or the causal"):
            attend(wrong)
        with pytest.raises(RuntimeError, match=r"attn_mask: expected None or the causal mask"):
            compiled(wrong)


def test_wrong_shapes_are_named():
    m, x = MultiheadAttention(16, 2, kdim=8, batch_first=True), torch.randn(1, 7, 16)
    key = torch.randn(1, 7, 8)
    m(x, key, x)
    for args, message in [
        ((x[..., :8], key, x), r"query \(1, 7, 8\): .* embed_dim=16"),
        ((x, x, x), r"key \(1, 7, 16\): .* kdim=8"),
        ((x, key, key), r"value \(1, 7, 8\): .* vdim=16"),
        ((x, key[0], x), r"key \(7, 8\): expected 2 or 3 axes"),
        ((x, key, x[:, :5]), r"value \(1, 5, 16\): expected the length and batch of key"),
        ((x.repeat(2, 1, 1), key, x), r"key \(1, 7, 8\): expected the batch of query \(2, 7, 16\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            m(*args)
    with pytest.raises(ValueError, match="kdim=0"):
        MultiheadAttention(16, 2, kdim=0)
