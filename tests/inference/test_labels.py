"""Labels of windows and on other grids, against MONAI's windows and interpolation in float64."""

import numpy as np
import pytest
import torch
from monai.data.meta_tensor import MetaTensor
from monai.inferers.inferer import SlidingWindowInferer
from scipy import ndimage
from torch import nn

from ndlightnet import NDLightUNet
from ndlightnet.inference import labels as labels_module
from ndlightnet.inference import predict_labels
from ndlightnet.inference.windows import tiles

SPACES = [(20, 17, 23), (9, 30, 8), (5, 4, 3), (33, 40), (1, 21, 19), (31,)]


def make_net(ndim, classes=5, channels=2):
    """Convolutions with a wide reach, so that windows disagree and their weights show."""
    torch.manual_seed(ndim)
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[ndim - 1]
    return nn.Sequential(conv(channels, 6, 5, padding=2), nn.SiLU(), conv(6, classes, 5, padding=2))


def monai_logits(net, image, window, overlap):
    inferer = SlidingWindowInferer(window, sw_batch_size=3, overlap=overlap, mode="gaussian")
    with torch.no_grad():
        return inferer(image[None], net)[0]


def logits_of(space, window):
    """A network, an image, the window cut to its axes, and the logits: MONAI's, or of the image at once."""
    net, image = make_net(len(space)), torch.randn(2, *space)
    with torch.no_grad():
        if window is None:
            return net, image, None, net(image[None])[0]
        window = window[: len(space)]
        return net, image, window, monai_logits(net, image, window, 0.5)


def interpolated(logits, shape, matrix):
    """Linear interpolation in float64 by scipy, one class after the other."""
    scale, offset = np.diag(matrix)[:-1], np.asarray(matrix)[:-1, -1]
    out = [ndimage.affine_transform(c.double().numpy(), scale, offset, shape, order=1, mode="nearest") for c in logits]
    return torch.from_numpy(np.stack(out))


def assert_labels(labels, logits, margin=1e-4):
    """The largest logit wins; where two are closer than rounding either may."""
    assert labels.shape == logits.shape[1:] and labels.device.type == "cpu"
    chosen = logits.gather(0, labels.long()[None])[0]
    assert (chosen >= logits.amax(0) - margin).all()
    top = logits.topk(min(2, len(logits)), dim=0).values
    assert ((top[0] - top[-1]) > margin).float().mean() > 0.9  # else it shows nothing


def scaling(scale, offset):
    matrix = np.diag([*scale, 1.0])
    matrix[:-1, -1] = offset
    return matrix


def assembled(pieces, space):
    """Tiles put together; cells that two of them hold have to agree."""
    image = None
    for corner, logits in pieces:
        if image is None:
            image = torch.full((len(logits), *space), torch.nan)
        box = [slice(a, a + n) for a, n in zip(corner, logits.shape[1:], strict=True)]
        cells = image[(slice(None), *box)]
        torch.testing.assert_close(torch.where(cells.isnan(), logits, cells), logits)
        cells.copy_(logits)
    return image


@pytest.mark.slow
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("overlap", [0, 0.25, 0.6])
@pytest.mark.parametrize("memory", [None, 0])
def test_blended_windows_are_those_of_monai(space, overlap, memory, monkeypatch):
    """Also cut into the narrowest columns, with any halo, in a buffer that held NaN."""
    net, image = make_net(len(space)), torch.randn(2, *space)
    window = (8, 7, 6)[: len(space)]
    expected = monai_logits(net, image, window, overlap)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
    for halo in (0, 1):
        with torch.no_grad():
            actual = assembled(tiles(net, image, window, overlap, [halo] * len(space), image, memory), space)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("window", [None, (8, 7, 6), (40, 40, 40)])
def test_labels_on_the_grid_of_the_image(space, window):
    net, image, window, logits = logits_of(space, window)
    labels = predict_labels(net, image, window)
    assert labels.dtype == torch.uint8 and labels.shape == space
    assert_labels(labels, logits)
    same = (space, torch.eye(len(space) + 1) + 1e-8)
    assert torch.equal(predict_labels(net, image, window, onto=same), labels)


GRIDS = [
    ((20, 17, 23), (33, 9, 50), (0.6, 1.9, 0.45), (0.2, 0.4, -0.3)),  # anisotropic
    ((20, 17, 23), (12, 17, 30), (-1.7, -1, 1.0), (19.3, 16, -4)),  # flips, whole steps, beyond
    ((20, 17, 23), (1, 40, 1), (1, 0.5, 1), (7.25, -2, 22.6)),  # single slices of the target
    ((9, 1, 30), (20, 5, 20), (0.45, 0.3, 1.5), (0, 0, 0.5)),  # a single slice of the image
    ((33, 40), (80, 21), (0.4, -2), (1, 39.5)),
    ((31,), (70,), (0.44,), (0.1,)),
    ((11, 8, 9), (20, 25, 5), (10 / 19, 7 / 24, 2), (0, 0, 0)),  # corners on corners
]


@pytest.mark.slow
@pytest.mark.parametrize("space, shape, scale, offset", GRIDS)
@pytest.mark.parametrize("window, memory", [(None, None), ((8, 7, 6), None), ((8, 7, 6), 0)])
@pytest.mark.parametrize("chunk", [1, 2000])
def test_labels_on_another_grid(space, shape, scale, offset, window, memory, chunk, monkeypatch):
    monkeypatch.setattr(labels_module, "CHUNK", chunk)
    net, image, window, logits = logits_of(space, window)
    matrix = scaling(scale, offset)
    labels = predict_labels(net, image, window, onto=(shape, matrix), memory=memory)
    assert_labels(labels, interpolated(logits, shape, matrix))


