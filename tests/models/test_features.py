"""Features of inner blocks, pruning, layer groups, other patches and channels, on any axes."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from ndlightnet import NDLightNet, NDLightUNet, Packed
from ndlightnet.models.weights import adapt_in_chans

SIZES = {1: (23,), 2: (13, 9), 3: (5, 6, 7), 4: (3, 4, 3, 5)}
tiny = partial(NDLightNet, in_chans=2, num_classes=5, embed_dim=32, depth=3, tpe_states=4)
every_dims = pytest.mark.parametrize("dims", SIZES)


def by_hand(net, x, mask=None):
    """The features after each block, channels last, seen by hooks."""
    outputs = []
    hooks = [b.register_forward_hook(lambda _, __, y: outputs.append(y)) for b in net.blocks]
    features = net.forward_features(x, mask)
    for hook in hooks:
        hook.remove()
    return features, [y.view(features.shape) for y in outputs]


@every_dims
@pytest.mark.parametrize("causal", [False, True])
def test_intermediates_are_what_the_blocks_return(dims, causal):
    net, x = tiny(dims, patch_size=2, causal=causal).eval(), torch.randn(2, 2, *SIZES[dims])
    mask = torch.rand(2, *SIZES[dims]) < 0.7
    for m in (None, mask):
        expected, blocks = by_hand(net, x, m)
        features, maps = net.forward_intermediates(x, mask=m)
        assert torch.equal(features, expected) and len(maps) == 3
        for y, block in zip(maps, blocks, strict=True):
            assert torch.equal(y, block.movedim(-1, 1)) and y.is_contiguous()
        maps = net.forward_intermediates(x, [-1, 0], norm=True, output_fmt="NHWC", intermediates_only=True, mask=m)
        assert len(maps) == 2 and torch.equal(maps[0], net.norm(blocks[0]))
        assert torch.equal(maps[1], expected)
        (rows,) = net.get_intermediate_layers(x, [1], mask=m)
        assert torch.equal(rows, blocks[1].flatten(1, -2))
        last = net.get_intermediate_layers(x, 2, reshape=True, norm=True, mask=m)
        assert torch.equal(last[1], expected.movedim(-1, 1)) and len(last) == 2


def test_stopping_early_runs_no_later_block():
    net, x = tiny(2, patch_size=2).eval(), torch.randn(2, 2, 13, 9)
    _, blocks = by_hand(net, x)
    net.blocks[2].forward = None
    features, (first, second) = net.forward_intermediates(x, [0, 1], stop_early=True)
    assert torch.equal(first, blocks[0].movedim(-1, 1))
    assert torch.equal(second, blocks[1].movedim(-1, 1))
    assert torch.equal(features, net.norm(blocks[1]))


def test_a_pack_has_packed_intermediates(close):
    net, samples = tiny(2, patch_size=2).eval(), [torch.randn(2, 5, 8), torch.randn(2, 7, 3)]
    features, maps = net.forward_intermediates(net.pack(samples), [0, 2])
    assert isinstance(features, Packed) and all(isinstance(m, Packed) for m in maps)
    for i, sample in enumerate(samples):
        alone, inner = net.forward_intermediates(sample[None], [0, 2], output_fmt="NHWC")
        close(features.unpack()[i], alone[0], 1e-5)
        for packed, one in zip(maps, inner, strict=True):
            close(packed.unpack()[i], one[0], 1e-5)


def test_words_have_one_axis(close):
    net = NDLightNet(1, vocab_size=50, embed_dim=32, depth=2, tpe_states=4, causal=True)
    words = torch.randint(50, (2, 9))
    features, maps = net.forward_intermediates(words, 1)
    assert torch.equal(net.norm(maps[0].mT), features) and maps[0].shape == (2, 32, 9)
    assert net.feature_info[1] == {"module": "blocks.1", "num_chs": 32, "reduction": 1}
    assert net.global_pool == ""
    net.reset_classifier(3)  # of the mean; without classes every token's features
    close(net(words), net.head(net.forward_features(words).mean(1)), 1e-6)
    net = NDLightNet(1, vocab_size=50, embed_dim=16, depth=1, causal=True)
    net.reset_classifier(0)
    close(net(words), net.forward_features(words), 1e-6)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_reach_every_block_below(close, checkpointed):
    net, x = tiny(2, patch_size=2), torch.randn(2, 2, 13, 9)
    net.set_grad_checkpointing(checkpointed)
    net.forward_intermediates(x, [1], intermediates_only=True)[0].sum().backward()
    below = {n for n, p in net.named_parameters() if p.grad is not None}
    assert below == {
        n for n, _ in net.named_parameters() if n.startswith(("embed", "tpe", "blo")) and not n.startswith("blocks.2.")
    }


@pytest.mark.parametrize("indices, expected", [(1, [2]), ([0, -2], [0, 1]), ([0], [0])])
def test_pruning_keeps_what_is_asked_for(indices, expected):
    net, x = tiny(2, patch_size=2).eval(), torch.randn(2, 2, 13, 9)
    before = net.forward_intermediates(x, expected, intermediates_only=True)
    assert net.prune_intermediate_layers(indices, prune_norm=True) == expected
    assert len(net.blocks) == len(net.feature_info) == max(expected) + 1
    assert not [n for n, _ in net.named_parameters() if n.startswith(("norm", "head"))]
    features, maps = net.forward_intermediates(x, expected)
    assert all(map(torch.equal, maps, before)) and torch.equal(net.forward_features(x), features)
    assert net(x).shape == (2, 32)
    with pytest.raises(ValueError, match="norm=True"):
        net.forward_intermediates(x, norm=True)


def test_pruning_may_leave_norm_and_head():
    net, x = tiny(2, patch_size=2, causal=True).eval(), torch.randn(2, 2, 12, 9)
    net.prune_intermediate_layers([0], prune_head=False)
    assert net(x).shape == (2, 5)
    net.prune_intermediate_layers([0], prune_norm=True)  # a stream needs no norm
    assert torch.allclose(net.stream(2)(x), net(x), atol=1e-5)


@pytest.mark.parametrize("indices", [0, 4, [3], [-4], []])
def test_indices_out_of_range_are_named(indices):
    net = tiny(2, patch_size=2)
    with pytest.raises(ValueError, match=r"indices=.*3|3.*indices"):
        net.forward_intermediates(torch.randn(1, 2, 4, 4), indices)
    with pytest.raises(ValueError, match=r"indices="):
        net.prune_intermediate_layers(indices)


def test_a_head_on_every_token(close):
    net, x = tiny(3, patch_size=2, causal=True, dtype=torch.float64).eval(), torch.randn(2, 2, 4, 6, 7).double()
    net.reset_classifier(7, "")
    assert net.global_pool == "" and net.head.weight.dtype == torch.float64
    assert net.get_classifier() is net.head and net.num_features == 32
    close(net(x), net.head(net.forward_features(x)), 1e-6)
    close(net.stream(2)(x), net(x), 1e-4)
    net.reset_classifier(5)  # keeps it, as in timm
    close(net(x), net.head(net.forward_features(x)), 1e-6)
    net.reset_classifier(0, "avg")
    close(net(x), net.forward_features(x).mean((1, 2, 3)), 1e-6)


@every_dims
def test_a_larger_patch_sees_the_resized_patch(close, dims):
    """The tokens of cells resized patch by patch are the old ones, up to float32 rounding of sums
    over at most 6^4 * 2 cells of pseudo-inverses near 1."""
    net = tiny(dims, patch_size=(2, 3, 2, 2)[:dims]).eval()
    new = (4, 5, 2, 6)[:dims]
    patches = torch.randn(7, 2, *net.embed.patch)
    resized = patches
    for axis, (old, size) in enumerate(zip(net.embed.patch, new, strict=True), start=2):
        lines = resized.movedim(axis, -1)
        flat = nn.functional.interpolate(lines.reshape(1, -1, old), size=size, mode="linear")
        resized = flat.reshape(*lines.shape[:-1], size).movedim(-1, axis)
    before = net.embed(patches)
    net.set_input_size(128, patch_size=new)
    assert net.embed.patch == new and net.embed.proj.in_features == 2 * math.prod(new)
    close(net.embed(resized), before, 1e-4)
    assert net(torch.randn(2, 2, *SIZES[dims])).shape == (2, 5)
    assert net.feature_info[0]["reduction"] == max(new)


@pytest.mark.parametrize("channels", [1, 2, 4, 7])
def test_channels_adapt_as_timms_do(channels):
    manipulate = pytest.importorskip("timm.models._manipulate")
    old, new = (tiny(2, in_chans=n, patch_size=(2, 3)) for n in (3, channels))
    adapted = adapt_in_chans(old.state_dict(), new)
    new.load_state_dict(adapted)
    assert all(torch.equal(w, adapted[n]) for n, w in old.state_dict().items() if "embed" not in n)

    def conv(weight):  # (dim, cells * channels) as the kernel of a convolution
        return weight.unflatten(1, (2, 3, -1)).movedim(-1, 1)

    expected = manipulate.adapt_input_conv(channels, conv(old.embed.proj.weight.data))
    assert torch.allclose(conv(new.embed.proj.weight), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("separable", [False, True])
def test_a_unet_of_one_channel_sees_three_equal_ones(close, separable):
    unet = partial(NDLightUNet, 2, out_channels=2, widths=(8, 16), depths=(0, 1), tpe=False, separable=separable)
    old, new = unet(in_channels=3).eval(), unet(in_channels=1).eval()
    new.load_state_dict(adapt_in_chans(old.state_dict(), new))
    x = torch.randn(2, 1, 9, 10)
    close(new(x), old(x.expand(-1, 3, -1, -1)), 1e-4)


def test_what_does_not_fit_is_left_to_load_state_dict():
    state, net = tiny(2, patch_size=2).state_dict(), tiny(2, patch_size=3, embed_dim=16)
    assert adapt_in_chans(state, net).keys() == state.keys()
    with pytest.raises(RuntimeError, match=r"embed\.proj\.weight"):
        net.load_state_dict(adapt_in_chans(state, net))


def test_pruning_keeps_the_rates_of_stochastic_depth():
    net = tiny(2, patch_size=2, drop_path_rate=0.3)
    net.prune_intermediate_layers([1])
    rates = [block.drop_path.p for block in NDLightNet(**net.config).blocks]
    assert rates == pytest.approx([0, 0.15]) == [block.drop_path.p for block in net.blocks]


@pytest.mark.exhaustive
def test_compile_without_a_graph_break(close):
    torch._dynamo.reset()
    net, x = tiny(2, patch_size=2, depth=2).eval(), torch.randn(2, 2, 13, 9)
    compiled = torch.compile(net.forward_intermediates, fullgraph=True, backend="aot_eager")
    expected = net.forward_intermediates(x, [0], stop_early=True)
    features, (inner,) = compiled(x, [0], stop_early=True)
    close(features, expected[0], 1e-5)
    close(inner, expected[1][0], 1e-5)
