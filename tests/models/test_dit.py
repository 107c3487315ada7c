"""NDLightDiT: a map of the input's size that depends on time and class, on any number of axes."""

import math

import pytest
import torch

from ndlightnet import NDLightDiT
from ndlightnet.layout import Grid
from ndlightnet.models import DIT_SIZES
from ndlightnet.nn.adaptive import TimeEmbedding
from ndlightnet.nn.mixers import published_mixer

SPACES = {1: (7,), 2: (5, 6), 3: (3, 4, 5), 4: (2, 3, 2, 5)}
SMALL = {"embed_dim": 16, "depth": 2, "tpe_states": 4}
each_condition = pytest.mark.parametrize("condition", ["adaln", "tokens"])
each_space = pytest.mark.parametrize("dims, space", SPACES.items())


def trained(*args, **options):
    """A network whose zero weights are drawn, so that its output depends on all it gets."""
    torch.manual_seed(0)
    net = NDLightDiT(*args, **SMALL | options)
    with torch.no_grad():
        for name, value in net.named_parameters():
            if "modulation" in name or "unembed" in name:
                value.normal_(std=0.3)
    return net


@each_space
@pytest.mark.parametrize("patch", [1, 2])
@each_condition
def test_the_output_has_the_size_of_the_input(dims, space, patch, condition):
    net = trained(dims, 3, 5, patch_size=patch, condition=condition).eval()
    x = torch.randn(2, 3, *space)
    y = net(x, torch.tensor([3.0, 900.0]), torch.tensor([1, 4]))
    assert y.shape == x.shape and y.dtype == x.dtype and y.isfinite().all()
    assert y.is_contiguous()
    y[0].sum().backward()  # samples do not see each other
    assert all(p.grad is not None for p in net.parameters())


@each_space
def test_a_new_network_gives_zero_whatever_it_gets(dims, space):
    net = NDLightDiT(dims, 2, 3, **SMALL)
    assert not net(torch.randn(2, 2, *space), 500.0, torch.tensor([0, 2])).any()
    tokens, grid = torch.randn(2, math.prod(space), 16), Grid(space)
    assert torch.equal(net.blocks[0](tokens, torch.randn(2, 16), grid), tokens)


def test_patches_lie_where_they_were_cut():
    """With the trunk switched off, the output's patches are the linear map of the input's."""
    net = trained(2, 1, patch_size=(2, 3), tpe=False, depth=1).eval()
    with torch.no_grad():
        for block in net.blocks:
            block.modulation.zero_weights()
        net.modulation.zero_weights()
        net.norm = torch.nn.Identity()
        net.embed.proj.weight.copy_(torch.eye(16, 6))
        net.embed.proj.bias.zero_()
        net.unembed.weight.copy_(torch.eye(6, 16))
        net.unembed.bias.zero_()
    x = torch.randn(2, 1, 5, 7)
    torch.testing.assert_close(net(x, 1.0), x)


@each_condition
def test_time_and_class_matter_and_are_those_of_their_sample(close, condition):
    net = trained(2, 1, 4, condition=condition).eval()
    x, t, y = torch.randn(3, 1, 4, 4), torch.tensor([10.0, 500, 990]), torch.tensor([0, 1, 3])
    all_at_once = net(x, t, y)
    for i in range(3):
        close(net(x[i : i + 1], t[i : i + 1], y[i : i + 1]), all_at_once[i : i + 1], 1e-5)
        close(net(x[i : i + 1], float(t[i]), y[i : i + 1]), all_at_once[i : i + 1], 1e-5)
    for changed in (net(x, t + 1, y), net(x, t, y.flip(0)), net(x, t)):
        assert not torch.allclose(changed, all_at_once, atol=1e-4)
    close(net(x, t), net(x, t, torch.full((3,), 4)), 1e-6)  # "no class"


def test_classes_are_dropped_in_training_only():
    net = trained(1, 1, 2)
    net.class_dropout = 0.3
    x, y = torch.randn(1, 1, 4).expand(4000, 1, 4), torch.ones(4000, dtype=torch.int64)
    with torch.no_grad():
        none = net(x[:1], 5.0)
        dropped = torch.isclose(net.train()(x, 5.0, y), none, atol=1e-5).all(2)[:, 0]
        assert dropped.float().mean() == pytest.approx(0.3, abs=0.05)
        assert not torch.isclose(net.eval()(x, 5.0, y), none, atol=1e-5).all(2).any()
        net.class_dropout = 0.0
        assert not torch.isclose(net.train()(x, 5.0, y), none, atol=1e-5).all(2).any()


