"""NDLightUNet: a map of the input's size, for any size, from torch's convolutions on one to three axes
and from separable blocks on any number of axes; its levels, encoder and decoder."""

from functools import partial

import pytest
import torch
from torch.autograd import grad
from torch.func import functional_call

from ndlightnet import Identity, NDLightUNet
from ndlightnet.nn import slabs
from ndlightnet.nn.convolutional import NormSiLU
from ndlightnet.nn.mixers import GLA, SoftmaxAttention

SPACES = {1: (13,), 2: (9, 14), 3: (7, 5, 6), 4: (3, 5, 4, 6), 5: (5, 2, 3, 2, 3)}
KINDS = [(1, False), (2, False), (3, False), (1, True), (2, True), (4, True), (5, True)]
every_kind = pytest.mark.parametrize("dims, separable", KINDS)
one_of_each = pytest.mark.parametrize("dims, separable", [(2, False), (4, True)])


def tiny(dims, separable=None, **options):
    return NDLightUNet(dims, 2, 3, **({"widths": (8, 16, 24), "depths": (0, 1, 1), "separable": separable} | options))


@every_kind
def test_any_size_keeps_its_size(dims, separable):
    model = tiny(dims, separable).train()
    for space in ((1,) * dims, (2,) * dims, (1, 2, 3, 1, 2)[:dims], (8,) * dims, SPACES[dims]):
        y = model(torch.randn(2, 2, *space))
        assert y.shape == (2, 3, *space) and y.isfinite().all()


@one_of_each
def test_gradients_are_the_slope_of_the_output(dims, separable):
    """Along a random change of all parameters, whichever way they reach the output."""
    model, x = tiny(dims, separable).double(), torch.randn(1, 2, *SPACES[dims], dtype=torch.float64)
    weights = dict(model.named_parameters())
    change = {name: torch.randn_like(w) for name, w in weights.items()}
    before, after = (
        functional_call(model, {name: w + step * change[name] for name, w in weights.items()}, x).square().mean()
        for step in (-1e-6, 1e-6)
    )
    gradients = grad(model(x).square().mean(), list(weights.values()))
    slope = sum((g * d).sum() for g, d in zip(gradients, change.values(), strict=True))
    torch.testing.assert_close(slope, (after - before) / 2e-6, rtol=1e-5, atol=0)


@every_kind
def test_every_cell_sees_every_cell(dims, separable):
    """The deepest level mixes the whole grid: from one corner to the other."""
    model = tiny(dims, separable).double()
    space = {1: (64,), 2: (48, 40), 3: (24, 20, 16), 4: (6, 12, 11, 10), 5: (3, 4, 5, 9, 8)}[dims]
    x = torch.randn(1, 2, *space, dtype=torch.float64, requires_grad=True)
    last = (0, slice(None), *[n - 1 for n in space])
    assert grad(model(x)[last].sum(), x)[0][(0, slice(None), *[0] * dims)].any()


def test_odd_sizes_are_padded_and_cropped_at_the_end(close):
    """Otherwise what comes back from below lies beside the feature map that it joins."""
    model, x = tiny(1, widths=(8, 16), depths=(0, 0)), torch.randn(2, 2, 7)
    top = model.convs[0](x)
    below = model.up[0](model.convs[1](model.down[1](torch.cat([top, torch.zeros(2, 8, 1)], -1))))
    close(model(x), model.heads[0](model.decoders[0](torch.cat([below[..., :7], top], 1))), 1e-5)
    model = tiny(1, True, widths=(8, 16), depths=(0, 0))
    top = model.convs[0](model.down[0](x))
    pairs = torch.cat([top, torch.zeros(2, 1, 8)], 1).unflatten(1, (4, 2)).flatten(2)
    below = model.convs[1](model.down[1].proj(pairs))
    raised = model.up[0].proj(below).unflatten(2, (2, 8)).flatten(1, 2)[:, :7]
    expected = model.heads[0](model.decoders[0](torch.cat([raised, top], -1)))
    close(model(x), expected.movedim(-1, 1), 1e-5)


