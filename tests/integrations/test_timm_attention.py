"""LightNet attention and mixers in timm's vision transformers."""

import copy
import inspect
import pickle

import pytest
import torch
from packaging.version import Version

timm = pytest.importorskip("timm")

from timm.models.vision_transformer import Attention as TimmAttention  # noqa: E402

from ndlightnet import mixers  # noqa: E402
from ndlightnet.integrations import replace_attention  # noqa: E402
from ndlightnet.integrations.timm_attention import Attention  # noqa: E402
from ndlightnet.layout import Grid  # noqa: E402

from .lightnet_by_hand import lightnet  # noqa: E402


def vit(**options):
    options = {"img_size": 32, "patch_size": 8, "num_classes": 5, "depth": 2, **options}
    return timm.create_model("vit_tiny_patch16_224", embed_dim=24, num_heads=3, **options).eval()


def test_a_vit_is_the_composition_of_its_parts(close):
    torch.manual_seed(0)
    net = vit().double()
    report = replace_attention(net)
    assert "LightNetAttention on a grid (4, 4) behind 1 token" in report.replaced["blocks.0.attn"]
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    tokens = net._pos_embed(net.patch_embed(x))
    for block in net.blocks:
        tokens = tokens + lightnet(block.attn.tokens.mixer, block.norm1(tokens), (4, 4), 1)
        tokens = tokens + block.mlp(block.norm2(tokens))
    expected = net.forward_head(net.norm(tokens))
    y = net(x)
    close(y, expected, 1e-10)
    pair = (torch.autograd.grad(z.square().sum(), list(net.parameters())) for z in (y, expected))
    for ours, theirs in zip(*pair, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-9)


@pytest.mark.parametrize(
    "options, grid, prefix",
    [
        ({"img_size": (32, 48)}, (4, 6), 1),
        ({"reg_tokens": 3}, (4, 4), 4),
        ({"class_token": False, "global_pool": "avg"}, (4, 4), 0),
    ],
)
def test_prefix_tokens_and_grids(close, options, grid, prefix):
    net = vit(**options)
    replace_attention(net)
    tokens = net.blocks[0].attn.tokens
    assert tokens.layout(prefix + grid[0] * grid[1]).shape == grid and tokens.prefix == prefix
    x = torch.randn(2, prefix + grid[0] * grid[1], 24)
    mask = torch.ones(2, x.shape[1], dtype=torch.bool)
    mask[0, -5:] = False
    close(tokens(x), lightnet(tokens.mixer, x, grid, prefix), 1e-5)
    close(tokens(x, mask), lightnet(tokens.mixer, x, grid, prefix, mask), 1e-5)


def test_the_grid_follows_the_network_and_its_copies():
    net = vit()
    replace_attention(net)
    twin = copy.deepcopy(net)
    net.set_input_size((48, 32))
    assert net(torch.randn(1, 3, 48, 32)).shape == (1, 5)
    assert twin(torch.randn(1, 3, 32, 32)).shape == (1, 5)
    again = pickle.loads(pickle.dumps(net))
    again.set_input_size((32, 32))
    assert again(torch.randn(1, 3, 32, 32)).shape == (1, 5)
    assert not any("patch_embed" in name for name in net.blocks.state_dict())


def test_a_grid_that_varies_is_not_taken():
    for options in ({"dynamic_img_size": True}, {"patch_drop_rate": 0.5}):
        net = vit(**options)
        assert "on a set of tokens" in replace_attention(net).replaced["blocks.0.attn"]
        assert net.blocks[0].attn.tokens.mixer.local_values is None
    net = vit(dynamic_img_size=True)
    replace_attention(net)
    assert net(torch.randn(1, 3, 40, 24)).shape == (1, 5)


def test_another_grid_than_the_networks_is_refused():
    for options in ({"grid": (3, 3)}, {"prefix": 2}):
        with pytest.raises(ValueError, match=r"has a grid \(4, 4\) and prefix 1, and grid="):
            replace_attention(vit(), **options)
    replace_attention(vit(), grid=(4, 4), prefix=1)


@pytest.mark.parametrize("name", ["GLA", "Mamba", "SoftmaxAttention", "LightNetAttention"])
def test_mixers(close, name):
    """LightNet takes the class token with the grid, all others a sequence of all tokens. Without a
    class token all run on the grid: the door `timm` of tests/doors."""
    net, x = vit(), torch.randn(2, 3, 32, 32)
    what = replace_attention(net, getattr(mixers, name)).replaced["blocks.0.attn"]
    near = name == "LightNetAttention"
    tokens = "a grid (4, 4) behind 1 token" if near else "the sequence of tokens"
    assert what == f"timm Attention -> {name} on {tokens}"
    net(x).square().sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    tokens = torch.randn(2, 17, 24)
    layer = net.blocks[0].attn
    if not near:
        close(layer(tokens), layer.tokens.mixer(tokens), 0)


