"""Points: tokens at real coordinates, against the formula, grids, clouds alone and in other orders; refusals."""

import pytest
import torch

from ndlightnet import NDLightNet
from ndlightnet.layout import Grid, PointRows, Points, Ragged, pack, pack_points
from ndlightnet.nn import mixers
from ndlightnet.nn.position import MDTPE
from ndlightnet.ops import Position, global_attention
from ndlightnet.ops.dispatch import OPERATIONS
from ndlightnet.ops.position import frequencies

ORDER_FREE = {
    "LightNet": {"LightNetAttention": {"local": None}},
    "LightNet, rotary": {"LightNetAttention": {"local": None, "lrpe": "rotary"}},
    "LightNet, no code": {"LightNetAttention": {"local": None, "lrpe": None}},
    "softmax": "SoftmaxAttention",
    "linear": "LinearAttention",
    "cosFormer": {"CosformerAttention": {"reach": 100}},
    "LRPE": "LrpeAttention",
    "LAVO": {"LAVO": {"window": None}},
    "ABC": "ABCAttention",
    "random features": "RandomFeatureAttention",
    "identity": "Identity",
}
ORDERED = [name for name in mixers.__all__ if name not in {*map(str, ORDER_FREE.values())}]
each_mixer = pytest.mark.parametrize("mixer", ORDER_FREE.values(), ids=ORDER_FREE)


def network(mixer) -> NDLightNet:
    torch.manual_seed(0)
    options = {"patch_size": 1, "embed_dim": 24, "depth": 2, "tpe": False, "mixer": mixer}
    return NDLightNet(3, 4, 5, **options, dtype=torch.float64).eval()


def clouds(*sizes: int) -> list[torch.Tensor]:
    """With a feature behind the coordinates."""
    return [torch.randn(size, 4, dtype=torch.float64) for size in sizes]


def test_the_formula_at_real_coordinates():
    """o = sum over m of softmax(k)_m cos(theta (x_n - x_m)) SiLU(q)_n v_m, with a group of channels for each axis."""
    n, dim = 6, 5
    q, k, v = torch.randn(3, 1, n, 1, dim, dtype=torch.float64)
    where = 10 * torch.randn(n, 2, dtype=torch.float64)
    theta = frequencies(dim, 2).double()[None]
    layout = Points([where])
    out = global_attention(q, k, v, position=Position(theta, layout), layout=layout)
    axes = torch.tensor([0, 0, 0, 1, 1])  # of the channels
    offsets = where[:, None, axes] - where[None, :, axes]  # (n, m, channels)
    weights = k[0, :, 0].softmax(0)[None] * torch.nn.functional.silu(q[0, :, 0])[:, None] * (offsets * theta[0]).cos()
    assert torch.allclose(out[0, :, 0], weights.sum(2) @ v[0, :, 0], atol=1e-12)


@each_mixer
def test_each_cloud_gets_what_it_gets_alone_and_in_any_order(mixer):
    net, xs = network(mixer), clouds(9, 12, 9, 1)
    packed = net(pack_points(xs))
    torch.testing.assert_close(packed, torch.cat([net(pack_points([x])) for x in xs]))
    orders = [torch.randperm(len(x)) for x in xs]
    torch.testing.assert_close(net(pack_points([x[order] for x, order in zip(xs, orders, strict=True)])), packed)


@pytest.mark.parametrize("name", ["LightNet", "LightNet, rotary", "softmax", "LRPE"])
def test_points_of_a_grid_are_that_grid(name):
    """Values and gradients, with two grids of one size and one of another."""
    net = network(ORDER_FREE[name])
    grids = [torch.randn(4, *shape, dtype=torch.float64) for shape in ((2, 3, 2), (3, 1, 2), (2, 3, 2))]
    points = []
    for x in grids:
        at = Grid(tuple(x.shape[1:])).coordinates().double()
        points.append(torch.cat([at, x.flatten(1).mT], 1))
    packed = pack_points(points, steps=1.0)
    packed.values = packed.values[:, 3:]
    results = []
    for batch in (packed, pack(grids, 1)):
        out = net(batch)
        results.append((out, *torch.autograd.grad(out.square().sum(), net.parameters())))
    torch.testing.assert_close(*results)


