"""replace_attention: what is selected, reported, refused; torch's transformers."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from ndlightnet import MultiheadAttention, mixers
from ndlightnet.integrations import replace, replace_attention
from ndlightnet.integrations.tokens import TokenMixer

CAUSAL = nn.Transformer.generate_square_subsequent_mask(10)


def encoder(layers=2, **options):
    options = {"dropout": 0.0, "batch_first": True, **options}
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, **options), layers)


def padding():
    """Samples of 10, 4 and 7 tokens, True where there is padding."""
    return torch.arange(10) >= torch.tensor([10, 4, 7])[:, None]


class SoftAttention(nn.Module):
    """A layer that no library's file knows."""

    def __init__(self):
        super().__init__()
        self.attention = nn.Linear(16, 16)

    def forward(self, x):
        return self.attention(x)


def test_all_are_replaced_and_reported():
    net = nn.Sequential(encoder(), SoftAttention())
    report = replace_attention(net)
    assert list(report.replaced) == ["0.layers.0.self_attn", "0.layers.1.self_attn"]
    assert type(net[0].layers[0].self_attn) is MultiheadAttention
    assert str(report).splitlines() == [
        "replaced: 2",
        "  0.layers.0.self_attn: torch MultiheadAttention -> MultiheadAttention",
        "  0.layers.1.self_attn: torch MultiheadAttention -> MultiheadAttention",
        "left: 1",
        f"  1: {report.left['1']}",
    ]
    assert "SoftAttention, not a layer that replace_attention knows" in report.left["1"]
    with pytest.raises(ValueError, match=r"torch Sequential: .*knows, it has ndlightnet's attention already$"):
        replace_attention(net)
    net = encoder(1)
    replace_attention(net, mixers.GLA)
    with pytest.raises(ValueError, match=r"TransformerEncoder: it has ndlightnet's attention already"):
        replace_attention(net)


@pytest.mark.parametrize("where", ["layers.1.*", lambda name, module: "1" in name])
def test_where_selects(where):
    net = encoder()
    report = replace_attention(net, where=where)
    assert list(report.replaced) == ["layers.1.self_attn"]
    assert "not selected" in report.left["layers.0.self_attn"]
    assert type(net.layers[0].self_attn) is nn.MultiheadAttention


def test_nothing_is_half_replaced():
    net = nn.Sequential(encoder(), nn.MultiheadAttention(16, 4, add_bias_kv=True))
    before = [type(m) for m in net.modules()]
    with pytest.raises(ValueError, match=r"1 is a torch MultiheadAttention and stays: add_bias_kv"):
        replace_attention(net, where="*")
    assert [type(m) for m in net.modules()] == before
    assert "add_bias_kv" in replace_attention(net).left["1"]


TALKING = type("TalkingHeadAttn", (nn.Linear,), {})  # timm's name, as in Cait


@pytest.mark.parametrize(
    "net, options, message",
    [
        (encoder(), {"start": "old"}, "start='old': expected 'fresh' or 'weights'"),
        (encoder(), {"mixer": nn.Linear(4, 4)}, r"mixer=Linear\(...\): expected a name such as 'GLA'"),
        (encoder(), {"mixer": "GLB"}, "mixer='GLB': did you mean 'GLA'"),
        (encoder(), {"mixer": nn.Identity}, "mixer: makes a Identity, expected a Mixer"),
        (encoder(), {"where": 3}, "where=3: expected a glob pattern or a function"),
        (encoder(), {"where": "decoder.*"}, "found nothing to replace.*not selected by where='decoder"),
        (encoder(), {"mixer": mixers.Identity, "start": "weights"}, "start='weights': Identity has no proj"),
        (nn.Linear(3, 3), {}, r"model: found nothing.*no attention layers"),
        (nn.Sequential(TALKING(3, 3)), {}, r"nothing to replace.* TalkingHeadAttn, not a layer that"),
        (nn.MultiheadAttention(16, 4), {}, "model is a torch MultiheadAttention itself"),
    ],
)
def test_what_cannot_be_done_is_named(net, options, message):
    with pytest.raises(ValueError, match=message):
        replace_attention(net, **options)


def test_a_mixer_by_name_in_a_layer_at_two_names():
    shared = nn.MultiheadAttention(16, 4, batch_first=True)
    net = nn.ModuleDict({"a": shared, "b": shared})
    report = replace_attention(net, {"GLA": {"scan": "raster"}})
    assert "-> GLA on the sequence" in report.replaced["a"] and net["a"].mixer.mixer.scan == "raster"
    assert net["a"] is net["b"] and "shared with a" in report.replaced["b"]


