"""MultiheadAttention in the place of torch's."""

import inspect

import pytest
import torch
from torch import nn

from ndlightnet import MultiheadAttention
from ndlightnet.ops import causal_attention, global_attention, read, summarize

CAUSAL = nn.Transformer.generate_square_subsequent_mask(10)


def project(m, query, key, value):
    projected = m.q_proj(query), m.k_proj(key), m.v_proj(value)
    return [x.unflatten(-1, (m.num_heads, -1)) for x in projected]


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


@pytest.mark.parametrize("batch_first", [True, False])
def test_layouts(close, batch_first):
    m, x = MultiheadAttention(16, 4, batch_first=batch_first), torch.randn(3, 10, 16)
    q, k, v = project(m, x, x, x)
    expected = finish(m, x, global_attention(q, k, v))
    inputs = x if batch_first else x.transpose(0, 1)
    y, weights = m(inputs, inputs, inputs)
    close(y if batch_first else y.transpose(0, 1), expected, 1e-5)
    assert m(inputs, inputs, inputs, need_weights=False)[1] is None and weights.shape == (3, 10, 10)
    y, weights = m(x[0], x[0], x[0])
    close(y, expected[0], 1e-5)
    assert weights.shape == (10, 10)
    pad = padding()[1]
    masked, _ = m(x[1], x[1], x[1], key_padding_mask=pad)
    close(masked, finish(m, x[1:2], global_attention(q[1:2], k[1:2], v[1:2], mask=~pad[None]))[0], 1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_weights_times_values_is_the_attention(close, causal, masked):
    m, x = MultiheadAttention(16, 4, batch_first=True), torch.randn(3, 10, 16)
    pad = padding() if masked else None
    options = dict(key_padding_mask=pad, is_causal=causal, attn_mask=CAUSAL if causal else None)
    y, weights = m(x, x, x, average_attn_weights=False, **options)
    assert weights.shape == (3, 4, 10, 10)
    q, k, v = project(m, x, x, x)
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
    q, k, v = project(m, query, key, value)
    y, weights = m(query, key, value, key_padding_mask=padding())
    close(y, finish(m, query, read(q, summarize(k, v, mask=~padding()))), 1e-5)
    assert weights.shape == (3, 6, 10)


def test_float_and_bool_padding_agree(close):
    m, x = MultiheadAttention(16, 4, batch_first=True), torch.randn(3, 10, 16)
    pad = padding()
    expected = m(x, x, x, key_padding_mask=pad)[0]
    floats = torch.zeros(3, 10).masked_fill(pad, -torch.inf)
    close(m(x, x, x, key_padding_mask=floats)[0], expected, 1e-5)
    q, k, v = project(m, x, x, x)
    bias = torch.randn(3, 10)
    y = global_attention(q, k + bias[..., None, None], v)
    close(m(x, x, x, key_padding_mask=bias)[0], finish(m, x, y), 1e-5)


def test_the_causal_attn_mask_is_taken(close):
    m, x = MultiheadAttention(16, 4, batch_first=True), torch.randn(3, 10, 16)
    expected = finish(m, x, causal_attention(*project(m, x, x, x))[0])
    for mask in (CAUSAL, CAUSAL.isinf()):
        for is_causal in (False, True):
            close(m(x, x, x, attn_mask=mask, is_causal=is_causal)[0], expected, 1e-5)
    assert not torch.allclose(m(x, x, x)[0], expected)
    close(m(x, x, x, attn_mask=torch.zeros(10, 10))[0], m(x, x, x)[0], 1e-6)  # hides nothing


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


PAD, BAND = padding(), torch.ones(10, 10, dtype=torch.bool)
TORCH_REFUSES = [
    ({"key_padding_mask": PAD.long()}, r"key_padding_mask torch.int64: expected bool"),
    ({"attn_mask": torch.zeros(10, 10, dtype=torch.int32)}, r"attn_mask torch.int32: expected"),
    ({"is_causal": True}, r"attn_mask=None with is_causal=True: expected the causal mask"),
    ({"is_causal": True, "key_padding_mask": PAD}, r"attn_mask=None with is_causal=True"),
    ({"key_padding_mask": PAD[:, :9]}, r"key_padding_mask \(3, 9\): expected \(3, 10\)"),
    ({"key_padding_mask": PAD[:1]}, r"key_padding_mask \(1, 10\): expected \(3, 10\)"),
    ({"key_padding_mask": PAD[0].float()}, r"key_padding_mask \(10,\): expected \(3, 10\)"),
]
WE_REFUSE = [
    *(
        ({"attn_mask": mask}, r"attn_mask \(10, 10\): expected None")
        for mask in (BAND.triu(2), BAND.tril(-1), CAUSAL + 1)
    ),
    ({"attn_mask": BAND.tril(-1), "is_causal": True}, "attn_mask"),  # the flag does not excuse another mask
    ({"attn_mask": CAUSAL[:9, :9]}, r"attn_mask \(9, 9\)"),
    ({"attn_mask": CAUSAL.expand(12, 10, 10)}, r"attn_mask \(12, 10, 10\)"),
]


@pytest.mark.parametrize("options, message", TORCH_REFUSES + WE_REFUSE)
def test_refused_masks(options, message):
    x = torch.randn(3, 10, 16)
    if any(options is refused for refused, _ in TORCH_REFUSES):
        with pytest.raises((AssertionError, RuntimeError)):
            nn.MultiheadAttention(16, 4, batch_first=True)(x, x, x, **options)
    with pytest.raises(ValueError, match=message):
        MultiheadAttention(16, 4, batch_first=True)(x, x, x, **options)


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
@pytest.mark.parametrize("norm_first", [False, True])
def test_swapped_into_an_existing_encoder(close, norm_first, batch_first, kind):
    """As constructed, with torch's attention, it makes nested tensors of padding in eval."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=batch_first, norm_first=norm_first)
    encoder = swapped(nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first))
    assert encoder.use_nested_tensor == (batch_first and not norm_first)

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

    compiled = torch.compile(attend, fullgraph=True, backend="eager" if is_causal else "aot_eager")
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


X, KEY, NESTED = torch.zeros(1, 7, 16), torch.zeros(1, 7, 8), torch.nested.nested_tensor([torch.zeros(7, 16)])
SHAPES = [
    ((X[..., :8], KEY, X), {}, r"query \(1, 7, 8\): .* embed_dim=16"),
    ((X, X, X), {}, r"key \(1, 7, 16\): .* kdim=8"),
    ((X, KEY, KEY), {}, r"value \(1, 7, 8\): .* vdim=16"),
    ((X, KEY[0], X), {}, r"key \(7, 8\): expected 2 or 3 axes"),
    ((X, KEY, X[:, :5]), {}, r"value \(1, 5, 16\): expected the length and batch of key"),
    ((X.repeat(2, 1, 1), KEY, X), {}, r"key \(1, 7, 8\): expected the batch of query \(2, 7, 16\)"),
    ((X[0], KEY[0], X[0]), {"key_padding_mask": PAD[0, :6]}, r"key_padding_mask \(6,\): expected \(7,\)"),
    ((X, KEY[:, :6], X[:, :6]), {"attn_mask": CAUSAL[:7, :6], "is_causal": True}, r"attn_mask \(7, 6\)"),
    ((NESTED, KEY, X), {}, "query is a nested tensor: expected a padded one"),
]


@pytest.mark.parametrize("args, options, message", SHAPES)
def test_wrong_shapes(args, options, message):
    m = MultiheadAttention(16, 2, kdim=8, batch_first=True)
    m(X, KEY, X)
    with pytest.raises(ValueError, match=message):
        m(*args, **options)