@pytest.mark.parametrize("separable", [False, True])
def test_a_hybrid_adds_feature_maps(separable, close):
    model = tiny(2, separable, widths=(8, 16), depths=(0, 0), convs=(1, 1), size="hybrid")
    x = torch.randn(2, 2, 8, 6)
    top, low = (y.movedim(1, model.channel_axis) for y in model.encode(x))
    close(model(x), model.heads[0](model.decoders[0](model.up[0](low) + top)).movedim(model.channel_axis, 1), 1e-5)


@one_of_each
def test_levels_and_options(dims, separable):
    model = tiny(dims, separable, convs=(1, 0, 0), depths=(1, 0, 2), mixer=Identity, tpe=False, drop_path_rate=0.1)
    assert [len(convs) for convs in model.convs] == [1, 0, 0]
    assert [len(stage.blocks) for stage in model.stages] == [1, 0, 2]
    assert all(stage.tpe is None for stage in model.stages)
    blocks = [block for stage in model.stages for block in stage.blocks]
    assert all(isinstance(block.mixer, Identity) for block in blocks) and blocks[-1].drop_path.p == 0.1
    assert [stage.tpe is not None for stage in tiny(dims, separable).stages] == [False, True, True]


def test_separable_where_torch_has_no_convolution():
    kinds = {dims: NDLightUNet(dims, widths=[4, 8], device="meta").separable for dims in SPACES}
    assert kinds == {1: False, 2: False, 3: False, 4: True, 5: True}
    causal = NDLightUNet(3, causal=True, device="meta")
    assert causal.separable and causal.strides == [(1, 2, 2)] * 3  # along time every level has all frames


@pytest.mark.exhaustive
def test_compile_without_a_graph_break(close):
    """On four axes; tests/doors compiles the others."""
    torch._dynamo.reset()
    model, x = tiny(4, widths=(8, 16), depths=(0, 1)), torch.randn(1, 2, *SPACES[4])
    y = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    close(y, model(x), 1e-4)
    y.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("causal", [False, True])