def test_dtype_and_mode_are_those_of_the_old_layer():
    net = encoder().double().eval()
    replace_attention(net, mixers.GLA)
    assert {p.dtype for p in net.parameters()} == {torch.float64}
    assert not any(m.training for m in net.modules())
    assert net(torch.randn(2, 5, 16, dtype=torch.float64)).dtype == torch.float64
    with torch.device("meta"):
        net = encoder()
    replace_attention(net)
    assert {p.device.type for p in net.parameters()} == {"meta"}


@pytest.mark.parametrize("kdim", [16, 12])
def test_start_from_weights_of_torch(close, kdim):
    old = nn.MultiheadAttention(16, 4, batch_first=True, kdim=kdim, vdim=kdim)
    nn.init.normal_(old.in_proj_bias)
    net = nn.ModuleDict({"a": old})
    report = replace_attention(net, start="weights")
    assert report.replaced["a"].endswith("MultiheadAttention, starting from q, k, v, o")
    new = net["a"]
    q, k, v = old.in_proj_weight.chunk(3) if kdim == 16 else (old.q_proj_weight, old.k_proj_weight, old.v_proj_weight)
    weights = {new.q_proj: q, new.k_proj: k, new.v_proj: v, new.out_proj: old.out_proj.weight}
    for projection, weight in weights.items():
        close(projection.weight.data, weight.data, 0)
    close(new.v_proj.bias.data, old.in_proj_bias[32:].data, 0)
    assert new.q_proj.weight.data_ptr() != q.data_ptr()


def test_softmax_attention_from_weights_is_the_old_layer(close):
    """The one mixer with the old function: the start carries over exactly."""
    same = partial(mixers.SoftmaxAttention, heads=4, rotary=False)
    net = nn.Transformer(16, 4, 1, 1, 32, 0.0, batch_first=True).eval()
    for module in net.modules():  # SoftmaxAttention has no biases
        if isinstance(module, nn.MultiheadAttention):
            nn.init.zeros_(module.in_proj_bias)
            nn.init.zeros_(module.out_proj.bias)
    old, x, y = copy.deepcopy(net), torch.randn(3, 10, 16), torch.randn(3, 10, 16)
    report = replace_attention(net, same, start="weights")
    assert len(report.replaced) == 3
    pad = padding()
    masks = {"src_key_padding_mask": pad, "memory_key_padding_mask": pad, "tgt_mask": CAUSAL}
    for options in ({}, masks, {"tgt_is_causal": True, **masks}):
        close(net(x, y, **options), old(x, y, **options), 1e-5)


@pytest.mark.parametrize("mixer", [None, mixers.GLA, mixers.LightNetAttention])
@pytest.mark.parametrize("batch_first", [True, False])
def test_an_existing_encoder_in_eval_is_the_one_in_train(close, mixer, batch_first):
    """Also with padding, where torch's own fast path makes nested tensors."""
    net = encoder(batch_first=batch_first)
    replace_attention(net, mixer)

    def lay(x):
        return x if batch_first else x.transpose(0, 1)

    x, pad = torch.randn(3, 10, 16), padding()
    for mask in (None, CAUSAL if mixer is None else CAUSAL.isinf()):
        options = {"src_key_padding_mask": pad, "mask": mask}
        train = lay(net.train()(lay(x), **options)).detach()
        with torch.no_grad():
            close(lay(net.eval()(lay(x), **options)), train, 1e-6)
            junk = torch.where(pad[..., None], 9.0, x)
            close(lay(net(lay(junk), **options))[~pad], train[~pad], 1e-5)
            for number, length in enumerate((10, 4, 7)):
                short = None if mask is None else mask[:length, :length]
                alone = net(x[number, :length], mask=short)
                close(alone, train[number, :length], 1e-5)


def test_a_mixer_with_torchs_call():
    net = nn.ModuleDict({"a": nn.MultiheadAttention(16, 4, batch_first=True, dropout=0.1)})
    assert "without its dropout of attention weights" in str(replace_attention(net, mixers.GLA))
    layer, x = net["a"], torch.randn(3, 10, 16)
    y, weights = layer(x, x, x)
    assert weights is None and y.shape == x.shape
    for value, masks, message in (
        (x + 1, {}, "key and value differ"),
        (x, {"attn_mask": CAUSAL.T}, r"attn_mask \(10, 10\): expected None or the causal"),
        (x, {"key_padding_mask": torch.randn(3, 10)}, r"key_padding_mask \(3, 10\): expected bool, or 0 and"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(x, x, value, **masks)
    floats = torch.zeros(3, 10).masked_fill(padding(), -torch.inf)
    assert layer(x, x, x, key_padding_mask=floats)[0].equal(layer(x, x, x, key_padding_mask=padding())[0])
    net = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32), 1)
    report = replace_attention(net, mixers.Mamba)
    assert report.left["layers.0.multihead_attn"].endswith("another source, and Mamba cannot")


CROSS = "LightNetAttention"  # has a cross form, without neighbours: another function than its own