@pytest.mark.parametrize("classes, dtype", [(1, torch.uint8), (255, torch.uint8), (256, torch.int16)])
def test_dtype_by_the_number_of_classes(classes, dtype):
    net, image = nn.Conv2d(1, classes, 1), torch.randn(1, 30, 20)
    labels = predict_labels(net, image, (16, 16))
    assert labels.dtype == dtype
    expected = monai_logits(net, image, (16, 16), 0.5)
    chosen = expected.gather(0, labels.long()[None])[0]
    assert (chosen >= expected.amax(0) - 1e-4).all()


def test_equal_logits_give_the_first_class():
    net = nn.Conv2d(1, 4, 1)
    nn.init.zeros_(net.weight)
    net.bias.data = torch.tensor([0.0, 1, 1, 0])
    assert (predict_labels(net, torch.randn(1, 5, 6)) == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, (8, 8, 8)])
def test_bfloat16_networks_and_autocast(window):
    """Windows take the dtype of the parameters; the labels are those of bfloat16 logits."""
    net = NDLightUNet(3, in_channels=1, out_channels=4, widths=[4, 8], depths=[0, 1]).eval()
    image = torch.randn(1, 11, 9, 13)
    onto = ((15, 9, 20), scaling((0.7, 1, 0.6), 0))
    exact = predict_labels(net, image, window, onto=onto)
    with torch.autocast("cpu", torch.bfloat16):
        cast = predict_labels(net, image, window, onto=onto)
    for labels in (cast, predict_labels(net.bfloat16(), image, window, onto=onto)):
        assert labels.dtype == torch.uint8 and labels.shape == (15, 9, 20)
        assert (labels == exact).float().mean() > 0.9


def test_one_window_at_a_time_and_each_once():
    """Where the sums fit, no window is computed twice; in columns only those on the cuts."""
    shapes = []

    class Net(nn.Module):
        def forward(self, x):
            shapes.append(tuple(x.shape))
            return x

    image = torch.randn(3, 40, 20, 24)
    predict_labels(Net(), image, (8, 8, 8))
    assert shapes == [(1, 3, 8, 8, 8)] * (9 * 4 * 5)
    shapes.clear()
    # 4 channels, 9 planes, 20 x 12 cells: one cut, through the third axis where a window begins
    predict_labels(Net(), image, (8, 8, 8), memory=4 * 4 * 9 * 20 * 12)
    assert len(shapes) == 9 * 4 * (5 + 1)
    shapes.clear()
    # between cells one cell more, and 40 x 20 that the first column leaves to the second
    halves = ((80, 20, 48), scaling((0.5, 1, 0.5), 0))
    predict_labels(Net(), image, (8, 8, 8), onto=halves, memory=4 * 4 * (9 * 20 * 13 + 40 * 20))
    assert len(shapes) == 9 * 4 * (5 + 1)


def test_a_meta_tensor_and_a_matrix_of_integers():
    net, image = make_net(3), torch.randn(2, 9, 8, 7)
    onto = ((9, 8, 7), np.diag([2, 1, 1, 1]))
    plain = predict_labels(net, image, (6, 6, 6), onto=onto)
    labels = predict_labels(net, MetaTensor(image), (6, 6, 6), onto=onto)
    assert type(labels) is torch.Tensor and torch.equal(labels, plain)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"window": (8, 8)}, "window=(8, 8): expected 3 sizes"),
        ({"window": (8, 8, 0)}, "window=(8, 8, 0): expected 3 sizes"),
        ({"window": (8, 8, 8), "overlap": 1.0}, "overlap=1.0: expected 0 <= overlap < 1"),
        ({"onto": ((4, 4), np.eye(4))}, "onto: shape (4, 4)"),
        ({"onto": ((4, 4, 0), np.eye(4))}, "onto: shape (4, 4, 0)"),
        ({"onto": ((4, 4, 4), np.eye(3))}, "matrix (3, 3)"),
        ({"onto": ((4, 4, 4), np.eye(4)[[1, 0, 2, 3]])}, "one scale and one offset for each axis"),
        ({"onto": ((4, 4, 4), scaling((1, 0, 1), 0))}, "one scale and one offset for each axis"),
        ({"onto": ((4, 4, 4), scaling((1, 1, np.nan), 0))}, "one scale and one offset"),
        ({"onto": ((4, 4, 4), np.eye(4) + 0.01 * np.eye(4)[[1, 0, 2, 3]])}, "one scale"),
    ],
)
def test_arguments_that_do_not_fit(arguments, words):
    with pytest.raises(ValueError) as caught:
        predict_labels(make_net(3), torch.randn(2, 9, 9, 9), **arguments)
    assert words in str(caught.value) and "\n" not in str(caught.value)


class Pair(nn.Module):
    def forward(self, x):
        return x, x


@pytest.mark.parametrize("window", [None, (4, 4)])
def test_networks_that_give_something_else(window):
    image = torch.randn(1, 9, 9)
    with pytest.raises(ValueError, match="network: input of shape"):
        predict_labels(nn.Conv2d(1, 3, 3), image, window)
    with pytest.raises(ValueError, match="gave tuple"):
        predict_labels(Pair(), image, window)
    image[0, 5, 5] = torch.nan
    with pytest.raises(ValueError, match="not numbers"):
        predict_labels(nn.Conv2d(1, 3, 1), image, window)
