"""PointCompletion: clouds alone and in any order, gradients, low precision, files, refusals."""

import pytest
import torch

from ndlightnet.layout import pack_points
from ndlightnet.layout.pack import STEPS
from ndlightnet.models import PointCompletion

MIXERS = {
    "LightNet": (None, None),
    "softmax": ("SoftmaxAttention", "SoftmaxAttention"),
    "LAVO": ({"LAVO": {"window": None}}, {"LAVO": {"window": None}}),
    "cosFormer": ({"CosformerAttention": {"reach": 100}}, {"CosformerAttention": {"reach": 100}}),
    "Identity": ("Identity", "LinearAttention"),
}
each_mixer = pytest.mark.parametrize("mixer, cross", MIXERS.values(), ids=MIXERS)


def network(mixer=None, cross=None, **options) -> PointCompletion:
    torch.manual_seed(0)
    return PointCompletion(12, 4, embed_dim=16, depth=1, decoder_depth=2, mixer=mixer, cross=cross, **options)


def clouds(*sizes: int, dtype=torch.float64) -> list[torch.Tensor]:
    return [torch.randn(size, 3, dtype=dtype) for size in sizes]


@each_mixer
def test_each_cloud_gets_what_it_gets_alone_and_in_any_order(mixer, cross):
    net, xs = network(mixer, cross, dtype=torch.float64).eval(), clouds(9, 12, 9, 1)
    results = net(pack_points(xs))
    assert [tuple(y.shape) for y in results] == [(4, 4, 3), (4, 12, 3)]
    for row, x in enumerate(xs):
        for one in (x, x[torch.randperm(len(x))]):
            for y, alone in zip(results, net(pack_points([one])), strict=True):
                torch.testing.assert_close(y[row : row + 1], alone)


@each_mixer
def test_every_parameter_learns(mixer, cross):
    net = network(mixer, cross)
    coarse, points = net(pack_points(clouds(9, 7, dtype=torch.float32)))
    grads = torch.autograd.grad(coarse.square().sum() + points.square().sum(), net.parameters())
    assert all(grad.isfinite().all() and grad.any() for grad in grads)


def test_points_lie_about_those_of_the_coarse_cloud():
    net = network()
    torch.nn.init.zeros_(net.head.weight)
    coarse, points = net(pack_points(clouds(9, 7, dtype=torch.float32)))
    assert torch.equal(points, coarse.repeat_interleave(3, 1))


def test_autocast_is_close_to_float32():
    """A few layers, each with roundings of 2^-9. Coordinates are float32, or they would be rounded, too. Those around
    the coarse points are read where these lie, which moves by as much as they are rounded, times STEPS."""
    net, packed = network().eval(), pack_points(clouds(9, 7, dtype=torch.float32))
    expected = net(packed)
    with torch.autocast("cpu", torch.bfloat16):
        for y, z, steps in zip(net(packed), expected, (1, STEPS), strict=True):
            assert y.dtype == torch.float32 and (y - z).abs().max() < steps * 10 * 2**-9 * z.abs().max()


def test_it_is_saved_and_loaded(tmp_path):
    net, packed = network(*MIXERS["LAVO"]).eval(), pack_points(clouds(9, 7, dtype=torch.float32))
    again = PointCompletion.from_pretrained(net.save_pretrained(tmp_path))
    assert all(map(torch.equal, again(packed), net(packed)))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="points=10: expected a multiple of queries=4"):
        PointCompletion(10, 4)
    with pytest.raises(ValueError, match="GLA as it is set reads tokens in an order"):
        network("GLA")(pack_points(clouds(5, dtype=torch.float32)))
    with pytest.raises(ValueError, match="has no cross form"):
        network(cross="Identity")(pack_points(clouds(5, dtype=torch.float32)))