@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("mixer", ["Mamba", CROSS])
def test_equal_tensors_are_one_source_whatever_object_holds_them(close, mixer, compiling, monkeypatch):
    """Copies, as autocast, checkpoints and graphs make them; a graph compares the tensors when it runs."""
    net = nn.ModuleDict({"a": nn.MultiheadAttention(16, 4, batch_first=True)})
    replace_attention(net, mixer)
    layer, x, y = net["a"], torch.randn(3, 10, 16), torch.randn(3, 10, 16)
    padded, causal = {"key_padding_mask": padding()}, {"attn_mask": CAUSAL, "is_causal": True}
    masks = ({}, padded, causal, {**padded, **causal})
    expected = [layer(x, x, x, **options)[0] for options in masks]
    error = RuntimeError if compiling else ValueError
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    for options, alone in zip(masks, expected, strict=True):
        close(layer(x, x.clone(), x.clone(), **options)[0], alone, 1e-6)
    with pytest.raises(error, match="key and value differ"):
        layer(x, y, x)
    if mixer == "Mamba":
        with pytest.raises(error, match="key differs from query, and Mamba reads query"):
            layer(x, y, y)
    else:
        close(layer(x, y, y)[0], layer.mixer(x, context=y), 1e-6)
        with pytest.raises(error, match="attn_mask is causal and key differs from query"):
            layer(x, y, y, **causal)
    if not compiling:
        x[0, 0, 0] = torch.nan
        assert layer(x, x.clone(), x.clone())[0].isnan().any()


def test_the_layer_of_a_decoder_that_reads_another_source_always_does(close):
    net = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, 0.0, batch_first=True), 1)
    replace_attention(net, CROSS)
    layer, x = net.layers[0].multihead_attn, torch.randn(3, 10, 16)
    for source in (x, x.clone()):
        close(layer(x, source, source)[0], layer.mixer(x, context=x), 0)


@pytest.mark.slow
def test_copies_in_one_graph_are_one_source(close):
    net = nn.ModuleDict({"a": nn.MultiheadAttention(16, 4, batch_first=True)})
    replace_attention(net, CROSS)
    layer, x = net["a"], torch.randn(3, 10, 16)

    @torch.compile(fullgraph=True, backend="eager")
    def run(x):
        return layer(x, x.clone(), x.clone(), attn_mask=CAUSAL, need_weights=False)[0]

    close(run(x), layer(x, x, x, attn_mask=CAUSAL)[0], 1e-6)


def test_a_grid_given_by_the_caller(close):
    net = encoder(1)
    report = replace_attention(net, grid=(3, 3), prefix=1)
    assert "LightNetAttention on a grid (3, 3) behind 1 token" in str(report)
    assert net(torch.randn(2, 10, 16)).shape == (2, 10, 16)
    with pytest.raises(ValueError, match=r"12 tokens: expected 10, a grid \(3, 3\) behind 1"):
        net(torch.randn(2, 12, 16))
    with pytest.raises(ValueError, match=r"causal=True: .* a grid \(3, 3\)"):
        net(torch.randn(2, 10, 16), mask=CAUSAL)


def test_tokens_in_an_order_have_neighbours():
    """The set of tokens of another network may be permuted; a sequence may not."""
    x, order = torch.randn(2, 6, 16), torch.randperm(6)
    for sequence in (False, True):
        layer = TokenMixer(16, 4, sequence=sequence)
        same = torch.allclose(layer(x[:, order]), layer(x)[:, order], atol=1e-5)
        assert same is not sequence
    layer = TokenMixer(16, 4, causal=True)
    y = layer(x, causal=True)
    assert torch.allclose(y[:, :4], layer(x[:, :4], causal=True), atol=1e-6)


@pytest.mark.parametrize("mixer", [None, "GLA", "LightNetAttention"])
def test_initial_values_can_be_drawn_again(mixer):
    torch.manual_seed(3)
    layer = TokenMixer(16, 4, mixer, grid=(2, 3))
    values = {name: value.clone() for name, value in layer.state_dict().items()}
    layer.to_empty(device="cpu")
    torch.manual_seed(3)
    layer.reset_parameters()
    for name, value in layer.state_dict().items():
        assert value.equal(values[name]), name


def test_layers_that_stay_keep_their_dtypes_and_modes():
    """Only what is new is moved: a layer may keep parts of the old one."""

    class Old(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.norm = nn.Linear(4, 4, dtype=torch.bfloat16), nn.LayerNorm(4)

    old = Old()
    old.norm.eval()
    new = nn.Sequential(old, nn.Linear(4, 4))
    assert replace._like(new, old) is new
    assert old.norm.weight.dtype == torch.float32 and not old.norm.training
    assert new[1].weight.dtype == torch.bfloat16 and new[1].training
