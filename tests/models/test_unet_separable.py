"""NDLightUNet from separable blocks: any number of axes, and causal along the first of them."""

import pytest
import torch
from torch import nn
from torch.autograd import grad

from ndlightnet import Identity, NDLightUNet
from ndlightnet.layout import cut_patches, uncut_patches
from ndlightnet.nn.mixers import GLA, SoftmaxAttention
from ndlightnet.nn.separable import LocalBlock

SIZES = {1: (13,), 2: (9, 14), 3: (7, 5, 6), 4: (3, 5, 4, 6), 5: (5, 2, 3, 2, 3)}
every_dims = pytest.mark.parametrize("dims", SIZES)


def tiny(dims, **options):
    small = {"widths": (8, 16, 24), "depths": (0, 1, 1), "separable": True}
    return NDLightUNet(dims, 2, 3, **(small | options))


@every_dims
def test_any_size_keeps_its_size(dims):
    model = tiny(dims)
    ones = ((1,) * dims, (2,) * dims, (3,) * dims, (1, 2, 3, 1, 2)[:dims])
    for space in (SIZES[dims], *ones):
        y = model(torch.randn(2, 2, *space))
        assert y.shape == (2, 3, *space) and y.isfinite().all()


@every_dims
def test_every_parameter_trains(dims):
    model = tiny(dims)
    y = model(torch.randn(2, 2, *SIZES[dims]))
    names, parameters = zip(*model.named_parameters(), strict=True)
    for name, g in zip(names, grad(y.square().sum(), parameters), strict=True):
        assert g.isfinite().all() and g.any(), name


def test_separable_where_torch_has_no_convolution():
    kinds = {dims: NDLightUNet(dims, widths=[4, 8]).separable for dims in (1, 2, 3, 4, 5)}
    assert kinds == {1: False, 2: False, 3: False, 4: True, 5: True}
    assert NDLightUNet(2, widths=[4, 8], causal=True).separable


@every_dims
def test_patches_are_laid_out_as_they_were_cut(dims):
    x = torch.randn(2, 3, *[2 * n for n in SIZES[dims]])
    step = (1, 2, 1, 2, 2)[:dims]
    assert torch.equal(uncut_patches(cut_patches(x, step), step), x.movedim(1, -1))


def test_odd_sizes_are_padded_and_cropped_at_the_end(close):
    """Otherwise what comes back from below lies beside the skip it joins."""
    model, x = tiny(1, widths=(8, 16), depths=(0, 0)), torch.randn(2, 2, 7)
    top = model.convs[0](model.down[0](x))
    pairs = torch.cat([top, torch.zeros(2, 1, 8)], 1).unflatten(1, (4, 2)).flatten(2)
    below = model.convs[1](model.down[1].proj(pairs))
    raised = model.up[0].proj(below).unflatten(2, (2, 8)).flatten(1, 2)[:, :7]
    expected = model.heads[0](model.decoders[0](torch.cat([raised, top], -1)))
    close(model(x), expected.movedim(-1, 1), 1e-5)


def test_a_block_is_a_separable_convolution(close):
    """In two axes torch has one: the taps of the star in a kernel of 3 x 3."""
    block, x = LocalBlock(2, 6).double(), torch.randn(2, 5, 7, 6, dtype=torch.float64)
    kernel = torch.zeros(6, 1, 3, 3, dtype=torch.float64)
    for offset, weight in zip(block.local.offsets(False), block.local.weight, strict=True):
        kernel[:, 0, 1 - offset[0], 1 - offset[1]] = weight
    local = nn.functional.conv2d(block.norm(x).movedim(-1, 1), kernel, padding=1, groups=6)
    close(block(x), x + block.mlp(local.movedim(1, -1)), 1e-12)


@every_dims
def test_every_cell_sees_every_cell(dims):
    """The deepest level mixes the whole grid: from one corner to the other."""
    model = tiny(dims).double()
    space = {1: (64,), 2: (48, 40), 3: (24, 20, 16), 4: (6, 12, 11, 10), 5: (3, 4, 5, 9, 8)}[dims]
    x = torch.randn(1, 2, *space, dtype=torch.float64, requires_grad=True)
    first = (0, slice(None), *[0] * dims)
    last = (0, slice(None), *[n - 1 for n in space])
    assert grad(model(x)[last].sum(), x)[0][first].any()


def test_samples_do_not_see_each_other(close):
    model, x = tiny(4).eval(), torch.randn(3, 2, *SIZES[4])
    close(model(x)[1:2], model(x[1:2]), 1e-4)


# ---------------------------------------------------------------------------------------- causal


@pytest.mark.parametrize("mixer", [None, SoftmaxAttention, GLA], ids=["LightNet", "softmax", "GLA"])
@pytest.mark.parametrize("dims", [1, 2, 4])
def test_no_output_frame_depends_on_a_later_frame(dims, mixer, close):
    """Exactly: the gradient is 0, and other later frames change no bit; nor do fewer frames change
    more than rounding (the causal forms work in chunks of frames)."""
    options = {} if mixer is None else {"mixer": mixer}
    model = tiny(dims, causal=True, **options).double().eval()
    space = {1: (9,), 2: (6, 5), 4: (5, 3, 4, 5)}[dims]
    x = torch.randn(2, 2, *space, dtype=torch.float64, requires_grad=True)
    y = model(x)
    for frame in range(space[0]):
        (g,) = grad(y[:, :, frame].square().sum(), x, retain_graph=True)
        assert not g[:, :, frame + 1 :].any() and g[:, :, : frame + 1].any((0, 1)).all()
        other = torch.cat([x[:, :, : frame + 1], 3 * torch.randn_like(x[:, :, frame + 1 :])], 2)
        assert torch.equal(model(other)[:, :, : frame + 1], y[:, :, : frame + 1])
        close(model(x[:, :, : frame + 1]), y[:, :, : frame + 1], 1e-9)