def test_a_position_code_stands_still_on_prefix_tokens(close):
    """The paper's layer: the tokens in front have one position, and only their order does not matter."""
    layer = mixers.LightNetAttention(32, dims=2).double()
    x, grid = torch.randn(2, 2 + 12, 32, dtype=torch.float64), Grid((3, 4))
    y, (in_front, on_the_grid) = layer.mix(x, grid, None, False, 2), ([1, 0, *range(2, 14)], [*range(12), 13, 12])
    close(layer.mix(x[:, in_front], grid, None, False, 2), y[:, in_front], 1e-10)
    assert not torch.allclose(layer.mix(x[:, on_the_grid], grid, None, False, 2)[:, :2], y[:, :2])
    with pytest.raises(ValueError, match="prefix=2: expected causal=False and a Grid"):
        layer.mix(x, grid, None, True, 2)


def test_timms_own_constructor_and_call(close):
    net = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, attn_layer=Attention, qk_norm=True)
    assert type(net.blocks[0].attn) is Attention
    assert net(torch.randn(1, 3, 32, 32)).shape == (1, 1000)
    layer, x = Attention(24, 3, qkv_bias=True), torch.randn(2, 9, 24)
    mask = torch.arange(9) < torch.tensor([9, 4])[:, None]
    y = layer(x, attn_mask=mask[:, None, None])
    close(y[1, :4], layer(x[1:, :4])[0], 1e-5)
    causal = layer(x, is_causal=True)
    close(causal[:, :4], layer(x[:, :4], is_causal=True), 1e-5)
    with pytest.raises(ValueError, match=r"attn_mask \(9, 9\).*one memory for all queries"):
        layer(x, attn_mask=torch.ones(9, 9, dtype=torch.bool))
    with pytest.raises(ValueError, match="its heads have 48 channels"):
        Attention(24, 3, attn_head_dim=16)
    double = Attention(24, 3, proj_drop=1.0, dtype=torch.float64)
    assert (double(x.double()) == 0).all()


def test_timms_arguments():
    """In their order; a newer timm may have more."""
    known = Version(timm.__version__) <= Version("1.0.31")
    names, expected = ([*inspect.signature(layer).parameters] for layer in (Attention, TimmAttention))
    assert [n for n in names if n in expected] == [n for n in expected if known or n in names]
    with pytest.raises(ValueError, match=r"heads=5: expected a divisor of dim=12$"):
        Attention(12, 5)


def test_what_is_left_out_is_said_and_what_cannot_be_is_refused():
    net = vit(qk_norm=True, attn_drop_rate=0.1, proj_drop_rate=0.2)
    line = replace_attention(net).replaced["blocks.0.attn"]
    assert line.endswith("; without its attn_drop=0.1, q_norm, k_norm")
    assert net.blocks[0].attn.proj_drop.p == 0.2
    for name, reason in (
        ("swin_tiny_patch4_window7_224", "shifted windows hide different keys"),
        ("eva02_tiny_patch14_224", "its angles come from outside"),
        ("beit_base_patch16_224", "adds a bias to each pair"),
    ):
        with torch.device("meta"), pytest.raises(ValueError, match=reason):
            replace_attention(timm.create_model(name, **({} if "swin" in name else {"depth": 1})))


def test_start_from_weights(close):
    net = vit()
    old = copy.deepcopy(net.blocks[0].attn)
    assert isinstance(old, TimmAttention)
    report = replace_attention(net, start="weights")
    assert report.replaced["blocks.0.attn"].endswith(", starting from q, k, v, o")
    m = net.blocks[0].attn.tokens.mixer
    layers = [m.q_proj, m.k_proj, m.v_proj]
    close(torch.cat([layer.weight for layer in layers]), old.qkv.weight, 0)
    close(torch.cat([layer.bias for layer in layers]), old.qkv.bias, 0)
    close(m.o_proj.weight, old.proj.weight, 0)
    assert net.load_state_dict(net.state_dict())


@pytest.mark.slow
def test_a_swapped_network_in_one_graph(close):
    torch._dynamo.reset()
    net, x, more = vit(depth=1), torch.randn(2, 3, 32, 32), torch.randn(5, 3, 32, 32)
    replace_attention(net)
    with torch.no_grad():
        close(torch.compile(net, fullgraph=True, backend="aot_eager")(x), net(x), 1e-6)
        batch = torch.export.Dim.DYNAMIC
        exported = torch.export.export(net, (x,), dynamic_shapes={"x": {0: batch}}).module()
        close(exported(more), net(more), 1e-6)