def test_coordinates_are_scaled_to_steps():
    xs = clouds(3, 2)
    packed = pack_points(xs)
    assert torch.equal(packed.values, torch.cat(xs))
    assert torch.equal(packed.layout.coordinates(), 32 * torch.cat(xs)[:, :3])


def test_rows_of_points_are_the_clouds():
    """A batch of as many points each, of a mixer without a network."""
    x, at = torch.randn(3, 7, 8, dtype=torch.float64), 5 * torch.randn(3, 7, 3, dtype=torch.float64)
    for name in ("LightNet", "softmax", "cosFormer"):
        kind = ORDER_FREE[name]
        layer = NDLightNet(3, 3, patch_size=1, embed_dim=8, depth=1, tpe=False, mixer=kind).double().blocks[0].mixer
        rows = layer(x, layout=PointRows.at(at))
        torch.testing.assert_close(rows.flatten(0, 1), layer(x.flatten(0, 1), layout=Points(at)))
        mask = torch.arange(7) < torch.tensor([[7], [4], [1]])
        masked = layer(x.masked_fill(~mask[..., None], torch.nan), mask=mask, layout=PointRows.at(at))
        alone = [layer(x[i, :n], layout=Points([at[i, :n]])) for i, n in enumerate((7, 4, 1))]
        for i, y in enumerate(alone):
            torch.testing.assert_close(masked[i, : len(y)], y)


@pytest.mark.parametrize("kind", ["SoftmaxAttention", "LightNetAttention", "LrpeAttention"])
def test_a_source_at_its_own_coordinates(kind):
    """A score depends on the offset between query and source only, and does depend on it."""
    layer = getattr(mixers, kind)(16).double()
    x, source = torch.randn(2, 4, 16, dtype=torch.float64), torch.randn(2, 6, 16, dtype=torch.float64)
    here, there = torch.randn(2, 4, 3, dtype=torch.float64), torch.randn(2, 6, 3, dtype=torch.float64)

    def read(here, there):
        return layer(x, context=source, layout=PointRows.at(here), source=PointRows.at(there))

    expected, shift = read(here, there), torch.tensor([3.0, -1.5, 0.25], dtype=torch.float64)
    torch.testing.assert_close(read(here + shift, there + shift), expected)
    assert (read(here + shift, there) - expected).abs().max() > 1e-3


# ------------------------------------------------------------------------------------ refusals
@pytest.mark.parametrize("name", ORDERED)
def test_mixers_that_read_an_order_refuse_points(name):
    """In their defaults; those that can do without one say how."""
    free = {"LightNetAttention", "CosformerAttention", "LAVO"}
    if name not in free and getattr(mixers, name).order_free:
        pytest.skip("has no order")
    with pytest.raises(ValueError, match=rf"{name} as it is set reads tokens in an order, and points have none"):
        network(name)(pack_points(clouds(5, 3)))


def test_causal_forms_and_md_tpe_refuse_points():
    x, layout = torch.randn(8, 16), Points([torch.randn(8, 3)])
    with pytest.raises(ValueError, match="causal=True reads tokens in an order"):
        mixers.SoftmaxAttention(16)(x, causal=True, layout=layout)
    with pytest.raises(ValueError, match="points lie on no lines that MD-TPE could scan, expected tpe=False"):
        MDTPE(3, 16, 4)(x, layout=layout)


def test_kernels_leave_real_coordinates_to_torch():
    """And take the same without a position code."""
    k, limits = torch.empty(1, 8, 1, 16), OPERATIONS["global_attention"].limits
    theta = frequencies(16, 3)[None]
    assert limits(k, k, position=Position(theta, Points([torch.randn(8, 3)]))).startswith("points at real coordinates")
    assert not limits(k, k, position=Position(theta, Ragged([(2, 2, 2)]))) and not limits(k, k)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ([], r"clouds=\[\]: expected one or more"),
        (
            [torch.randn(4, 3), torch.randn(4, 4)],
            r"clouds\[1\] \(4, 4\) torch.float32: expected floats \(points, 3 or more\), of one width",
        ),
        ([torch.randn(4, 2)], r"clouds\[0\] \(4, 2\)"),
        ([torch.randn(0, 3)], r"clouds\[0\] \(0, 3\)"),
        ([torch.ones(4, 3).long()], r"clouds\[0\] \(4, 3\) torch.int64: expected floats"),
    ],
)
def test_bad_clouds_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        pack_points(wrong)
