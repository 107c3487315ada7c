"""NDLightUNet: a map of the input's size, for any size, on one to three axes."""

import weakref

import pytest
import torch
from torch import nn
from torch.autograd import grad, gradgradcheck
from torch.autograd.graph import saved_tensors_hooks

from ndlightnet import Identity, NDLightUNet
from ndlightnet.nn import convolutional, slabs
from ndlightnet.nn.convolutional import ConvBlock, NormSiLU

SIZES = {1: (13,), 2: (9, 14), 3: (7, 5, 6)}
every_dims = pytest.mark.parametrize("dims", SIZES)


def tiny(dims, **options):
    return NDLightUNet(dims, 2, 3, **({"widths": (8, 16, 24), "depths": (0, 1, 1)} | options))


@every_dims
def test_any_size_keeps_its_size(dims):
    model = tiny(dims)
    spaces = [SIZES[dims], (1,) * dims, (2,) * dims, (3,) * dims, (1, 2, 3)[:dims], (8,) * dims]
    for space in spaces:
        y = model(torch.randn(2, 2, *space))
        assert y.shape == (2, 3, *space) and y.isfinite().all()


@every_dims
def test_every_parameter_trains(dims):
    model = tiny(dims)
    y = model(torch.randn(2, 2, *SIZES[dims]))
    names, parameters = zip(*model.named_parameters(), strict=True)
    for name, g in zip(names, grad(y.square().sum(), parameters), strict=True):
        assert g.isfinite().all() and g.any(), name


@every_dims
def test_every_cell_sees_every_cell(dims):
    """The deepest level mixes the whole grid: from one corner to the other."""
    model = tiny(dims).double()
    space = {1: (64,), 2: (48, 40), 3: (24, 20, 16)}[dims]
    x = torch.randn(1, 2, *space, dtype=torch.float64, requires_grad=True)
    first = (0, slice(None), *[0] * dims)
    last = (0, slice(None), *[n - 1 for n in space])
    assert grad(model(x)[last].sum(), x)[0][first].any()


def test_odd_sizes_are_padded_and_cropped_at_the_end(close):
    """Otherwise what comes back from below lies beside the skip it joins."""
    model, x = tiny(1, widths=(8, 16), depths=(0, 0), skips="concat"), torch.randn(2, 2, 7)
    top = model.convs[0](x)
    whole = torch.cat([top, torch.zeros(2, 8, 1)], -1)
    below = model.up[0](model.convs[1](model.down[1](whole)))
    expected = model.heads[0](model.decoders[0](torch.cat([below[..., :7], top], 1)))
    close(model(x), expected, 1e-5)


def test_samples_do_not_see_each_other(close):
    model, x = tiny(2).eval(), torch.randn(3, 2, 9, 14)
    close(model(x)[1:2], model(x[1:2]), 1e-4)


def test_levels_and_options():
    model = tiny(2, depths=(1, 0, 2), mixer=Identity, tpe=False, drop_path_rate=0.1)
    assert [len(s.blocks) for s in model.stages] == [1, 0, 2]
    assert all(s.tpe is None for s in model.stages)
    blocks = [b for s in model.stages for b in s.blocks]
    assert all(isinstance(b.mixer, Identity) for b in blocks) and blocks[-1].drop_path.p == 0.1
    assert [s.tpe is not None for s in tiny(2).stages] == [False, True, True]


@every_dims
def test_a_few_steps_lower_the_loss(dims):
    model, x = tiny(dims), torch.randn(2, 2, *SIZES[dims])
    target = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_compile_without_a_graph_break(close):
    torch._dynamo.reset()
    model, x = tiny(3), torch.randn(1, 2, 7, 5, 6)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close(compiled(x), model(x), 1e-4)


def test_state_dict_round_trip(tmp_path):
    model, twin, x = tiny(2), tiny(2), torch.randn(2, 2, 9, 14)
    assert not torch.equal(twin(x), model(x))
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    twin.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert torch.equal(twin(x), model(x))


ANISOTROPIC = [(1, 2, 2), 2, [2, 1, 2]]  # 1, 2, 4 / 2, 4, 4 / 2, 4, 8 cells to one


