"""LightNet attention in MONAI's networks; other mixers are the door `monai` of tests/doors."""

import copy
import inspect

import pytest
import torch
from packaging.version import Version
from torch import nn

pytest.importorskip("monai")

import monai
from monai.networks.blocks import CrossAttentionBlock as MonaiCross
from monai.networks.blocks import SABlock as MonaiSABlock
from monai.networks.blocks import TransformerBlock
from monai.networks.nets import UNETR, AutoencoderKL, SwinUNETR, ViT, ViTAutoEnc

from ndlightnet import mixers
from ndlightnet.integrations import replace_attention
from ndlightnet.integrations.monai_attention import CrossAttentionBlock, SABlock

from .lightnet_by_hand import lightnet

PADDED = torch.arange(9) < torch.tensor([9, 4])[:, None]


def unetr(size=32, **options):
    return UNETR(1, 2, size, 4, 24, 32, 3, **options)


def swin():
    return SwinUNETR(1, 2, feature_size=12, depths=(2, 1, 1, 1), spatial_dims=2).eval()


def test_unetr_is_the_composition_of_its_parts(close):
    torch.manual_seed(0)
    net = unetr((32, 48, 16)).double()
    report = replace_attention(net)
    assert len(report.replaced) == 12 and not report.left
    assert "LightNetAttention on a grid (2, 3, 1)" in report.replaced["vit.blocks.0.attn"]
    x = torch.randn(1, 1, 32, 48, 16, dtype=torch.float64)
    tokens, hidden = net.vit.patch_embedding(x), []
    for block in net.vit.blocks:
        tokens = tokens + lightnet(block.attn.tokens.mixer, block.norm1(tokens), (2, 3, 1))
        tokens = tokens + block.mlp(block.norm2(tokens))
        hidden.append(tokens)
    features, blocks = net.vit(x)
    for a, b in zip([features, *blocks], [net.vit.norm(tokens), *hidden], strict=True):
        close(a, b, 1e-10)
    y = net(x)
    y.square().mean().backward()
    assert y.shape == (1, 2, 32, 48, 16)
    assert all(p.grad is not None for b in net.vit.blocks for p in b.attn.parameters())


def test_whole_swin_blocks(close):
    """Both of a pair: the second one's windows were shifted."""
    net = swin()
    with pytest.raises(ValueError, match=r"found nothing to replace.*not selected by where"):
        replace_attention(net, where="*.attn")  # windows alone
    old = copy.deepcopy(net)
    report = replace_attention(net)
    assert len(report.replaced) == 5 and not report.left
    assert report.replaced["swinViT.layers1.0.blocks.1"].endswith("whole grid, without windows")
    for now, before in zip(net.swinViT.layers1[0].blocks, old.swinViT.layers1[0].blocks, strict=True):
        close(now.mlp.linear1.weight, before.mlp.linear1.weight, 0)  # norms and MLP stay
        x = torch.randn(2, 9, 10, 12)
        mixed = x + lightnet(now.attn, now.norm1(x).flatten(1, 2), (9, 10)).view_as(x)
        close(now(x, torch.full((4, 49, 49), -100.0)), mixed + now.mlp(now.norm2(mixed)), 1e-5)
    assert [max(block.shift_size) for block in old.swinViT.layers1[0].blocks] == [0, 3]
    net(torch.randn(1, 1, 64, 96)).sum().backward()
    for name, parameter in net.swinViT.layers1.named_parameters():
        assert parameter.grad is not None, name
    with pytest.raises(ValueError, match="found nothing to replace in monai SwinUNETR: it has ndlightnet's attention"):
        replace_attention(net)


def test_networks_that_know_their_grid_and_those_that_do_not():
    net = ViTAutoEnc(1, (32, 64), (16, 16), hidden_size=24, mlp_dim=32, num_layers=1, num_heads=3, spatial_dims=2)
    assert "on a grid (2, 4)" in str(replace_attention(net))

    def vit():
        return ViT(1, (32, 64), 16, 24, 32, 1, 3, classification=True, spatial_dims=2)

    assert "on a set of tokens" in str(replace_attention(vit()))
    net = vit()
    assert "a grid (2, 4) behind 1 token" in str(replace_attention(net, grid=(2, 4)))
    assert net(torch.randn(1, 1, 32, 64))[0].shape == (1, 2)


@pytest.mark.parametrize("options", [{"grid": (3, 3, 3)}, {"prefix": 1}])
def test_another_grid_than_the_networks_is_refused(options):
    with pytest.raises(ValueError, match=r"its network has a grid \(2, 2, 2\) and prefix 0, and grid="):
        replace_attention(unetr(), **options)
    assert len(replace_attention(unetr(), grid=[2, 2, 2]).replaced) == 12


