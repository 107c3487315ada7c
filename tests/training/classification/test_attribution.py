"""What decided: a network that reads one part of its input has that part marked."""

import matplotlib.image
import numpy as np
import pytest
import torch
from torch import nn

from ndlightnet.training.classification.answer_figures import FRAMES, overlaid, save_attributions, views
from ndlightnet.training.classification.attribution import AT_ONCE, attribution

SPACES = {1: (50,), 2: (20, 33), 3: (8, 12, 9)}


class Corner(nn.Module):
    """Logits: the sum over the first quarter of each axis, its negative, and 0."""

    def __init__(self):
        super().__init__()
        self.batches = []

    def forward(self, x):
        self.batches.append(len(x))
        corner = x[(slice(None), slice(None), *(slice(-(-n // 4)) for n in x.shape[2:]))]
        total = corner.flatten(1).sum(1)
        return torch.stack([total, -total, 0 * total], 1)


@pytest.mark.parametrize("dims", SPACES)
def test_the_part_that_decides_is_marked(dims):
    x, net = torch.rand(2, *SPACES[dims]) + 0.5, Corner()
    heat = attribution(net, x, 0)
    assert heat.shape == SPACES[dims] and heat.dtype == torch.float32
    assert heat[(0,) * dims] > 0 and heat[(-1,) * dims] == 0
    assert heat[(0,) * dims] > 0.9 * heat.max()
    torch.testing.assert_close(attribution(net, x, 1), -heat)
    assert not attribution(net, x, 2).any()
    assert max(net.batches) <= AT_ONCE and sum(net.batches) < 4 * 90  # a test stays quick


def test_a_window_that_covers_all_takes_all():
    """What a cell's value is: the logit without the window, averaged over windows."""
    x = torch.tensor([[3.0]])
    assert attribution(Corner(), x, 0).item() == 3.0  # one cell, one window
    line = torch.ones(1, 32)
    heat = attribution(Corner(), line, 0)  # windows of 4 cells, steps of 2; the first 8 count
    assert heat[:6].tolist() == [4.0] * 6 and heat[12:].tolist() == [0.0] * 20
    assert heat[6:8].tolist() == [3.0] * 2 and heat[8:10].tolist() == [1.0] * 2


def test_views_of_every_kind_of_sample():
    line, raw = torch.zeros(40, 60, dtype=torch.uint8), torch.zeros(1, 60, dtype=torch.uint8)
    assert views(line, torch.zeros(60))[0][0].shape == (40, 60, 3)
    assert views(raw, torch.zeros(60))[0][1].shape == (16, 60)
    image = torch.randint(256, (3, 5, 7), dtype=torch.uint8)
    ((view, heat),) = views(image, torch.zeros(5, 7))
    np.testing.assert_allclose(view, image.permute(1, 2, 0).numpy() / 255, rtol=1e-6)
    assert heat.shape == (5, 7)
    clip = torch.randint(256, (3, 16, 5, 7), dtype=torch.uint8)
    frames = views(clip, torch.arange(16.0)[:, None, None].expand(16, 5, 7), video=True)
    assert [int(heat[0, 0]) for _, heat in frames] == [0, 3, 6, 9, 12, 15] and len(frames) == FRAMES
    assert len(views(clip[:, :2], torch.zeros(2, 5, 7), video=True)) == 2
    heat = torch.zeros(4, 5, 6)
    heat[1, 2, 3] = -2
    slices = [cells for _, cells in views(torch.zeros(1, 4, 5, 6, dtype=torch.uint8), heat)]
    assert [cells.shape for cells in slices] == [(5, 6), (4, 6), (4, 5)]
    assert [cells.min() for cells in slices] == [-2, -2, -2]  # all three go through it


def test_red_is_for_and_blue_against():
    view, heat = np.full((1, 3, 3), 0.5), np.array([[1.0, 0.0, -1.0]])
    pixels = overlaid(view, heat, 1.0)[0]
    assert pixels[0, 0] > 0.7 > pixels[0, 2] and pixels[2, 2] > 0.7 > pixels[2, 0]
    np.testing.assert_allclose(pixels[1], 0.5)
    np.testing.assert_allclose(overlaid(view, 0 * heat, 0.0), 0.5)


@pytest.mark.parametrize("wide, lines", [(1, 1), (3, 3)])
def test_the_picture_has_all_samples(tmp_path, wide, lines):
    pair = (np.full((20, 20, 3), 0.2), np.linspace(-1, 1, 400).reshape(20, 20))
    save_attributions(tmp_path / "a.png", [("a $b$", True, [pair] * wide)] * 6)
    picture = matplotlib.image.imread(tmp_path / "a.png")
    assert picture.shape[0] == pytest.approx(385 * lines, rel=0.2)
    assert picture.shape[1] == pytest.approx(1056, rel=0.2)