def test_strides_of_each_axis():
    """Levels lie on the grids that the strides say, rounded up."""
    model = NDLightUNet(3, 2, 3, strides=ANISOTROPIC, widths=(4, 8, 8, 8), depths=(0, 0, 0, 1))
    seen = []
    for stage in model.stages:
        stage.register_forward_hook(lambda _, x, __: seen.append(tuple(x[0].shape[2:])))
    y = model(torch.randn(1, 2, 7, 9, 13))
    assert y.shape == (1, 3, 7, 9, 13)
    assert seen == [(7, 9, 13), (7, 5, 7), (4, 3, 4), (2, 3, 2)]
    assert model.strides == [(1, 2, 2), (2, 2, 2), (2, 1, 2)]


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
        ("S", 24, [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]),
        ("M", 32, [1, 1, 2, 2, 2], [0, 1, 2, 2, 2]),
        ("L", 40, [1, 2, 3, 3, 3], [0, 2, 4, 4, 4]),
    ],
)
def test_sizes(size, first, convs, depths):
    model = NDLightUNet(2, 1, 2, size=size, strides=[2] * 4)
    widths = [level[-1].conv2.out_channels for level in model.convs]
    assert widths == [min(320, first * 2**level) for level in range(5)]
    assert [len(level) for level in model.convs] == convs
    assert [len(stage.blocks) for stage in model.stages] == depths
    assert len(NDLightUNet(2, size=size).stages) == 4  # three strides where none are said


def test_the_default_of_three_axes():
    """Attention at the coarse levels, and nothing else; elsewhere as size="M"."""
    model = NDLightUNet(3, 1, 2, strides=[2] * 4, device="meta")
    assert model.widths == (32, 64, 128, 256, 320) and model.skips == "add"
    assert [len(level) for level in model.convs] == [1, 1, 0, 0, 0]
    assert [len(stage.blocks) for stage in model.stages] == [0, 0, 4, 4, 4]

    def shapes(*args, **options):
        parameters = NDLightUNet(*args, device="meta", **options).named_parameters()
        return {name: p.shape for name, p in parameters}

    assert shapes(3) == shapes(3, size="hybrid") != shapes(3, size="M")
    own = {"dims": 3, "widths": [4, 8, 8, 8]}, {"dims": 3, "depths": [0, 0, 1, 1]}
    few = {"dims": 3, "strides": [2]}
    for options in ({"dims": 2}, {"dims": 4}, {"dims": 3, "separable": True}, few, *own):
        assert shapes(**options) == shapes(**options, size="M")


def test_weights_of_the_other_skips_are_refused():
    for skips, other in (("add", "concat"), ("concat", "add")):
        old, new = (tiny(2, skips=one) for one in (other, skips))
        with pytest.raises(RuntimeError, match=f"skips='{skips}': expected '{other}' for these"):
            new.load_state_dict(old.state_dict())
    with pytest.raises(RuntimeError, match="size mismatch") as error:
        tiny(2, widths=(4, 8, 12)).load_state_dict(tiny(2).state_dict())
    assert "skips=" not in str(error.value)


@pytest.mark.parametrize("separable", [False, True])
def test_skips_that_are_added(separable, close):
    model = tiny(2, widths=(8, 16), depths=(0, 0), skips="add", separable=separable)
    x = torch.randn(2, 2, 8, 6)
    top, low = (y.movedim(1, model.channel_axis) for y in model.encode(x))
    close(model(x), model.heads[0](model.decoders[0](model.up[0](low) + top)).movedim(model.channel_axis, 1), 1e-5)


