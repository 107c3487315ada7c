"""NDLightUNet: a map of the input's size, for any size, on one to three axes."""

import pytest
import torch
from torch import nn
from torch.autograd import grad

from ndlightnet import Identity, NDLightUNet

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
    model, x = tiny(1, widths=(8, 16), depths=(0, 0)), torch.randn(2, 2, 7)
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


def test_errors_show_the_values():
    with pytest.raises(ValueError, match=r"dims=4"):
        tiny(4)
    with pytest.raises(ValueError, match=r"depths=\(1, 1\): .*strides="):
        tiny(2, depths=(1, 1))
    with pytest.raises(ValueError, match=r"widths="):
        tiny(2, widths=(), depths=())
    for wrong in ((2, 3, 8, 8), (2, 2, 8), (2, 2, 8, 8, 8)):
        with pytest.raises(ValueError, match=rf"\({wrong[0]}, {wrong[1]}"):
            tiny(2)(torch.randn(wrong))