def test_features_are_bf16_throughout_under_autocast(causal):
    model, dtypes = tiny(4, causal=causal), []
    for module in model.convs:
        module.register_forward_hook(lambda _, __, y: dtypes.append(y.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        dtypes.append(model(torch.randn(2, 2, *SPACES[4])).dtype)
    assert {*dtypes} == {torch.bfloat16}


# strides, the grids of the levels
STRIDES = {
    3: ([(1, 2, 2), 2, [2, 1, 2]], [(7, 9, 13), (7, 5, 7), (4, 3, 4), (2, 3, 2)]),
    4: ([(1, 2, 2, 1), 2, [2, 1, 2, 1]], [(5, 7, 9, 2), (5, 4, 5, 2), (3, 2, 3, 1), (2, 2, 2, 1)]),
}


@pytest.mark.parametrize("dims", STRIDES)
def test_strides_of_each_axis(dims):
    """Levels lie on the grids that the strides say, rounded up."""
    strides, grids = STRIDES[dims]
    model = tiny(dims, strides=strides, widths=(4, 8, 8, 8), depths=(0, 0, 0, 1))
    x = torch.randn(1, 2, *grids[0])
    assert [tuple(y.shape) for y in model.encode(x)] == [
        (1, width, *grid) for width, grid in zip(model.widths, grids, strict=True)
    ]
    assert model(x).shape == (1, 3, *grids[0])


def test_a_stride_of_one_keeps_the_axes_apart():
    """Where nothing is halved along an axis, planes see only their neighbours of the kernels."""
    model = tiny(2, strides=[(1, 2), (1, 2)], convs=(1, 1, 1), depths=(0, 0, 0)).double()
    reach = 2 * (3 + 2)  # two 3-wide convolutions for each of 3 blocks down and 2 up
    x = torch.randn(1, 2, 2 * reach + 5, 8, dtype=torch.float64, requires_grad=True)
    for module in model.modules():
        if isinstance(module, NormSiLU):  # it sees the whole grid
            module.forward = lambda x, r=None, *_, **__: x if r is None else x + r
    planes = grad(model(x)[0, :, reach + 2].sum(), x)[0][0].abs().sum((0, 2)) > 0
    assert planes.nonzero().flatten().tolist() == list(range(2, 2 * reach + 3))


@pytest.mark.parametrize(
    "size, first, convs, depths",
    [
        ("hybrid", 32, [1, 1, 0, 0, 0], [0, 0, 4, 4, 4]),
        ("S", 24, [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]),
        ("M", 32, [1, 1, 2, 2, 2], [0, 1, 2, 2, 2]),
        ("L", 40, [1, 2, 3, 3, 3], [0, 2, 4, 4, 4]),
    ],
)
def test_sizes(size, first, convs, depths):
    model = NDLightUNet(2, 1, 2, size=size, strides=[2] * 4, device="meta")
    assert model.widths == tuple(min(320, first * 2**level) for level in range(5))
    assert [len(level) for level in model.convs] == convs
    assert [len(stage.blocks) for stage in model.stages] == depths
    assert model.add == (size == "hybrid")
    assert len(NDLightUNet(2, size=size, device="meta").stages) == 4  # three strides where none are said


def test_the_default_size():
    """On three axes "hybrid", if no levels are given, there are three or more and torch has the
    layers; elsewhere "M", which has LightNet blocks from the second level on."""

    def is_hybrid(dims, **options):
        return NDLightUNet(dims, device="meta", **options).add

    assert is_hybrid(3) and is_hybrid(3, strides=[2, 2])
    levels = {"strides": [2]}, {"widths": [4, 8, 8, 8]}, {"depths": [0, 0, 1, 1]}, {"separable": True}
    assert not any([is_hybrid(2), is_hybrid(4), *(is_hybrid(3, **options) for options in levels)])
    assert NDLightUNet(2, device="meta").widths == NDLightUNet(2, size="M", device="meta").widths


@pytest.mark.parametrize("dims, separable", [(1, False), (2, False), (3, False), (4, True)])
def test_deep_supervision(dims, separable):
    """In training logits of every level of the decoder, each on its own grid; else one tensor,
    that of a network without."""
    levels = {"widths": (8, 8, 16, 24), "depths": (0, 0, 1, 1)}
    for strides in ([], [2]):  # too few levels for a second output
        (y,) = NDLightUNet(2, 1, 2, strides=strides, deep_supervision=True)(torch.randn(1, 1, 5, 6))
        assert y.shape == (1, 2, 5, 6)
    model = tiny(dims, separable, **levels, deep_supervision=True)
    x = torch.randn(2, 2, *SPACES[dims])
    outputs = model.train()(x)
    half = tuple(-(-n // 2) for n in SPACES[dims])
    quarter = tuple(-(-n // 2) for n in half)
    assert [y.shape for y in outputs] == [(2, 3, *n) for n in (SPACES[dims], half, quarter)]
    weight = next(model.down[3].parameters())
    for y in outputs:  # each trains the levels below it
        assert grad(y.sum(), weight, retain_graph=True)[0].any()
    assert all(map(torch.equal, outputs, model.decode(model.encode(x))))
    plain = tiny(dims, separable, **levels)
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if k in plain.state_dict()})
    one = model.eval()(x)
    assert torch.equal(one, outputs[0]) and torch.equal(one, plain.train()(x))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_single_cell_trains(dims):
    """Of one sample, at the coarsest level or from the start; torch's instance norm raises."""
    for space in ((4,) * dims, (1,) * dims):
        model = tiny(dims, deep_supervision=True).train()
        sum(y.square().sum() for y in model(torch.randn(1, 2, *space))).backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        assert model.heads[0].bias.grad.any()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_in_slabs_as_at_once(dims, checkpointing, monkeypatch, close):
    """Where a level has more numbers than a kernel takes well: values and gradients."""
    torch.manual_seed(1)
    net = NDLightUNet(dims, 1, 2, widths=[4, 8, 8], depths=[0, 0, 1], strides=[2, 3]).double()
    net.set_grad_checkpointing(checkpointing)
    x = torch.randn(2, 1, *(13, 9, 11)[:dims], dtype=torch.float64, requires_grad=True)
    at_once = net(x)
    expected = grad(at_once.square().sum(), [x, *net.parameters()])
    convolve, calls = slabs._convolve, []

    def noted(*args):
        y = convolve(*args)
        calls.append((args[1].shape, y.numel()))
        return y

    monkeypatch.setattr(slabs, "_convolve", noted)
    most = (60, 300, 3000)[dims - 1]
    monkeypatch.setattr(slabs, "NUMBERS", most)
    in_slabs = net(x)
    weights = {"head": (2, 4, 1), "down": (8, 4, 2), "up": (8, 4, 2), "block": (4, 4, 3), "first": (4, 1, 3)}
    for layer, (outputs, inputs, kernel) in weights.items():
        assert sum(shape == (outputs, inputs, *[kernel] * dims) for shape, _ in calls) > 1, layer
    assert max(numbers for _, numbers in calls) < most
    close(in_slabs, at_once, 1e-12)
    for pair in zip(grad(in_slabs.square().sum(), [x, *net.parameters()]), expected, strict=True):
        close(*pair, 1e-12)


@pytest.mark.parametrize("mixer", [None, SoftmaxAttention, GLA], ids=["LightNet", "softmax", "GLA"])
@pytest.mark.parametrize("dims", [1, 2, 4])
def test_no_output_frame_of_a_causal_network_depends_on_a_later_frame(dims, mixer, close):
    """Exactly: the gradient is 0, and other later frames change no bit; nor do fewer frames change
    more than rounding (the causal forms work in chunks of frames)."""
    model = tiny(dims, causal=True, **({} if mixer is None else {"mixer": mixer})).double().eval()
    space = {1: (9,), 2: (6, 5), 4: (5, 3, 4, 5)}[dims]
    x = torch.randn(2, 2, *space, dtype=torch.float64, requires_grad=True)
    y = model(x)
    for frame in range(space[0]):
        (g,) = grad(y[:, :, frame].square().sum(), x, retain_graph=True)
        assert not g[:, :, frame + 1 :].any() and g[:, :, : frame + 1].any((0, 1)).all()
        changed = torch.cat([x[:, :, : frame + 1], 3 * torch.randn_like(x[:, :, frame + 1 :])], 2)
        assert torch.equal(model(changed)[:, :, : frame + 1], y[:, :, : frame + 1])
        close(model(x[:, :, : frame + 1]), y[:, :, : frame + 1], 1e-9)
    model = tiny(dims).double()
    assert grad(model(x)[:, :, 0].square().sum(), x)[0][:, :, space[0] - 1].any()


@pytest.mark.parametrize(
    "make, space",
    [
        (partial(tiny, 1), (13,)),
        (partial(tiny, 3, strides=[(1, 2, 2), (3, 2, 1)]), (7, 5, 6)),
        (partial(tiny, 2, True), (9, 14)),
        (partial(tiny, 3, causal=True), (3, 5, 6)),
    ],
)
@torch.no_grad()
def test_decode_of_encode_is_forward(make, space):
    net, x = make().eval(), torch.randn(2, 2, *space)
    expected, features = net(x), net.encode(x)
    copies = [y.clone() for y in features]
    for maps in (features, tuple(features), copies):
        assert torch.equal(net.decode(maps), expected)
    assert len(features) == 3 and all(map(torch.equal, features, copies))


def test_gradients_pass_through_both(close_grads):
    net, x = tiny(2), torch.randn(2, 2, 9, 14)
    close_grads(net.decode(net.encode(x)), net(x), list(net.parameters()), 1e-5)


def test_feature_maps_of_another_shape_are_named():
    net, x = tiny(2), torch.randn(2, 2, 9, 14)
    features = net.encode(x)
    with pytest.raises(ValueError, match="2 feature maps: expected 3"):
        net.decode(features[1:])
    with pytest.raises(ValueError, match=r"features\[1\] \(2, 16, 5, 6\): expected \(2, 16, 5, 7"):
        net.decode([features[0], features[1][..., :6], features[2]])
    with pytest.raises(ValueError, match=r"features\[0\] \(2, 8, 9\)"):
        net.decode([features[0][..., 0], *features[1:]])
    with pytest.raises(ValueError, match=r"input of shape"):
        net.encode(x[:, :1])