@every_dims
def test_deep_supervision(dims):
    """In training logits of every level of the decoder, each on its own grid; else one tensor,
    that of a network without."""
    model = tiny(dims, widths=(8, 8, 16, 24), depths=(0, 0, 1, 1), deep_supervision=True)
    x = torch.randn(2, 2, *SIZES[dims])
    outputs = model.train()(x)
    half = tuple(-(-n // 2) for n in SIZES[dims])
    quarter = tuple(-(-n // 2) for n in half)
    assert [y.shape for y in outputs] == [(2, 3, *n) for n in (SIZES[dims], half, quarter)]
    for y in outputs:  # each trains the levels below it
        assert grad(y.sum(), model.down[3].weight, retain_graph=True)[0].any()
    plain = tiny(dims, widths=(8, 8, 16, 24), depths=(0, 0, 1, 1))
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if k in plain.state_dict()})
    one = model.eval()(x)
    assert torch.equal(one, outputs[0]) and torch.equal(one, plain.eval()(x))
    assert isinstance(plain.train()(x), torch.Tensor)


@pytest.mark.parametrize("strides", [[], [2]])
def test_deep_supervision_of_few_levels(strides):
    model = NDLightUNet(2, 1, 2, strides=strides, deep_supervision=True).train()
    (y,) = model(torch.randn(1, 1, 5, 6))
    assert y.shape == (1, 2, 5, 6)


@every_dims
def test_a_single_cell_trains(dims):
    """Of one sample, at the coarsest level or from the start; torch's instance norm raises."""
    for space in ((4,) * dims, (1,) * dims):
        model = tiny(dims, deep_supervision=True).train()
        outputs = model(torch.randn(1, 2, *space))
        sum(y.square().sum() for y in outputs).backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        assert model.heads[0].bias.grad.any()


def test_instance_norm_is_torchs(close):
    """Each sample and channel by itself, with torch's own where that takes the size."""
    norm, x = NormSiLU(5).double(), torch.randn(3, 5, 4, 6, dtype=torch.float64) * 3 + 7
    torch.nn.init.normal_(norm.weight), torch.nn.init.normal_(norm.bias)
    expected = nn.functional.instance_norm(x, weight=norm.weight, bias=norm.bias, eps=norm.eps)
    close(norm(x), nn.functional.silu(expected), 1e-12)
    close(norm(x, x), nn.functional.silu(expected + x), 1e-12)


def test_a_prediction_frees_what_it_has_used(close, monkeypatch):
    """The output of a second convolution is gone when the skip is computed; values of training."""
    model, x = tiny(2).eval(), torch.randn(1, 2, 8, 8)
    seen, freed, convolve = [], [], convolutional._convolve

    def noted(conv, y, *layout):
        if len(seen) % 3 == 2:  # a block's skip, after its two convolutions
            freed.append(seen[-1]() is None)
        y = convolve(conv, y, *layout)
        seen.append(weakref.ref(y))
        return y

    monkeypatch.setattr(convolutional, "_convolve", noted)
    with torch.no_grad():
        y = model(x)
    assert freed and all(freed)
    freed.clear()
    close(model(x), y, 1e-5)
    assert not any(freed)


def test_a_prediction_calls_hooks():
    """As training does, with what the layers return: nothing is overwritten then."""
    block, seen = ConvBlock(2, 3, 4), []
    for part in (block.conv1, block.norm1, block.conv2, block.norm2):
        part.register_forward_hook(lambda part, _, output: seen.append((part, output)))
    with torch.no_grad():
        y = block(torch.randn(1, 3, 5, 6))
    assert [part for part, _ in seen] == [block.conv1, block.norm1, block.conv2, block.norm2]
    assert torch.equal(seen[1][1], block.norm1(seen[0][1])) and seen[3][1] is y


def test_a_block_keeps_what_its_convolutions_return(close):
    """What is normalised between them is computed again, unless others say what is kept."""
    block, x = ConvBlock(2, 3, 4).double(), torch.randn(2, 3, 5, 6, dtype=torch.float64)
    seen, x = [], x.requires_grad_()
    block.norm1.register_forward_hook(lambda _, __, output: seen.append(weakref.ref(output)))
    y = block(x)
    assert seen[-1]() is None
    with saved_tensors_hooks(lambda saved: saved, lambda packed: packed):
        kept = block(x)
    assert seen[-1]() is not None
    wanted = [x, *block.parameters()]
    found, expected = (grad(out.square().sum(), wanted) for out in (y, kept))
    for one, other in zip(found, expected, strict=True):
        close(one, other, 1e-12)


def test_a_change_between_forward_and_backward_is_refused():
    """As torch refuses it of what it keeps itself."""
    block, x = ConvBlock(2, 3, 4), torch.randn(2, 3, 5, 6, requires_grad=True)
    for parameter in (block.conv2.weight, block.norm1.weight):
        y = block(x)
        with torch.no_grad():
            parameter.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_hooks_that_are_forbidden_are_not_needed():
    block, x = ConvBlock(2, 3, 4), torch.randn(2, 3, 5, 6)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        block(x).sum().backward()
    assert block.conv1.weight.grad.any()


def test_second_derivatives_of_a_block():
    block, x = ConvBlock(1, 2, 2).double(), torch.randn(1, 2, 4, dtype=torch.float64)
    assert gradgradcheck(lambda x, *_: block(x), (x.requires_grad_(), *block.parameters()))


@pytest.mark.parametrize("separable", [False, True])
def test_levels_without_convolution_blocks(separable):
    model = tiny(2, convs=(1, 0, 0), depths=(0, 1, 2), separable=separable)
    assert [len(convs) for convs in model.convs] == [1, 0, 0]
    maps = model.encode(torch.randn(1, 2, 9, 14))
    assert [y.shape[1] for y in maps] == list(model.widths)
    assert model(torch.randn(1, 2, 9, 14)).shape == (1, model.out_channels, 9, 14)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_in_slabs_as_at_once(dims, checkpointing, monkeypatch, close):
    """Where a level has more numbers than a kernel takes well: values and gradients."""
    torch.manual_seed(1)
    net = NDLightUNet(dims, 1, 2, widths=[4, 8, 8], depths=[0, 0, 1], strides=[2, 3]).double()
    net.set_grad_checkpointing(checkpointing)
    x = torch.randn(2, 1, *(13, 9, 11)[:dims], dtype=torch.float64, requires_grad=True)
    whole = net(x)
    expected = grad(whole.square().sum(), [x, *net.parameters()])
    convolution, calls = torch.convolution, []

    def noted(*args):
        y = convolution(*args)
        calls.append((args[1].shape, y.numel()))
        return y

    monkeypatch.setattr(torch, "convolution", noted)
    most = (60, 300, 3000)[dims - 1]
    monkeypatch.setattr(slabs, "NUMBERS", most)
    parts = net(x)
    kinds = {
        "head": (2, 4, *[1] * dims),
        "down": (8, 4, *[2] * dims),
        "up": (8, 4, *[2] * dims),
        "block": (4, 4, *[3] * dims),
        "first": (4, 1, *[3] * dims),
    }
    for kind, shape in kinds.items():
        assert sum(found == shape for found, _ in calls) > 1, kind
    assert max(numbers for _, numbers in calls) < most
    close(parts, whole, 1e-12)
    for found, wanted in zip(grad(parts.square().sum(), [x, *net.parameters()]), expected, strict=True):
        close(found, wanted, 1e-12)


def test_grad_checkpointing_changes_nothing(close):
    model, x = tiny(2), torch.randn(2, 2, 9, 14)
    before = grad(model(x).square().sum(), model.stages[2].blocks[0].parameters())
    model.set_grad_checkpointing()
    after = grad(model(x).square().sum(), model.stages[2].blocks[0].parameters())
    for one, other in zip(before, after, strict=True):
        close(other, one, 1e-5)


def test_errors_show_the_values():
    with pytest.raises(ValueError, match=r"dims=4 with separable=False"):
        tiny(4, separable=False)
    with pytest.raises(ValueError, match=r"dims=0"):
        tiny(0)
    with pytest.raises(ValueError, match=r"depths=\(1, 1\): .*strides="):
        tiny(2, depths=(1, 1))
    with pytest.raises(ValueError, match=r"widths="):
        tiny(2, widths=(), depths=())
    with pytest.raises(ValueError, match="size='XL'"):
        NDLightUNet(2, size="XL")
    with pytest.raises(ValueError, match="skips='sum': expected 'add' or 'concat'"):
        NDLightUNet(2, skips="sum")
    for strides in ([(2, 2, 2)], [0], [(2, 0)]):
        with pytest.raises(ValueError, match="strides="):
            NDLightUNet(2, strides=strides)
    for name in ("convs", "widths", "depths"):
        with pytest.raises(ValueError, match=f"{name}="):
            NDLightUNet(2, strides=[2], **{name: (8, 0 if name == "widths" else -1)})
    with pytest.raises(ValueError, match=r"convs=\(0, 1\): expected 1 or more at the first level"):
        NDLightUNet(2, strides=[2], convs=(0, 1))
    for wrong in ((2, 3, 8, 8), (2, 2, 8), (2, 2, 8, 8, 8)):
        with pytest.raises(ValueError, match=rf"\({wrong[0]}, {wrong[1]}"):
            tiny(2)(torch.randn(wrong))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_shapes_are_found_on_device_meta(dims):
    with torch.device("meta"):
        net, x = NDLightUNet(dims, 2, 3), torch.empty(2, 2, *[20] * dims)
    y = net(x)
    assert y.is_meta and y.shape == (2, 3, *[20] * dims)
    y.sum().backward()