def test_the_time_embedding_is_exact_under_autocast(close):
    embed, t = TimeEmbedding(8), torch.tensor([999.0, 1000.0, 0.25])
    angles = t.double()[:, None] * 10_000 ** (-torch.arange(128) / 128).double()
    waves = torch.cat([angles.cos(), angles.sin()], -1)
    expected = TimeEmbedding(8).double()
    expected.load_state_dict(embed.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        y = embed(t)
    assert y.dtype == torch.float32
    close(y.double(), expected.mlp(waves), 1e-4)


@pytest.mark.parametrize("size", DIT_SIZES)
def test_parameters_are_within_a_percent_of_dit(size):
    """Latents of 4 channels, patches of 2, 1,000 classes; DiT's output has a variance, too."""
    d, depth = DIT_SIZES[size]
    block = (4 * d * d + 4 * d) + (8 * d * d + 5 * d) + (6 * d * d + 6 * d)
    time, label = (256 * d + d) + (d * d + d), 1001 * d
    final = (2 * d * d + 2 * d) + (d * 2 * 2 * 8 + 2 * 2 * 8)
    dit = depth * block + (2 * 2 * 4 * d + d) + time + label + final
    published = {"S": 33e6, "B": 130e6, "L": 458e6, "XL": 675e6}
    assert dit == pytest.approx(published[size], rel=5e-3)
    net = NDLightDiT(2, 4, 1000, size=size, device="meta")
    assert sum(p.numel() for p in net.parameters()) == pytest.approx(dit, rel=1e-2)
    assert (net.embed_dim, len(net.blocks)) == DIT_SIZES[size]


@pytest.mark.parametrize("size, layers, millions", [("S", 18, 33), ("B", 18, 131), ("L", 36, 470), ("XL", 42, 680)])
def test_parameters_with_tokens_of_the_condition_are_those_of_the_paper(size, layers, millions):
    """Table 11, rounded there to whole millions; its L is 2 % larger than this reading."""
    net = NDLightDiT(2, 4, 1000, size=size, condition="tokens", mixer=published_mixer, device="meta")
    assert len(net.blocks) == layers
    assert sum(p.numel() for p in net.parameters()) / 1e6 == pytest.approx(
        millions, rel=0.025 if size == "L" else 0.015
    )


def test_tokens_of_the_condition_are_the_formula(close):
    """In float64: those of time and class are read by every token, and their own results are not part of the output."""
    net, x = trained(2, 1, 4, condition="tokens", patch_size=1).double().eval(), torch.randn(2, 1, 3, 4).double()
    t, y = torch.tensor([3.0, 800.0]), torch.tensor([1, 4])
    grid = Grid((3, 4))
    tokens = net.tpe(net.embed(x)).flatten(1, 2)
    tokens = torch.cat([net.time_embed(t)[:, None], net.class_embed(y)[:, None], tokens], 1)
    for block in net.blocks:
        tokens = tokens + block.mixer.mix(block.norm1(tokens), grid, None, False, prefix=2)
        tokens = tokens + block.mlp(block.norm2(tokens))
    expected = net.unembed(net.norm(tokens[:, 2:])).view(2, 3, 4, 1).movedim(-1, 1)
    close(net(x, t, y), expected, 1e-10)


def test_a_token_of_the_time_alone_and_checkpoints(close):
    net = trained(2, 1, condition="tokens").train()
    x, lengths = torch.randn(2, 1, 6, 4), []
    net.blocks[0].register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    gradients = []
    for checkpoints in (False, True):
        net.set_grad_checkpointing(checkpoints)
        gradients.append(torch.autograd.grad(net(x, 7.0).square().sum(), list(net.parameters())))
    assert lengths[0] == 1 + 3 * 2 and len(lengths) == 3  # again in the backward pass
    for one, two in zip(*gradients, strict=True):
        close(two, one, 1e-6)


def test_tokens_of_the_condition_need_lightnet_attention():
    with pytest.raises(ValueError, match="SoftmaxAttention with tokens of a condition: expected LightNetAttention"):
        NDLightDiT(2, **SMALL, condition="tokens", mixer="SoftmaxAttention")
    with pytest.raises(ValueError, match="condition='cross': expected 'adaln' or 'tokens'"):
        NDLightDiT(2, **SMALL, condition="cross")


@pytest.mark.parametrize("mixer", ["SoftmaxAttention", {"GLA": {"scan": "axes"}}, "list"])
def test_any_mixer(mixer):
    mixer = ["LightNetAttention", "SoftmaxAttention"] if mixer == "list" else mixer
    net = trained(2, 1, mixer=mixer)
    assert net.class_embed is None and net(torch.randn(2, 1, 5, 4), 9.0).any()
    assert type(NDLightDiT(**net.config).blocks[1].mixer) is type(net.blocks[1].mixer)


def test_the_residual_stream_stays_in_float32_under_autocast():
    net, dtypes = trained(2, 1, 3), []
    for module in (*net.blocks, net.blocks[0].norm1, net.blocks[1].norm2, net.norm):
        module.register_forward_pre_hook(lambda _, inputs: dtypes.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        out = net(torch.randn(2, 1, 5, 4), 3.0, torch.tensor([0, 2]))
    assert len(dtypes) == 5 and set(dtypes) == {torch.float32} and out.dtype == torch.bfloat16


@pytest.mark.slow
def test_it_compiles_as_one_graph(close):
    """In training, whose draw of classes to drop is in the graph."""
    net = trained(2, 1, 3, depth=1, mixer="Identity").train()
    x, t, y = torch.randn(2, 1, 5, 4), torch.tensor([3.0, 4.0]), torch.tensor([0, 2])
    net.class_dropout = 1.0
    out = torch.compile(net, fullgraph=True, backend="eager")(x, t, y)
    close(out, net.eval()(x, t), 1e-5)
    out.sum().backward()