def test_spatial_attention_of_a_diffusion_autoencoder(close):
    sizes = {"channels": (8, 8), "num_res_blocks": (1, 1), "norm_num_groups": 4, "latent_channels": 3}
    net = AutoencoderKL(2, 1, 1, attention_levels=(False, True), **sizes)
    report = replace_attention(net, start="weights")
    assert len(report.replaced) == 4
    block = net.encoder.blocks[4]
    x = torch.randn(2, 8, 5, 6)
    tokens = block.norm(x).flatten(2).transpose(1, 2)
    mixed = lightnet(block.attn, tokens, (5, 6)).transpose(1, 2).view(2, 8, 5, 6)
    close(block(x), x + mixed, 1e-5)
    assert net(torch.randn(1, 1, 20, 12))[0].shape == (1, 1, 20, 12)


def test_monais_own_constructor_and_call(close):
    layer, x = SABlock(24, 3, qkv_bias=True, dropout_rate=0.0), torch.randn(2, 9, 24)
    y = layer(x, attn_mask=PADDED)
    close(y[1, :4], layer(x[1:, :4])[0], 1e-5)
    close(layer(x, attn_mask=PADDED.float()), y, 0)
    close(y, lightnet(layer.tokens.mixer, x, mask=PADDED), 1e-5)
    causal = SABlock(24, 3, causal=True)
    close(causal(x)[:, :4], causal(x[:, :4]), 1e-5)
    cross, source = CrossAttentionBlock(24, 3, context_input_size=10), torch.randn(2, 5, 10)
    order = torch.randperm(5)
    close(cross(x, source[:, order]), cross(x, source), 1e-5)
    with pytest.raises(ValueError, match=r"attn_mask \(2, 8\)|expected bool \(2, 1, 1, 9\)"):
        layer(x, attn_mask=PADDED[:, :8])
    for options, reason in (
        ({"save_attn": True}, "save_attn=True"),
        ({"include_fc": False}, "include_fc=False"),
        ({"dim_head": 16}, "its heads have 48 channels"),
        ({"rel_pos_embedding": "decomposed", "input_size": (3, 3)}, "rel_pos_embedding adds"),
    ):
        with pytest.raises(ValueError, match=reason):
            SABlock(24, 3, **options)
        net = nn.Sequential(MonaiSABlock(24, 3, **options))
        with pytest.raises(ValueError, match=reason):
            replace_attention(net)
    with pytest.raises(ValueError, match="causal=True, and a source is read as a whole"):
        CrossAttentionBlock(24, 3, causal=True, sequence_length=9)


@pytest.mark.parametrize("ours, theirs", [(SABlock, MonaiSABlock), (CrossAttentionBlock, MonaiCross)])
def test_monais_arguments(ours, theirs):
    """In their order; a newer MONAI may have more."""
    known = Version(monai.__version__) <= Version("1.6.1")
    names, expected = ([*inspect.signature(layer).parameters] for layer in (ours, theirs))
    assert [n for n in names if n in expected] == [n for n in expected if known or n in names]
    with pytest.raises(ValueError, match=r"heads=5: expected a divisor of dim=12$"):
        ours(12, 5)
    with pytest.raises(ValueError, match=r"between 0 and 1, but got 2\.0$"):
        ours(12, 3, dropout_rate=2.0)


def test_start_from_weights_and_cross_attention(close):
    block = TransformerBlock(24, 32, 3, 0.1, with_cross_attention=True, use_combined_linear=False)
    net = nn.ModuleDict({"a": block})
    old = copy.deepcopy(block)
    report = replace_attention(net, start="weights")
    for what in report.replaced.values():
        assert what.endswith("from q, k, v, o; without its dropout of attention weights")
    for now, before in ((block.attn, old.attn), (block.cross_attn, old.cross_attn)):
        close(now.tokens.mixer.k_proj.weight, before.to_k.weight, 0)
        close(now.tokens.mixer.o_proj.bias, before.out_proj.bias, 0)
        assert now.drop_output.p == 0.1
    assert isinstance(old.cross_attn, MonaiCross)
    y = block(torch.randn(2, 9, 24), torch.randn(2, 5, 24), PADDED)
    y.sum().backward()
    assert all(p.grad is not None for p in block.parameters())
    net = nn.ModuleDict({"a": old})
    report = replace_attention(net, mixers.Mamba)
    assert report.left["a.cross_attn"].endswith("it reads another source, and Mamba cannot")