def test_other_networks_see_later_frames():
    model = tiny(4).double()
    x = torch.randn(1, 2, 5, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    assert grad(model(x)[:, :, 0].square().sum(), x)[0][:, :, 4].any()


def test_causal_strides():
    """Along time every level has all frames; other strides are refused in one line."""
    model = NDLightUNet(4, widths=[4, 8, 8], causal=True)
    assert model.strides == [(1, 2, 2, 2)] * 2
    assert NDLightUNet(4, causal=True).strides == [(1, 2, 2, 2)] * 3
    for strides in ([2], [(2, 1, 1, 1)], [(1, 2, 2, 2), 2]):
        with pytest.raises(ValueError, match=r"strides=.*: expected 1 along the first axis"):
            NDLightUNet(4, strides=strides, causal=True)
    with pytest.raises(ValueError, match="causal=True with separable=False"):
        NDLightUNet(3, separable=False, causal=True)


# -------------------------------------------------------------------------------- as the other kind


@pytest.mark.parametrize("dims", [2, 4])
def test_a_few_steps_lower_the_loss(dims):
    model, x = tiny(dims), torch.randn(2, 2, *SIZES[dims])
    target = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("causal", [False, True])
def test_bf16_autocast(causal, close):
    """Features are bf16 throughout, losses and gradients finite; values within bf16's rounding
    (2^-9) of some tens of layers, relative to outputs of order 1."""
    model, x = tiny(4, causal=causal), torch.randn(2, 2, *SIZES[4])
    kinds = []
    for module in model.convs:
        module.register_forward_hook(lambda _, __, y: kinds.append(y.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16 and {*kinds} == {torch.bfloat16}
    y.float().square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    close(y.float(), model(x), 30 * 2.0**-9)


@pytest.mark.slow
def test_compile_without_a_graph_break(close):
    torch._dynamo.reset()
    model, x = tiny(4), torch.randn(1, 2, 3, 5, 4, 6)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    close(y, model(x), 1e-4)
    y.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_strides_of_each_axis():
    """Levels lie on the grids that the strides say, rounded up."""
    strides = [(1, 2, 2, 1), 2, [2, 1, 2, 1]]
    model = NDLightUNet(4, 2, 3, strides=strides, widths=(4, 8, 8, 8), depths=(0, 0, 0, 1))
    seen = []
    for stage in model.stages:
        stage.register_forward_hook(lambda _, x, __: seen.append(tuple(x[0].shape[1:-1])))
    y = model(torch.randn(1, 2, 5, 7, 9, 2))
    assert y.shape == (1, 3, 5, 7, 9, 2)
    assert seen == [(5, 7, 9, 2), (5, 4, 5, 2), (3, 2, 3, 1), (2, 2, 2, 1)]


def test_levels_and_options():
    model = tiny(4, depths=(1, 0, 2), mixer=Identity, tpe=False, drop_path_rate=0.1, mlp_ratio=2)
    assert [len(s.blocks) for s in model.stages] == [1, 0, 2]
    assert all(s.tpe is None for s in model.stages)
    blocks = [b for s in model.stages for b in s.blocks]
    assert all(isinstance(b.mixer, Identity) for b in blocks) and blocks[-1].drop_path.p == 0.1
    assert model.convs[0][0].mlp.up_proj.out_features == 16
    assert [len(level) for level in NDLightUNet(4, size="L").convs] == [1, 2, 3, 3]


def test_deep_supervision():
    """In training logits of every level of the decoder, each on its own grid; else one tensor."""
    model = tiny(4, widths=(8, 8, 16, 24), depths=(0, 0, 1, 1), deep_supervision=True)
    x = torch.randn(2, 2, *SIZES[4])
    outputs = model.train()(x)
    half = tuple(-(-n // 2) for n in SIZES[4])
    quarter = tuple(-(-n // 2) for n in half)
    assert [y.shape for y in outputs] == [(2, 3, *n) for n in (SIZES[4], half, quarter)]
    for y in outputs:  # each trains the levels below it
        assert grad(y.sum(), model.down[3].proj.weight, retain_graph=True)[0].any()
    assert torch.equal(model.eval()(x), outputs[0])


def test_grad_checkpointing_changes_nothing(close):
    model, x = tiny(4), torch.randn(2, 2, *SIZES[4])
    some = [*model.stages[2].blocks[0].parameters(), *model.convs[0].parameters()]
    before = grad(model(x).square().sum(), some)
    model.set_grad_checkpointing()
    assert model.convs[0][0].grad_checkpointing and model.decoders[0][1].grad_checkpointing
    for one, other in zip(before, grad(model(x).square().sum(), some), strict=True):
        close(other, one, 1e-5)


def test_state_dict_round_trip(tmp_path):
    model, twin, x = tiny(4), tiny(4), torch.randn(2, 2, *SIZES[4])
    assert not torch.equal(twin(x), model(x))
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    twin.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert torch.equal(twin(x), model(x))


def test_shapes_are_found_on_device_meta():
    with torch.device("meta"):
        net, x = tiny(4), torch.empty(2, 2, *[9] * 4)
    y = net(x)
    assert y.is_meta and y.shape == (2, 3, *[9] * 4)
    y.sum().backward()


def test_wrong_inputs_are_named():
    for wrong in ((2, 3, 4, 4, 4, 4), (2, 2, 8, 8, 8)):
        with pytest.raises(ValueError, match=rf"\({wrong[0]}, {wrong[1]}"):
            tiny(4)(torch.randn(wrong))
